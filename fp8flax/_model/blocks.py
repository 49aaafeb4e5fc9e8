"""Modules that a rule says are one block: proves that they are, and computes them so.

While such a module runs, its layers run too, each with its op, as without the rule: what they declare and
what is seen of them stays as it is. What its last layer returns is then replaced by what the block makes of
the input of the first ones. XLA removes what the layers have computed in vain.

The proof is one of values: the module is traced once more, with arguments in the places of what its first
layers return. What reaches the last layer, and its derivative, is evaluated at a few points, and compared
with what ``FusedMLP`` says.

Internals: ``jax._src.source_info_util``, for the scopes around a module; and ``_call_wrapped_method`` of
Linen modules, which runs a method of a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.tracers import current_trace
from jax._src import source_info_util

from fp8flax._core.delayed import ScalingState, unpacked_states
from fp8flax._core.differentiable import States
from fp8flax._core.mlp import ACTIVATIONS, hidden, is_one
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, ROLES, state_leaf_names
from fp8flax._core.recipes import Recipe
from fp8flax._linen.mlp import Given, as_one
from fp8flax._linen.op import Fp8Op
from fp8flax._model.elementwise import Unknown, at_points
from fp8flax._model.interception import Interception
from fp8flax._model.rules import FusedMLP

# Where activations differ: in their tails, beyond them, and on both sides of where they bend. Not where a
# derivative is zero or has a step. The last ones are for what is clipped, or taken for zero. (Below -300
# the square of exp(-x) is no float64.)
_GATES = np.array(
    [
        *(-3.5, -30, -3.0, -2.2, -1.8, -1.0, -0.4, -0.1, 0.1, 0.3, 0.9, 1.4, 2.2, 3.0, 6.0, 30),
        *(1e-4, -1e-4, 60, -300, 100, 1e3, 1e5, 1e5, 2.0, 0.5),
    ]
)
_UPS = np.array(
    [
        *(1.5, -0.7, -2.6, 0.9, 4.0, -1.2, 0.02, 3.3, -20.0, 0.6, -0.3, 1.9, -3.1, 2.4, -0.8, 1.1),
        *(1.3, 2.0, 1.0, 5.0, -150, 1e3, -1e5, 1e-4, 3e-4, 1e5),
    ]
)
_GRADS = np.array(
    [
        *(0.7, -1.3, 2.0, 1.0, -0.6, 0.8, 1.7, -2.1, 0.5, 1.2, -0.9, 3.0, 1.0, -0.4, 0.6, -1.5),
        *(1.1, 0.9, 1e-4, 1e3, 150, 1e-4, -1e5, 1.0, 1e4, 0.3),
    ]
)
_SMALLEST = 1e-6
"""Differences below this are none: tails, where terms cancel."""


class _Seen(NamedTuple):
    """A layer that was called."""

    layer: nn.Dense
    input: Any
    output: jax.Array


@dataclasses.dataclass
class _Block:
    """A call of a module that a rule takes for a block."""

    said: FusedMLP
    module: nn.Module
    method: Callable[..., Any]
    """The module's own code; called with a module first."""
    args: Any
    kwargs: Any
    stack: Any
    """The scopes around it."""
    seen: dict[str, _Seen] = dataclasses.field(default_factory=dict)
    """By name, in the order of the calls."""
    ops: dict[str, tuple[Fp8Op, Recipe]] = dataclasses.field(default_factory=dict)
    """By the layer's name, with the recipe in use."""
    called: dict[str, None] = dataclasses.field(default_factory=dict)
    """Names of the modules in it that were called, in order."""

    @property
    def path(self) -> tuple[str, ...]:
        """The module's."""
        scope: Any = self.module.scope
        return scope.path

    def name_of(self, path: tuple[str, ...]) -> str | None:
        """Returns the name of the layer at this path; None if it is none of the block's."""
        return path[-1] if path[:-1] == self.path and path[-1:] and path[-1] in self.said.names else None

    def refused(self, why: str, hint: str = "") -> ValueError:
        """Returns the error that says why the module is not what the rule says."""
        return ValueError(
            f"The rules of quantize_model say that {'/'.join(self.path) or 'the model itself'} computes "
            f"{_formula(self.said)}, but it does not: {why}. {hint or 'Correct the rule, or leave it out.'}"
        )


