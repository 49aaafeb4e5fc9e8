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
from flax import nnx

from fp8flax._compat.traces import current_handler, unwatched
from fp8flax._core.names import NOT_CONVERTED, RNG
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import GemmSizes, Op
from fp8flax._core.options import wrong_model
from fp8flax._linen.eval_init import program_of
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.param_origin import Origin
from fp8flax._model.report import ModelReport, report_of
from fp8flax._model.rules import BY_DEFAULT, Decision, Rules, Site, why_unconverted
from fp8flax._model.wrapped_module import made_once
from fp8flax.nnx.ops import OPS, Fp8Op, OverwriteWithGradient


def op_of(site: Site) -> Fp8Op | None:
    """Returns the op of a contraction, which is an attribute of the module; None if there is none."""
    found = getattr(site.module, site.name, None)
    return found if isinstance(found, Fp8Op) else None


def _plain(op: type[Op]) -> Callable[..., jax.Array]:
    """Returns the function for the field of a layer without FP8."""
    return jnp.einsum if op is Einsum else op.plain


def _layer_of(module: Any) -> tuple[type[Op], tuple[int, ...], Sequence[int], Sequence[int]] | None:
    """Returns what a layer with a field for an op computes, as its attributes say.

    This is the op, the shape of the kernel without the axes by which ``nnx.vmap`` stacked it, the axes of
    the kernel that the layer sums over, and those that are in both operands and in the result.
    """
    if isinstance(module, nnx.Linear):
        return DotGeneral, (module.in_features, module.out_features), [0], []
    if isinstance(module, nnx.LinearGeneral):
        batch, inputs = tuple(module.batch_axis.values()), tuple(module.in_features)
        summed = range(len(batch), len(batch) + len(inputs))
        return DotGeneral, (*batch, *inputs, *module.out_features), summed, range(len(batch))
    if isinstance(module, nnx.Einsum):
        # The names of the axes of the input, the kernel and the result.
        lhs, rhs, result = re.split(",|->", module.einsum_str.replace("...", ""))
        shared = [i for i, name in enumerate(rhs) if name in lhs]
        both = [i for i in shared if rhs[i] in result]
        return Einsum, tuple(module.kernel_shape), [i for i in shared if i not in both], both
    if isinstance(module, nnx.Conv):
        kernel = tuple(module.kernel_shape)
        return Conv, kernel, range(len(kernel) - 1), []
    return None


def _is_matmul(layer: nnx.Conv) -> bool:
    """Returns whether a convolution is a matmul for inputs of any size, because no windows overlap."""

    def each(value: Any) -> tuple[int, ...]:
        value = 1 if value is None else value
        return (value,) * len(layer.kernel_size) if isinstance(value, int) else tuple(value)

    windows = zip(layer.kernel_size, each(layer.kernel_dilation), each(layer.strides))
    are_apart = all((size - 1) * dilation < stride for size, dilation, stride in windows)
    return are_apart and layer.feature_group_count == 1 and set(each(layer.input_dilation)) == {1}


