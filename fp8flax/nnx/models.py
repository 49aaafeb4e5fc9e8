"""Whole NNX models: ``quantize_model``, which gives ops to their modules, and ``report``.

A contraction has a module and the name of an attribute: the field of a layer, such as ``dot_general``, or
an attribute of ours, such as ``fp8_w``. ``quantize_model`` puts an op there, or a ``LeftWide`` with the
reason why not. ``report`` reads these attributes. NNX has no hook around methods. So a module with an op
for a written-out product gets a subclass of its class, whose methods run in an ``Interception``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8flax._compat.traces import current_handler, unwatched
from fp8flax._core.names import NOT_CONVERTED
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import GemmSizes, Op
from fp8flax._core.options import wrong_model
from fp8flax._linen.eval_init import program_of
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.param_origin import Origin
from fp8flax._model.report import ModelReport, report_of
from fp8flax._model.rules import DEFAULT, Rules, Site
from fp8flax._model.wrapped_module import subclass_of
from fp8flax.nnx import ops
from fp8flax.nnx.ops import Fp8Op


def nodes_of(model: Any, *types: Any) -> dict[tuple[str, ...], Any]:
    """Returns the nodes of these types in a model, by their paths."""
    return {tuple(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, types)}


def op_of(site: Site) -> Fp8Op | None:
    """Returns the op of a contraction, which is an attribute of the module; None if there is none."""
    found = getattr(site.module, site.name, None)
    return found if isinstance(found, Fp8Op) else None


def _plain(op: type[Op]) -> Callable[..., jax.Array]:
    """Returns the function for the field of a layer without FP8."""
    return jnp.einsum if op is Einsum else op.plain


def _layer_of(module: Any) -> tuple[type[Op], tuple[int, ...], Sequence[int], Sequence[int]]:
    """Returns what a layer with a field for an op computes, as its attributes say.

    This is the op, the shape of the kernel without the axes by which ``nnx.vmap`` stacked it, the axes of
    the kernel that the layer sums over, and those that only the kernel and the result have.
    """
    if isinstance(module, nnx.Linear):
        return DotGeneral, (module.in_features, module.out_features), [0], [1]
    if isinstance(module, nnx.LinearGeneral):
        shape = *module.batch_axis.values(), *module.in_features, *module.out_features
        start, end = len(module.batch_axis), len(shape) - len(module.out_features)
        return DotGeneral, shape, range(start, end), range(end, len(shape))
    shape = tuple(module.kernel_shape)
    if isinstance(module, nnx.Einsum):
        # The names of the axes of the input, the kernel and the result.
        lhs, rhs, result = re.split(",|->", module.einsum_str.replace("...", ""))
        summed = [i for i, name in enumerate(rhs) if name in lhs and name not in result]
        return Einsum, shape, summed, [i for i, name in enumerate(rhs) if name not in lhs]
    return Conv, shape, range(len(shape) - 1), [len(shape) - 1]


def _is_matmul(layer: nnx.Conv) -> bool:
    """Returns whether a convolution is a matmul for inputs of any size, because no windows overlap."""
    options = layer.strides, layer.kernel_dilation, layer.input_dilation
    strides, dilation, input_dilation = (np.array(1 if x is None else x) for x in options)
    are_apart = np.all((np.array(layer.kernel_size) - 1) * dilation < strides)
    return bool(are_apart and np.all(input_dilation == 1) and layer.feature_group_count == 1)


def layers_of(model: nnx.Module) -> Iterator[Site]:
    """Yields the contractions of layers that have a field for an op; kernels give the sizes."""
    for path, module in nodes_of(model, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv).items():
        row, shape, summed, free = _layer_of(module)
        kernel, function = module.kernel.get_value(), getattr(module, row.nnx_field)
        stacked, impossible = _stack_of(kernel.shape, shape)
        is_free = function in (None, jnp.einsum, row.plain) or isinstance(function, Fp8Op | LeftWide)
        if not is_free or getattr(module, "dot_general_cls", None) is not None:
            impossible = impossible or "it has an op of its own"
        k, n = (math.prod(shape[i] for i in axes) for axes in (summed, free))
        yield Site(
            path="/".join(path),
            module=module,
            kernel="/".join((*path, "kernel")),
            op=row,
            shapes=(tuple(shape[i] for i in summed), shape),
            dtypes=(jnp.dtype(getattr(module, "dtype", None) or kernel.dtype),) * 2,
            sizes=GemmSizes(1, 1, k, n),
            is_matmul=not isinstance(module, nnx.Conv) or _is_matmul(module),
            impossible=impossible,
            name=row.nnx_field,
            stacked=stacked,
        )


def _stack_of(whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """Returns the leading sizes of a kernel that ``part`` lacks.

    If it lacks others, state could not be stacked as the kernel is. The reason is returned, too.
    """
    stack = whole[: len(whole) - len(part)]
    is_leading = (*stack, *part) == whole
    return stack, None if is_leading else "its kernel is stacked along another axis than the first"


class ModuleCall(Interception):
    """One call of a method of a module. Contractions with an op of the module are computed by it."""

    def __init__(self, module: Any, method: str) -> None:
        super().__init__()
        self.frames.append(Frame(module, "" if method == "__call__" else method))
        params = nodes_of(module, nnx.Param)
        for x in params.values():
            if isinstance(x.get_value(), np.ndarray):  # which JAX would copy at each use
                x.set_value(jnp.asarray(x.get_value()))
        self.origins.add((path, x.get_value()) for path, x in params.items())
        self._dry_run = getattr(module, "_fp8_dry_run", None)
        """The ``DryRun`` that gets the contractions, or None."""
        if self._dry_run is not None:
            self.custom_vjps = self._dry_run.custom_vjps

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Computes a contraction by the op of the module for it, if there is one."""
        prefix = "fp8" if site.op is DotGeneral else f"fp8_{site.op.nnx_field}"
        site = site._replace(name=f"{prefix}_{site.name.replace('-', '_')}")
        if self._dry_run is not None:
            return self._dry_run.scope_of(site, kernel)
        op = getattr(site.module, site.name, None)
        return NOT_CONVERTED if op is None or isinstance(op, LeftWide) else by(op)