def _formula(said: FusedMLP) -> str:
    first, *others = (f"{name}(x)" for name in said.into)
    return f"{said.out_of}({' * '.join([f'{said.activation}({first})', *others])})"


class Blocks:
    """The blocks of one call of a model."""

    def __init__(self, block_of: Callable[[str], FusedMLP | None], interception: Interception) -> None:
        """Takes what returns the rule for a module's path, and what looks into the model's methods."""
        self._block_of = block_of
        self._interception = interception
        self._running: list[_Block] = []

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which blocks are computed as one."""

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            scope: Any = context.module.scope
            is_call = context.method_name == "__call__" and not isinstance(context.module, Fp8Op)
            if self._interception.is_passing or scope is None or not is_call:
                return call(*args, **kwargs)
            block = self._running[-1] if self._running else None
            if block is not None and scope.path == block.path:  # super().__call__
                return call(*args, **kwargs)
            if block is not None and scope.path[:-1] == block.path:
                block.called[scope.path[-1]] = None
            if block is not None and (name := block.name_of(scope.path)) is not None:
                if call is not context.orig_method:  # those around all of the model are part of the proof
                    raise block.refused(f"{name} runs in nn.intercept_methods inside of the model")
                return self._run_layer(block, name, context.module, call, args, kwargs)
            said = self._block_of("/".join(scope.path))
            if said is None or not self._interception.provenance.has_place(scope.root):
                return call(*args, **kwargs)
            method: Any = context.orig_method
            stack = source_info_util.current_name_stack()
            block = _Block(said, context.module, method.func, args, kwargs, stack)
            self._running.append(block)
            try:
                result = call(*args, **kwargs)
            finally:
                self._running.pop()
            if missing := [name for name in said.names if name not in block.seen]:
                called = ", ".join(block.called) or "none"
                raise block.refused(
                    f"it calls these modules of its own: {called}; and not {', '.join(missing)}"
                )
            return result

        return nn.intercept_methods(around)

    def on_op(self, op: Fp8Op, recipe: Recipe) -> None:
        """Remembers the op of a layer."""
        block = self._running[-1] if self._running else None
        name = None if block is None else block.name_of(op.path[:-1])
        if block is not None and name is not None:
            block.ops[name] = op, recipe

    def _run_layer(self, block: _Block, name: str, layer: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Returns what a layer computes, and of the last one what the block does."""
        _check_plain(block, name, layer)
        if name in block.seen:
            raise block.refused(f"it calls {name} more than once")
        inputs = [*args, *kwargs.values()]
        x = inputs[0]
        block.seen[name] = seen = _Seen(layer, x, call(*args, **kwargs))
        first, *others = block.said.into
        if name != block.said.out_of:
            if any(one.input is not x for one in block.seen.values()):
                raise block.refused(
                    f"{' and '.join(block.seen)} take different arrays",
                    "If they are equal, compute them once and give the same array to both.",
                )
            return seen.output
        if missing := [one for one in (first, *others) if one not in block.seen]:
            raise block.refused(f"it calls {name}, but not {' and '.join(missing)} before it")
        _check_alike(block)
        with self._interception.unseen():
            _prove(block)
        if not _can_be_one(block):
            return seen.output
        with self._interception.unseen(), source_info_util.set_name_stack(block.stack):
            return _computed(block)