def layers_of(model: nnx.Module) -> Iterator[Site]:
    """Yields the contractions of layers that have a field for an op; kernels give the sizes."""
    for path, node in nnx.iter_graph(model):
        module: Any = node
        layer = _layer_of(module)
        if layer is None:
            continue
        row, shape, summed, batch_axes = layer
        kernel = module.kernel.get_value()
        stacked = _stack_of(kernel.shape, shape)
        k, batch = (math.prod(shape[i] for i in axes) for axes in (summed, batch_axes))
        place, field = "/".join(map(str, path)), str(row.nnx_field)
        function = getattr(module, field)
        is_free = function in (None, jnp.einsum, row.plain) or isinstance(function, Fp8Op | LeftWide)
        is_free = is_free and getattr(module, "dot_general_cls", None) is None
        yield Site(
            path=place,
            module=module,
            kernel=f"{place}/kernel".lstrip("/"),
            op=row,
            shapes=(tuple(shape[i] for i in summed), shape),
            dtypes=(jnp.dtype(getattr(module, "dtype", None) or kernel.dtype),) * 2,
            sizes=GemmSizes(batch, 1, k, math.prod(shape) // max(1, k * batch)),
            is_matmul=not isinstance(module, nnx.Conv) or _is_matmul(module),
            impossible=(None if is_free else "it has an op of its own") if stacked is not None else STACKED,
            name=field,
            stacked=stacked or (),
        )


STACKED = "its kernel is stacked along another axis than the first"
"""The reason why no op can be at a place whose state could not be stacked as its kernel is."""


def _stack_of(whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the leading sizes of an array that ``part`` lacks; None if it lacks others."""
    stack = whole[: len(whole) - len(part)]
    return stack if (*stack, *part) == whole else None


class ModuleCall(Interception):
    """One call of a method of a module. Contractions with an op of the module are computed by it."""

    is_nnx = True

    def __init__(self, module: Any, method: str) -> None:
        super().__init__()
        self.frame = Frame((), module, "" if method == "__call__" else method)
        self._dry_run = getattr(module, "_fp8_dry_run", None)
        """The ``DryRun`` that gets the contractions, or None."""
        if self._dry_run is not None:
            self.custom_vjps = self._dry_run.custom_vjps

    def look_for_params(self) -> None:
        """Records the parameters of the module and of the modules below it."""
        if self.frame.num_params < 0:
            params = params_of(self.frame.module)
            self.frame.num_params = len(params)
            self.origins.add((tuple(map(str, path)), x.get_value()) for path, x in params)

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Computes a contraction by the op of the module for it, if there is one."""
        prefix = "fp8" if site.op is DotGeneral else f"fp8_{site.op.nnx_field}"
        site = site._replace(name=f"{prefix}_{site.name.replace('-', '_')}")
        if self._dry_run is not None:
            return self._dry_run.scope_of(site, kernel)
        op = op_of(site)
        return NOT_CONVERTED if op is None else by(op)


def params_of(module: Any) -> list[tuple[Any, Any]]:
    """Returns the parameters in a module and the modules below it, each with its path."""
    return [(path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Param)]


def watch(node: Any) -> None:
    """Makes the methods of a module run in a ``ModuleCall``."""
    cls = getattr(type(node), "_fp8_base", type(node))
    is_pytree = not jax.tree_util.all_leaves([node])
    # Graphdefs compare classes, so the modules of equal models must have the same class.
    object.__setattr__(node, "__class__", _watched_class(cls, is_pytree))


@made_once
def _watched_class(cls: Any, is_pytree: bool) -> Any:
    """Returns a subclass of the class of a module; its methods run in a ``ModuleCall``."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduced,
        "_fp8_base": cls,
    }
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
        if isinstance(call, ModuleCall) and call.frame.module is self:
            return method(self, *args, **kwargs)
        with unwatched(), ModuleCall(self, method.__name__).watching():
            return method(self, *args, **kwargs)

    return watched


def _reduced(self: Any, protocol: Any) -> Any:
    """Pickles a module with its own class, because the subclass cannot be imported by its name."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
    return _restored, (object.__new__(self._fp8_base),), *state


def _restored(node: Any) -> Any:
    watch(node)
    return node


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
        self._nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
        self._layers = {layer.path: layer for layer in layers_of(model)}
        copy: Any = nnx.clone(model)
        for layer in layers_of(copy):
            if isinstance(getattr(layer.module, layer.name), Fp8Op | LeftWide | None):
                setattr(layer.module, layer.name, nnx.static(_plain(layer.op)))
        for keys, node in list(nnx.iter_graph(copy)):
            # An attribute of a dict or a list would be an item.
            if isinstance(node, nnx.Module) and not isinstance(node, nnx.Dict | nnx.List | Fp8Op):
                module: Any = node
                module._fp8_path, module._fp8_dry_run = "/".join(map(str, keys)), self
                watch(module)
        graphdef, state = nnx.split(copy)
        self.program = program_of(
            lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs), state, args, kwargs
        )
        """The jaxpr of the call."""

    def scope_of(self, site: Site, kernel: Origin | None) -> str:
        """Records a contraction of a module, and returns the scope to compute it in."""
        path = site.module._fp8_path
        found = self._layers.get(path)
        if found is not None and (kernel is None or kernel.sources[0].path == ("kernel",)):
            found = found._replace(in_custom_vjp=site.in_custom_vjp)
        else:
            node, stacked = self._nodes[path], cast(tuple[int, ...] | None, ())
            if kernel is not None:
                source = kernel.sources[0]
                whole = {tuple(map(str, keys)): x for keys, x in params_of(node)}[source.path]
                stacked = _stack_of(whole.get_value().shape, source.shape)
                site = site._replace(kernel="/".join((*filter(None, [path]), *source.path)))
            impossible = site.impossible or (STACKED if stacked is None else None)
            found = site._replace(path=path, module=node, impossible=impossible, stacked=stacked or ())
        self.found[found.scope] = found
        return found.scope


def quantize(model: Any, inputs: Sequence[Any], options: Rules, rngs: nnx.Rngs | None = None) -> Any:
    """Returns a copy of an NNX model that computes in FP8; see ``fp8flax.quantize_model``."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Fp8Op) and node._reason:
            raise ValueError(
                f"{type(model).__name__} is converted already, or a part of it: the op at "
                f"{'/'.join(map(str, path))!r} comes from quantize_model. Call it once, on the whole model "
                "without conversions, with all rules at once."
            )
    copy: Any = nnx.clone(model)
    found = {layer.scope: layer for layer in layers_of(copy)}
    if inputs:
        found |= DryRun(copy, inputs, {}).found
    decided = [(site, options.decide(site)) for site in found.values()]
    options.check_matched(decided)
    for site, decision in decided:
        if op_of(site) is not None and (not decision.converts or decision.reason == BY_DEFAULT):
            continue  # the op that the user gave
        if decision.converts:
            setattr(site.module, site.name, nnx.data(_new_op(site, decision, options, rngs)))
            if site.name != site.op.nnx_field:
                watch(site.module)
        elif site.impossible is None:
            setattr(
                site.module, site.name, nnx.static(LeftWide(site.path, _plain(site.op), decision.reason))
            )
    fields = {row.nnx_field for row in OPS}
    ops = [(path, node) for path, node in nnx.iter_graph(copy) if isinstance(node, Fp8Op)]
    if not ops:
        raise ValueError(why_unconverted(decided))
    for path, op in ops:
        op._scope = "/".join(map(str, path[:-1] if path[-1] in fields else path))
        op._reason = op._reason or "an op of its own"
    return copy


def _new_op(site: Site, decision: Decision, options: Rules, rngs: nnx.Rngs | None) -> Fp8Op:
    """Returns the op of a contraction, with state that is stacked as its kernel is."""
    row = site.op
    form: dict[str, Any] = {"form": options.form} if row.has_form else {}
    num_kernels = site.shapes[1][:1] if row.is_stack else ()
    op: Any = OPS[row](*num_kernels, recipe=decision.recipe, **form)
    op._reason = decision.reason
    in_use = op._recipe_in_use()
    if rngs is not None and in_use is not None and in_use.gemms.is_random:
        op.rngs = rngs[RNG].split(site.stacked) if site.stacked else rngs[RNG].fork()
    for value in vars(op).values():
        if isinstance(value, OverwriteWithGradient):
            array = value.get_value()
            value.set_value(jnp.broadcast_to(array, (*site.stacked, *array.shape)))
    return cast(Fp8Op, op)


def report(model: Any, *args: Any, **kwargs: Any) -> ModelReport:
    """Returns the report of a converted NNX model; see ``fp8flax.report``."""
    if not any(isinstance(node, Fp8Op) and node._reason for _, node in nnx.iter_graph(model)):
        raise wrong_model(model, "come from fp8flax.quantize_model, not from freeze")
    run = DryRun(model, args, kwargs)
    return report_of(run.program, {scope: (site, _decision_of(site)) for scope, site in run.found.items()})


def _decision_of(site: Site) -> Decision:
    """Returns the decision of ``quantize_model`` about a contraction of a converted model."""
    there = getattr(site.module, site.name, None)
    if isinstance(there, Fp8Op):
        return Decision(True, there.recipe, there._reason)
    if isinstance(there, LeftWide):
        return Decision(False, None, there.reason)
    if site.kernel is None or site.impossible is not None:
        return Decision(False, None, Rules().decide(site).reason)
    reason = "written out by a module: give quantize_model inputs, so that it finds this contraction"
    return Decision(False, None, reason)