def watch(node: Any, make_call: type[ModuleCall] = ModuleCall) -> None:
    """Makes the methods of a module run in a ``ModuleCall``, perhaps of a subclass."""
    cls = getattr(type(node), "_fp8_base", type(node))
    is_pytree = not jax.tree_util.all_leaves([node])
    # Graphdefs compare classes, so the modules of equal models must have the same class.
    object.__setattr__(node, "__class__", subclass_of(cls, _watched_class, is_pytree, make_call))


def _watched_class(cls: Any, is_pytree: bool, make_call: type[ModuleCall]) -> Any:
    """Returns a subclass of the class of a module; its methods run in ``make_call(module, method)``."""
    body: dict[str, Any] = {"_fp8_make_call": make_call}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, method in vars(base).items():
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
                body[name] = _watched(method)
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), body, pytree=is_pytree)


def _watched(method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = current_handler()
        if isinstance(call, ModuleCall) and call.frames[-1].module is self:
            return method(self, *args, **kwargs)
        with unwatched(), self._fp8_make_call(self, method.__name__).watching():
            return method(self, *args, **kwargs)

    return watched


@dataclasses.dataclass(frozen=True)
class LeftWide:
    """The function of a contraction that ``quantize_model`` leaves wide, with a name for audits."""

    scope: str
    plain: Callable[..., jax.Array]
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes the contraction without FP8."""
        with jax.named_scope(self.scope or "model"), jax.named_scope(NOT_CONVERTED):
            return self.plain(*args, **kwargs)


class DryRun:
    """One abstract call of a copy of a model, which finds the contractions and converts none."""

    def __init__(self, model: Any, args: Any, kwargs: Any) -> None:
        self.found: dict[str, Site] = {}
        """The contractions by ``Site.scope``, in which each of them is computed."""
        self.custom_vjps: list[bool] = []
        """That of the calls of all modules; see ``Interception``."""
        self._modules = nodes_of(model, nnx.Module)
        self._layers = {layer.path: layer for layer in layers_of(model)}
        copy: Any = nnx.clone(model)
        for layer in layers_of(copy):
            setattr(layer.module, layer.name, nnx.static(_plain(layer.op)))
        for path, module in nodes_of(copy, nnx.Module).items():
            # An attribute of a dict or a list would be an item.
            if not isinstance(module, nnx.Dict | nnx.List | Fp8Op):
                module._fp8_path, module._fp8_dry_run = path, self
                watch(module)
        graphdef, state = nnx.split(copy)
        self.program = program_of(
            lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs), state, args, kwargs
        )
        """The jaxpr of the call."""

    def scope_of(self, site: Site, kernel: Origin | None) -> str:
        """Records a contraction of a module, and returns the scope to compute it in."""
        keys, source = site.module._fp8_path, None if kernel is None else kernel.sources[0]
        site = site._replace(path="/".join(keys), module=self._modules[keys])
        layer = self._layers.get(site.path)
        if layer is not None and (source is None or source.path == ("kernel",)):
            site = layer._replace(in_custom_vjp=site.in_custom_vjp)
        elif source is not None:
            whole = nodes_of(site.module, nnx.Param)[source.path].get_value().shape
            stacked, impossible = _stack_of(whole, source.shape)
            site = site._replace(
                kernel="/".join((*keys, *source.path)),
                impossible=site.impossible or impossible,
                stacked=stacked,
            )
        self.found[site.scope] = site
        return site.scope


def quantize(model: Any, inputs: Sequence[Any], options: Rules, rngs: nnx.Rngs | None = None) -> Any:
    """Returns a copy of an NNX model that computes in FP8; see ``fp8flax.quantize_model``."""
    given = nodes_of(model, Fp8Op)
    if converted := ["/".join(path) for path, op in given.items() if op._reason]:
        raise ValueError(
            f"{type(model).__name__} is converted already, or a part of it: the op at {converted[0]!r} "
            "comes from quantize_model. Call it once, on the whole model, with all rules at once."
        )
    copy: Any = nnx.clone(model)
    found = {layer.scope: layer for layer in layers_of(copy)}
    if inputs:
        found |= DryRun(copy, inputs, {}).found
    decided = [options.decide(site) for site in found.values()]
    options.check(decided, has_ops=bool(given))
    for site in decided:
        if op_of(site) is not None and (not site.converts or site.pattern == DEFAULT):
            continue  # the op that the user gave
        if site.converts:
            setattr(site.module, site.name, nnx.data(_new_op(site, options, rngs)))
            if site.name != site.op.nnx_field:
                watch(site.module)
        elif site.impossible is None:
            wide = LeftWide(site.path, _plain(site.op), site.reason)
            setattr(site.module, site.name, nnx.static(wide))
    for path, op in nodes_of(copy, Fp8Op).items():
        op._scope = "/".join(path[:-1] if path[-1] == op.row.nnx_field else path)
        op._reason = op._reason or "an op of its own"
    return copy


def _new_op(site: Site, options: Rules, rngs: nnx.Rngs | None) -> Fp8Op:
    """Returns the op of a contraction, with state that is stacked as its kernel is."""
    row = site.op
    form: dict[str, Any] = {"form": options.form} if row.plan else {}
    num_kernels = site.shapes[1][:1] if row.is_stack else ()
    op: Any = getattr(ops, row.name)(*num_kernels, recipe=site.recipe, **form)
    op._make_state(site.stacked, rngs)
    op._reason, op.has_kernel = site.reason, site.kernel is not None
    return cast(Fp8Op, op)


def report(model: Any, *args: Any, **kwargs: Any) -> ModelReport:
    """Returns the report of a converted NNX model; see ``fp8flax.report``."""
    if not any(op._reason for op in nodes_of(model, Fp8Op).values()):
        raise wrong_model(model, "come from fp8flax.quantize_model, not from freeze")
    run = DryRun(model, args, kwargs)
    return report_of(run.program, {scope: _decided(site) for scope, site in run.found.items()})


def _decided(site: Site) -> Site:
    """Returns a contraction of a converted model with the decision of ``quantize_model``."""
    there = getattr(site.module, site.name, None)
    if isinstance(there, Fp8Op):
        return site._replace(converts=True, recipe=there.recipe, reason=there._reason)
    if isinstance(there, LeftWide):
        return site._replace(reason=there.reason)
    if site.kernel is None or site.impossible is not None:
        return Rules().decide(site)
    reason = "written out by a module: give quantize_model inputs, so that it finds this contraction"
    return site._replace(reason=reason)
