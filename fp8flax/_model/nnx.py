"""Whole NNX models: ``quantize_model``, which gives ops to their modules, and ``report``.

A contraction has a module and the name of an attribute: the field of a layer, such as ``dot_general``, or
an attribute of ours, such as ``fp8_w``. ``quantize_model`` puts an op there, or a ``LeftWide`` with the
reason why not. ``report`` reads these attributes. NNX has no hook around methods. So a module that writes
a product out gets a subclass of its class, whose methods run in an ``Interception``.

``DryRun`` decides which contractions there are: those of the fields that the call really calls, and those
that are written out, each in the module whose method computes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._compat.traces import current_handler, trace_behind, unwatched
from fp8flax._core.autocast import autocast, recipe_in_use
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.names import NOT_CONVERTED, SWITCHED_OFF
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Op
from fp8flax._core.options import wrong_model
from fp8flax._linen.conversion import having
from fp8flax._linen.eval_init import program_of
from fp8flax._model.interception import GIVEN, Frame, Interception, given_site, in_module, scope_in
from fp8flax._model.param_origin import Origin
from fp8flax._model.report import ModelReport, report_of
from fp8flax._model.rules import DEFAULT, Rules, Site
from fp8flax._model.wrapped_module import subclass_of
from fp8flax._nnx import ops
from fp8flax._nnx.ops import Fp8Op, plain_of

ONLY_WITH_INPUTS = "only a call shows what it computes: give quantize_model inputs that reach it"
"""The reason for contractions that ``quantize_model`` has not seen in a call."""


def nodes_of(model: Any, *types: Any) -> dict[tuple[str, ...], Any]:
    """Returns the nodes of these types in a model, by their paths."""
    return {tuple(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, types)}


def op_of(site: Site) -> Fp8Op | None:
    """Returns the op of a contraction, which is an attribute of the module; None if there is none.

    The contraction of an op that a module of the user calls has this op as its module.
    """
    found = getattr(site.module, site.name, site.module)
    return found if isinstance(found, Fp8Op) else None


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
            path=path,
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
    """One call of a method of a module, and the calls of methods inside of it that run in the same trace.

    Contractions with an op of the module that computes them are computed by this op.
    """

    opens = ("jit", "remat2")
    can_be_off = True
    """Whether modules compute without a call while FP8 is switched off."""
    kernels: tuple[type, ...] = (nnx.Param,)
    """The types of the variables that may be kernels."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        nodes = nodes_of(module, nnx.Module, nnx.Variable)
        self.modules = {id(x): x for x in nodes.values() if isinstance(x, nnx.Module)}
        """The modules that are a part of the call, by their identities."""
        self._below: list[dict[tuple[str, ...], tuple[str, ...]]] = []
        """For each frame, the paths of variables in its module, by their first paths in the call."""
        self.variables = {path: x for path, x in nodes.items() if isinstance(x, nnx.Variable)}
        for x in self.variables.values():
            if isinstance(x, nnx.Param) and isinstance(x.get_raw_value(), np.ndarray):
                x.set_raw_value(jnp.asarray(x.get_raw_value()))  # JAX would copy it at each use
        self._trace = trace_behind()
        self._dry_run = getattr(module, "_fp8_dry_run", None)
        """The ``DryRun`` that gets the contractions, or None."""
        if self._dry_run is not None:
            self.custom_vjps = self._dry_run.custom_vjps

    @contextlib.contextmanager
    def in_frame(self, module: Any, method: str) -> Iterator[None]:
        """A context in which a method of a module runs."""
        is_new = not self.frames or self.frames[-1].module is not module  # the methods share a frame
        if is_new:
            below = {id(x): path for path, x in nodes_of(module, nnx.Variable).items()}
            own = {path: x for path, x in self.variables.items() if id(x) in below}
            for path, x in own.items():  # transformations may have written a new array into it
                kind = "" if isinstance(x, self.kernels) else f"a variable of the type {type(x).__name__}"
                self.origins.add([(path, x.get_raw_value())], kind)
            self._below.append({path: below[id(x)] for path, x in own.items()})
            self.frames.append(Frame(module, "" if method == "__call__" else method))
        try:
            with in_module(module._fp8_path if self._dry_run else None):
                yield
        finally:
            if is_new:
                self.frames.pop()
                self._below.pop()

    def origin_of(self, value: Any) -> Origin | None:
        """Returns the origin of a value with paths from the running module; None if it is not below it."""
        origin, below = super().origin_of(value), self._below[-1]
        if origin is None or any(source.path not in below for source in origin.sources):
            return None
        return origin._replace(sources=tuple(x._replace(path=below[x.path]) for x in origin.sources))

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Computes a contraction by the op of the module for it, if there is one."""
        prefix = "fp8_" if site.op is DotGeneral else f"fp8-{site.op.nnx_field}-"
        site = site._replace(name=prefix + site.name)
        if self._dry_run is not None:
            return self._dry_run.scope_of(site, kernel)
        op = getattr(site.module, site.name, None)
        if op is None or isinstance(op, LeftWide) or site.impossible is not None:
            return NOT_CONVERTED
        if not isinstance(op, Fp8Op):  # of a frozen module
            return by(op)
        if op._is_off:
            return SWITCHED_OFF
        with having(op, _trace=self._trace):
            return by(op)


def has_methods(node: Any) -> bool:
    """Returns whether a module may be watched; an attribute of a dict or a list would be an item."""
    return not isinstance(node, nnx.Dict | nnx.List | Fp8Op)


def watch(node: Any, make_call: type[ModuleCall] = ModuleCall) -> None:
    """Makes the methods of a module run in a ``ModuleCall``, perhaps of a subclass."""
    cls = getattr(type(node), "_fp8_base", type(node))
    is_pytree = not jax.tree_util.all_leaves([node])
    # Graphdefs compare classes, so the modules of equal models must have the same class.
    object.__setattr__(node, "__class__", subclass_of(cls, _watched_class, is_pytree, make_call))


def _watched_class(cls: Any, is_pytree: bool, make_call: type[ModuleCall]) -> Any:
    """Returns a subclass of the class of a module; its methods run in ``make_call(module)``."""
    body: dict[str, Any] = {"_fp8_make_call": make_call}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, method in vars(base).items():
            # Decorators such as nnx.jit return other callables than functions, which Python binds, too.
            is_method = callable(method) and hasattr(type(method), "__get__")
            is_method &= not isinstance(method, type | staticmethod)
            if is_method and (name == "__call__" or not name.startswith("_")):
                body[name] = _watched(name, method)
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), body, pytree=is_pytree)


def _watched(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, make_call, call = method.__get__(self, type(self)), self._fp8_make_call, current_handler()
        if make_call.can_be_off and recipe_in_use(None, Fp8Op.default_recipe) is None:
            with jax.named_scope(SWITCHED_OFF):
                return run(*args, **kwargs)
        if type(call) is make_call and id(self) in call.modules:
            with call.in_frame(self, name):
                return run(*args, **kwargs)
        call = make_call(self)
        with unwatched(), call.watching(), call.in_frame(self, name):
            return run(*args, **kwargs)

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
        self.found: dict[Hashable, Site] = {}
        """The contractions by their keys. Each is computed in its scope; see ``scope_in``."""
        self.custom_vjps: list[bool] = []
        """That of the calls of all modules; see ``Interception``."""
        self._modules = nodes_of(model, nnx.Module)
        copy: Any = nnx.clone(model)
        for path, op in nodes_of(copy, Fp8Op).items():
            op._on_op = nnx.static(functools.partial(self._run_given, path))
        for site, layer in zip([*layers_of(model)], [*layers_of(copy)]):
            setattr(layer.module, layer.name, nnx.static(functools.partial(self._run_layer, site)))
            if hasattr(layer.module, "dot_general_cls"):
                layer.module.dot_general_cls = None
        for path, module in nodes_of(copy, nnx.Module).items():
            if has_methods(module):
                module._fp8_path, module._fp8_dry_run = path, self
                watch(module)
        graphdef, state = nnx.split(copy)
        self._inputs = [id(x) for x in jax.tree.leaves(state)]
        with autocast():  # finds the same contractions while FP8 is switched off
            self.program = program_of(
                lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs),
                *(state, args, kwargs),
            )
            """The jaxpr of the call."""

    @functools.cached_property
    def needed(self) -> set[int]:
        """The identities of the arrays of the model that the call needs."""
        return {x for x, is_needed in zip(self._inputs, needed_inputs(self.program)) if is_needed}

    def _run_layer(self, site: Site, *args: Any, **kwargs: Any) -> jax.Array:
        """Records that a layer calls its field, and computes its contraction."""
        site = site._replace(in_custom_vjp=any(self.custom_vjps))
        with jax.named_scope(self._record(site)):
            return plain_of(site.op)(*args, **kwargs)

    def _run_given(self, path: tuple[str, ...], op: Fp8Op, *args: Any, **kwargs: Any) -> jax.Array:
        """Records that a module calls an op that the user gave to it, and computes its contraction."""
        site = given_site(op, path[:-1], None, *args)._replace(module=self._modules[path])
        with jax.named_scope(self._record(site)):
            return op.row.plain(*args, **kwargs)

    def scope_of(self, site: Site, kernel: Origin | None) -> str:
        """Records a contraction that a module writes out, and returns the scope to compute it in."""
        keys = site.module._fp8_path
        site = site._replace(path=keys, module=self._modules[keys])
        if kernel is not None:
            source = kernel.sources[0]
            whole = nodes_of(site.module, nnx.Param)[source.path].get_value().shape
            stacked, impossible = _stack_of(whole, source.shape)
            site = site._replace(
                kernel="/".join((*keys, *source.path)),
                impossible=site.impossible or impossible,
                stacked=stacked,
            )
        return self._record(site)

    def _record(self, site: Site) -> str:
        """Records a contraction, and returns the scope to compute it in."""
        self.found[site.key] = site
        return scope_in(self.found, site)


def quantize(model: Any, inputs: Any, keyword_inputs: Any, options: Rules, rngs: Any = None) -> Any:
    """Returns a copy of an NNX model that computes in FP8; see ``fp8flax.quantize_model``."""
    given = nodes_of(model, Fp8Op)
    if converted := ["/".join(path) for path, op in given.items() if op._reason]:
        raise ValueError(
            f"{type(model).__name__} is converted already, or a part of it: the op at {converted[0]!r} "
            "comes from quantize_model. Call it once, on the whole model, with all rules at once."
        )
    copy: Any = nnx.clone(model)
    decided = [options.decide(site) for site in _contractions(copy, inputs, keyword_inputs)]
    options.check(decided, has_ops=bool(given))
    written_out = [site for site in decided if site.name != site.op.nnx_field]
    for site in written_out if any(site.converts for site in written_out) else ():
        watch(site.module)
    # Several contractions may have one place. One that is converted comes last, and decides.
    places = {(id(x.module), x.name): x for x in sorted(decided, key=lambda x: x.converts)}
    for site in places.values():
        if op_of(site) is not None and (not site.converts or site.pattern == DEFAULT):
            continue  # the op that the user gave
        if site.converts:
            setattr(site.module, site.name, nnx.data(_new_op(site, options, rngs)))
        elif site.impossible is None:
            wide = LeftWide(site.place, plain_of(site.op), site.reason)
            setattr(site.module, site.name, nnx.static(wide))
    for path, op in nodes_of(copy, Fp8Op).items():
        op._scope = "/".join(path[:-1] if path[-1] == op.row.nnx_field else path)
        op._reason = op._reason or GIVEN
    return copy


def _contractions(model: Any, inputs: Any, keyword_inputs: Any) -> Iterator[Site]:
    """Yields the contractions of a model: those of a call with these inputs, if there are inputs.

    A layer of Flax that the call does not reach is also there, because another method may call it.
    """
    run = DryRun(model, inputs, keyword_inputs) if inputs or keyword_inputs else None
    for layer in layers_of(model):
        is_flax_own = type(layer.module).__call__.__module__.startswith("flax.")
        if run is None:
            yield layer if is_flax_own else layer._replace(impossible=ONLY_WITH_INPUTS)
        elif layer.key in run.found:
            yield run.found[layer.key]
        elif is_flax_own and id(layer.module.kernel.get_value()) not in run.needed:
            yield layer
    if run is not None:
        yield from (x for x in run.found.values() if x.name.startswith("fp8"))


def _new_op(site: Site, options: Rules, rngs: nnx.Rngs | None) -> Fp8Op:
    """Returns the op of a contraction, with state that is stacked as its kernel is."""
    row = site.op
    num_kernels = site.shapes[1][:1] if row.is_stack else ()
    op: Any = getattr(ops, row.name)(*num_kernels, recipe=site.recipe, **options.options_of(row))
    op._make_state(site.stacked, rngs)
    op._reason, op.has_kernel = site.reason, site.kernel is not None
    return cast(Fp8Op, op)


def report(model: Any, *args: Any, **kwargs: Any) -> ModelReport:
    """Returns the report of a converted NNX model; see ``fp8flax.report``."""
    given = nodes_of(model, Fp8Op).values()
    if not any(op._reason for op in given):
        raise wrong_model(model, "come from fp8flax.quantize_model, not from freeze")
    run = DryRun(model, args, kwargs)
    ran = {id(op_of(site)) for site in run.found.values()}
    not_run = [op._scope for op in given if id(op) not in ran]
    return report_of(run.program, {key: _decided(site) for key, site in run.found.items()}, not_run)


def _decided(site: Site) -> Site:
    """Returns a contraction of a converted model with the decision of ``quantize_model``."""
    op, there = op_of(site), getattr(site.module, site.name, None)
    if op is not None and site.impossible is None:
        return site._replace(converts=True, recipe=op.recipe, reason=op._reason)
    if isinstance(there, LeftWide):
        return site._replace(reason=there.reason)
    if site.kernel is None or site.impossible is not None:
        return Rules().decide(site)
    return site._replace(reason=ONLY_WITH_INPUTS)