def _check_plain(block: _Block, name: str, layer: Any) -> None:
    """Raises where a layer is not an ``nn.Dense`` with nothing of its own."""
    if type(layer) is not nn.Dense:
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise block.refused(f"{name} is a {kind}, and not an nn.Dense")
    for field in ("dot_general", "dot_general_cls", "precision"):
        if getattr(layer, field) is not None:
            raise block.refused(f"{name} has {field}={getattr(layer, field)!r}")
    if layer.promote_dtype is not nn.Dense.promote_dtype:
        raise block.refused(f"{name} has a promote_dtype of its own")


def _check_alike(block: _Block) -> None:
    """Raises where the layers differ in what a block has one of."""
    layers = {name: seen.layer for name, seen in block.seen.items()}
    for field in ("dtype", "param_dtype"):
        given = {name: getattr(layer, field) for name, layer in layers.items()}
        if len({dtype and jnp.dtype(dtype) for dtype in given.values()}) > 1:
            found = ", ".join(f"{dtype and jnp.dtype(dtype)} of {name}" for name, dtype in given.items())
            raise block.refused(f"its layers differ in {field}: {found}")
    if len({layers[name].use_bias for name in block.said.into}) > 1:
        raise block.refused(f"one of {' and '.join(block.said.into)} has a bias, and the other has none")


def _can_be_one(block: _Block) -> bool:
    """Tells whether nothing stands against computing all layers as one."""
    ops = [block.ops.get(name) for name in block.said.names]
    gemms = {op[1].gemms for op in ops if op is not None}
    first, layer = block.seen[block.said.into[0]], block.seen[block.said.out_of].layer
    return (
        None not in ops
        and len(gemms) == 1
        and is_one(gemms.pop(), jnp.asarray(first.input), layer.dtype or layer.param_dtype)
        and not block.module.is_initializing()
    )


def _computed(block: _Block) -> jax.Array:
    said, last = block.said, block.seen[block.said.out_of]
    _, recipe = block.ops[said.out_of]
    given = [_given(block.seen[name].layer, block.ops[name][0]) for name in said.names]
    x = jnp.asarray(block.seen[said.into[0]].input)
    out = as_one(x, given, recipe, said.activation, said.names, last.layer.dtype)
    if out.dtype != last.output.dtype:  # where the layers have no dtype of their own
        raise block.refused(
            f"{said.out_of} returns {last.output.dtype}, where it would return {out.dtype}",
            "Give the layers a dtype.",
        )
    return out


def _given(layer: nn.Dense, op: Fp8Op) -> Given:
    """Returns what a layer computes with; its op has declared its state."""
    kernel = nn.meta.unbox(layer.get_variable(PARAMS, "kernel"))
    bias = nn.meta.unbox(layer.get_variable(PARAMS, "bias")) if layer.use_bias else None
    read, states = partial(op.get_variable, OVERWRITE_WITH_GRADIENT), {}
    for role in ROLES:
        scale, history = state_leaf_names(role)
        states[role] = ScalingState(read(scale), read(history))
    return Given(kernel, bias, States(**unpacked_states(states)))


class _Stopped(Exception):  # noqa: N818  # not an error
    """A layer was reached: the last one, or one that runs in a transformation inside of the module."""

    def __init__(self, name: str, *inputs: Any) -> None:
        super().__init__()
        self.name = name
        self.inputs = inputs


def _prove(block: _Block) -> None:
    """Raises where the last layer takes anything else than the rule says, or passes on other gradients."""
    said, last = block.said, block.seen[block.said.out_of].input
    dense = [block.seen[name].output for name in said.into]
    if any(x.shape != last.shape for x in dense):
        shapes = ", ".join(str(x.shape) for x in dense)
        raise block.refused(f"{said.out_of} takes an array of shape {last.shape}, made of {shapes}")
    closed = jax.make_jaxpr(_with_grads(lambda *dense: _retraced(block, dense)))(*dense, last)
    points = [_GATES, _UPS][: len(dense)]
    found: list[Any] = at_points(closed, [*points, _GRADS])
    for result in found:
        if isinstance(result, Unknown):
            raise block.refused(
                f"what {said.out_of} takes, or its gradient, is made of {result.why} too, and not of what "
                f"{' and '.join(said.into)} {'return' if len(dense) > 1 else 'returns'} alone, element by "
                "element"
            )
    rounding = 2 * max(float(jnp.finfo(x.dtype).eps) for x in (*dense, last))

    def is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
        return all(np.allclose(a, b, rounding, _SMALLEST) for a, b in zip(one, other, strict=True))

    wanted = _wanted(said.activation, tuple(range(len(dense))))
    if is_same(found, wanted):
        return
    for activation, order in itertools.product(ACTIVATIONS, itertools.permutations(range(len(dense)))):
        if is_same(found, _wanted(activation, order)):
            into = tuple(said.into[i] for i in order)
            other = FusedMLP(into=into, out_of=said.out_of, activation=activation)
            raise block.refused(f"it computes {_formula(other)}", f"Say so: {other}.")
    i = int(np.argmax(np.abs(found[0] - wanted[0]) > _SMALLEST + rounding * np.abs(wanted[0])))
    at = " and ".join(f"{name}(x)={x[i]}" for name, x in zip(said.into, points))
    made = np.broadcast_to(found[0], _GATES.shape)[i]
    why = f"with {at}, {said.out_of} takes {made:.6g}, where that would be {wanted[0][i]:.6g}"
    if is_same(found[:1], wanted[:1]):
        why = "the values are the same, but not their gradients"
    raise block.refused(why)


def _retraced(block: _Block, dense: Sequence[Any]) -> Any:
    """Returns what the last layer takes, if the first ones return these values.

    A copy of the module runs until then, on a copy of its variables, with other random numbers.
    """

    def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        path: tuple[str, ...] = getattr(context.module.scope, "path", ())
        if context.method_name == "__call__" and len(path) == 1 and path[0] in block.said.names:
            if current_trace() != traces[0]:
                raise _Stopped(path[0])
            if path[0] in block.said.into:
                return dense[block.said.into.index(path[0])]
            raise _Stopped(path[0], *args, *kwargs.values())
        return call(*args, **kwargs)

    traces: list[Any] = []

    def run(module: nn.Module) -> Any:
        traces.append(current_trace())
        return nn.Module._call_wrapped_method(module, block.method, block.args, block.kwargs)

    scope: Any = block.module.scope
    module = block.module.clone(parent=None, _deep_clone=True, _reset_names=True, name=None)
    rngs = {name: jax.random.key(0) for name in scope.rngs}
    try:
        with nn.intercept_methods(around):
            nn.apply(run, module, mutable=scope.mutable)(block.module.variables, rngs=rngs)
    except _Stopped as stopped:
        if not stopped.inputs:
            raise block.refused(
                f"{stopped.name} runs in a transformation inside of it",
                "Put nn.remat and the like around the whole module.",
            ) from None
        return stopped.inputs[0]
    except Exception as error:
        error.add_note(
            f"This came up when fp8flax traced {'/'.join(block.path) or 'the model'} once more, to see "
            f"whether it is what a rule of quantize_model says: {_formula(block.said)}."
        )
        raise
    raise block.refused(f"it does not always call {block.said.out_of}")


def _with_grads(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns ``f`` of all arguments but the last, with its gradients for the cotangent that this is."""

    def g(*args: jax.Array) -> tuple[jax.Array, ...]:
        *primals, cotangent = args
        out, vjp = jax.vjp(f, *primals)
        return out, *vjp(cotangent)

    return g


@cache
def _wanted(activation: str, order: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Returns what goes into the last layer, and its gradients, where the first ones come in this order."""
    number = jax.ShapeDtypeStruct((), jnp.float32)
    closed = jax.make_jaxpr(_with_grads(lambda *dense: hidden(activation, [dense[i] for i in order])))(
        *[number] * (len(order) + 1)
    )
    results: Any = at_points(closed, [*[_GATES, _UPS][: len(order)], _GRADS])
    return tuple(results)
