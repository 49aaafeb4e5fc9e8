"""What FP8 leaves of a tensor, in numbers, and how they come out of whatever computes them.

An op knows its input and its kernel in the forward pass, its output gradient in the backward pass alone,
and may stand in a loop, a rematerialized block or a jitted function: none of them returns more than it was
written to return. So the op only *tells* its numbers, by a primitive that is an identity, and ``measured``
evaluates the program with all that was told as further results of every loop and branch on the way. Nothing
has to be declared: no variable, no collection that ``nn.scan`` would have to name.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define a primitive and to read a jaxpr;
``jax._src.source_info_util``, for the scopes of what is evaluated; and of Flax the name of the function
that ``nn.jit`` gives to ``jax.jit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import ad, batching, mlir

from fp8flax._core.formats import fp8_max
from fp8flax._core.jax_rules import num_consts_and_carry
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantizers import Quantizer, quantized
from fp8flax._core.scaling import power_of_two, scale_exponent

if TYPE_CHECKING:
    from jaxtyping import Float, Float32

measuring = jax.make_user_context(None)
"""The path of the op whose contractions tell their numbers; ``()`` outside of ops, None to tell nothing."""

_measurement = jax.make_user_context(None)
"""An object of each measurement: what ``nn.jit`` traced in another one has the paths of that one."""

_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
# Of a clipped value more is lost than float32 arithmetic loses of the largest one.
_ROUNDING = 1 + 2.0**-20


# All formats have it.
_CODE = np.float32(128)


class Numbers(NamedTuple):
    """What is told of one tensor: what merges over calls. All float32, of one shape."""

    values: Float32[jax.Array, "*stack"]
    """Finite ones that are not zero, as all that follow are counted of."""
    underflowed: Float32[jax.Array, "*stack"]
    """Whose code is zero."""
    saturated: Float32[jax.Array, "*stack"]
    """Clipped at the largest FP8 value."""
    signal: Float32[jax.Array, "*stack"]
    """Sum of squares, in units of the square of ``_unit(amax)``."""
    noise: Float32[jax.Array, "*stack"]
    """Likewise of what quantizing changes."""
    nonfinite: Float32[jax.Array, "*stack"]
    """NaN and Inf."""
    amax: Float32[jax.Array, "*stack"]
    """The largest finite magnitude; -inf of what was not computed."""
    scale: Float32[jax.Array, "*stack"]
    """The largest."""
    headroom: Float32[jax.Array, "*stack"]
    """The smallest ratio of the largest magnitude that a scale represents, to the amax that it serves."""


@partial(jax.jit, static_argnums=(0, 1))
def numbers_of(
    quantizer: Quantizer, view: View, x: Float[jax.Array, "*dims"], delayed_scale: Any = None
) -> Numbers:
    """Returns what a quantizer leaves of a tensor, given the scale where that is delayed.

    Neither is differentiated. (Counts are those of tensors of less than 2**32 elements.)
    """
    q = quantized(quantizer, x, view, delayed_scale)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    finite = lax.is_finite(x)
    # Subnormal float32 numbers count as zero, as in all arithmetic of this package.
    is_value = finite & (jnp.abs(x.astype(wide)) >= np.asarray(_TINY, wide))

    def meaning(codes: jax.Array) -> jax.Array:
        """Returns what codes mean, in the tensor's shape, whatever the layout of codes and scales."""
        return QTensor(codes.astype(q.codes.dtype), q.scale, q.quantizer).dequantize(view, wide)

    is_zero = q.codes.astype(jnp.float32) == 0
    # Of each element. By a code that is a power of two: the smallest scales are no normal numbers.
    code = jnp.full(q.codes.shape, _CODE)
    scaled = meaning(code)
    scale = scaled / np.asarray(_CODE, wide)
    largest = jnp.minimum(
        scaled * np.asarray(fp8_max(q.codes.dtype) / float(_CODE), wide), np.asarray(_HUGE, wide)
    )
    is_lost = meaning(jnp.where(is_zero, np.float32(0), code)) == 0
    magnitude = jnp.where(is_value, jnp.abs(x.astype(wide)), np.asarray(0, wide))
    ratio = jnp.where(is_value, largest / jnp.maximum(magnitude, np.asarray(_TINY, wide)), np.inf)
    # Of blocks of zeros alone the scale says nothing.
    used = jnp.where(is_value, scale, np.asarray(0, wide))
    is_saturated = magnitude > largest * np.asarray(_ROUNDING, wide)
    counted = [m.astype(jnp.uint32) for m in (is_value, is_value & is_lost, is_saturated, ~finite)]
    # All by one reduction, which is one kernel to compile and to start.
    operands = [*counted, magnitude, used, scale, ratio]
    starts = [np.full((), np.inf if array is ratio else 0, array.dtype) for array in operands]
    *counts, amax, most_used, most, headroom = lax.reduce(
        operands, starts, _merge_numbers, tuple(range(x.ndim))
    )
    # A power of two is exact, and first, as the difference may be a subnormal number.
    inverse = (1 / _unit(amax)).astype(wide)
    error = x.astype(wide) * inverse - q.dequantize(view, wide) * inverse
    error = jnp.where(is_value, error, np.asarray(0, wide))
    values, underflowed, saturated, nonfinite = counts
    numbers = Numbers(
        values=values,
        underflowed=underflowed,
        saturated=saturated,
        signal=jnp.sum(jnp.square(magnitude * inverse)),
        noise=jnp.sum(jnp.square(error)),
        nonfinite=nonfinite,
        amax=amax,
        scale=jnp.where(values > 0, most_used, most),
        headroom=headroom,
    )
    return Numbers(*(number.astype(jnp.float32) for number in numbers))


# What reduces is one function for all calls, or each call that is not jitted would compile anew.
def _merge_numbers(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds the first four, then takes maxima, and of the last the minimum."""
    functions = (*[lax.add] * 4, *[lax.max] * 3, lax.min)
    return [f(x, y) for f, x, y in zip(functions, xs, ys)]


def _unit(amax: jax.Array) -> jax.Array:
    """Returns what squares are summed in units of, so that they fit into float32: about the amax."""
    return power_of_two(scale_exponent(amax.astype(jnp.float32), 1.0, "floor"))


def merged(numbers: Numbers) -> Numbers:
    """Returns those of all calls together, which are stacked along the first axis."""
    amax = jnp.max(numbers.amax, axis=0)
    units = [_unit(jnp.maximum(x, np.float32(0))) for x in (numbers.amax, amax)]
    # At most 1: of zeros the unit is.
    share = jnp.square(jnp.minimum(units[0] / units[1], np.float32(1)))
    return Numbers(
        **{name: jnp.sum(getattr(numbers, name), axis=0) for name in Numbers._fields[:3]},
        signal=jnp.sum(numbers.signal * share, axis=0),
        noise=jnp.sum(numbers.noise * share, axis=0),
        nonfinite=jnp.sum(numbers.nonfinite, axis=0),
        amax=amax,
        scale=jnp.max(numbers.scale, axis=0),
        headroom=jnp.min(numbers.headroom, axis=0),
    )


def merged_calls(calls: Sequence[Numbers]) -> Numbers:
    """Returns those of several calls; of calls that are stacked otherwise, without their stacks."""
    if len({numbers.amax.shape for numbers in calls}) > 1:
        calls = [merged(jax.tree.map(lambda x: x.reshape(-1), numbers)) for numbers in calls]
    if len(calls) == 1:
        return calls[0]
    return merged(jax.tree.map(lambda *xs: jnp.stack(xs), *calls))


# An identity of its first operand, so that nothing that drops what nobody reads drops it.
_tell_p = Primitive("fp8_tell")


def tell(path: tuple[str, ...], role: str, x: jax.Array, numbers: Numbers) -> jax.Array:
    """Returns ``x``, and tells ``measured`` the numbers of this tensor of this op."""
    return _tell_p.bind(x, *numbers, path=path, role=role)


def _tell_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _tell_p.bind(*primals, **params), tangents[0]


def _batch_tell(args: Any, dims: Any, **params: Any) -> Any:
    (size,) = {x.shape[dim] for x, dim in zip(args, dims) if dim is not None}

    def stacked(x: jax.Array, dim: int | None) -> jax.Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    return _tell_p.bind(args[0], *map(stacked, args[1:], dims[1:]), **params), dims[0]


_tell_p.def_impl(lambda x, *numbers, path, role: x)
_tell_p.def_abstract_eval(lambda x, *numbers, path, role: x)
mlir.register_lowering(_tell_p, lambda ctx, x, *numbers, path, role: [x])
ad.primitive_jvps[_tell_p] = _tell_jvp
batching.primitive_batchers[_tell_p] = _batch_tell

Told = dict[tuple[tuple[str, ...], str], list[Numbers]]
"""Of each path and role what its calls told; with leading axes for the loops around a call."""

_INLINED = (
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)


def measured(f: Callable[[Any], Any], x: Any) -> tuple[Any, Told]:
    """Returns ``f(x)``, and what the ops in it tell.

    Args:
        f: a function of a tree of arrays that returns one, and may differentiate.
        x: its argument.

    Raises:
        ValueError: an op tells its numbers where they cannot get out, or under the path of another one.
    """
    with measuring(()), _measurement(object()):
        jaxpr, shapes = jax.make_jaxpr(f, return_shape=True)(x)
    _check_paths(jaxpr.jaxpr)
    out, told = _evaluated(jaxpr, jax.tree.leaves(x), is_again=False)
    return jax.tree.unflatten(jax.tree.structure(shapes), out), told


_NN_JIT = "core_fn"


def _check_paths(jaxpr: Any) -> None:
    """Raises ``ValueError`` where ``nn.jit`` has traced one layer for several, whose path they all tell.

    A layer that is called several times multiplies each time by a kernel of the same parameters.
    """
    kernels: dict[tuple[str, ...], frozenset[Any]] = {}
    _follow_kernels(jaxpr, [_itself(var) for var in jaxpr.invars], kernels, in_nn_jit=False)


def _follow_kernels(
    jaxpr: Any,
    origins: Sequence[frozenset[Any]],
    kernels: dict[tuple[str, ...], frozenset[Any]],
    *,
    in_nn_jit: bool,
) -> list[frozenset[Any]]:
    """Returns what the results of a program are made of, given what its inputs are.

    What each op's kernel is made of that stands in ``nn.jit`` goes into ``kernels``.
    """
    made_of = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*map(_itself, jaxpr.constvars), *origins)))

    def read(atom: Any) -> frozenset[Any]:
        return frozenset() if isinstance(atom, Literal) else made_of[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive is _tell_p and eqn.params["role"] == "kernel" and in_nn_jit:
            path = eqn.params["path"]
            before = kernels.setdefault(path, operands[0])
            if before and operands[0] and before.isdisjoint(operands[0]):
                raise ValueError(
                    f"Several layers have the path {'/'.join(path)}: nn.jit traces equal modules once, "
                    "under the path of the first. Measure the model without nn.jit (its variables are the "
                    "same), with jax.jit around fp8flax.statistics."
                )
        is_again = eqn.params.get("differentiated")  # under residuals, and told before
        is_nn_jit = eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == _NN_JIT
        results = [frozenset[Any]().union(*operands)] * len(eqn.outvars)
        inside = [
            _follow_kernels(
                inner,
                operands[len(operands) - len(inner.invars) :],
                {} if is_again else kernels,
                in_nn_jit=in_nn_jit or is_nn_jit,
            )
            for inner in _programs_in(eqn.params)
            if len(inner.invars) <= len(operands) and len(inner.outvars) == len(eqn.outvars)
        ]
        if inside:
            results = [frozenset[Any]().union(*each) for each in zip(*inside)]
        made_of.update(zip(eqn.outvars, results))
    return [read(atom) for atom in jaxpr.outvars]


def _itself(var: Any) -> frozenset[Any]:
    return frozenset([var])


def _evaluated(closed: Any, args: Sequence[Any], *, is_again: bool) -> tuple[list[Any], Told]:
    """Returns the results of a jaxpr, and what it tells: all, or only what is not ``is_again`` told.

    Rematerialized forward passes tell again what they told before.
    """
    jaxpr, told = closed.jaxpr, Told()
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            if eqn.primitive is _tell_p:
                x, *numbers = operands
                if not (is_again and eqn.params["role"] != "output_grad"):
                    key = eqn.params["path"], eqn.params["role"]
                    told.setdefault(key, []).append(Numbers(*numbers))
                results = [x]
            elif _tells(eqn.params):
                results, inside = _evaluated_within(eqn, operands, is_again=is_again)
                for key, calls in inside.items():
                    told.setdefault(key, []).extend(calls)
            else:
                params = eqn.primitive.get_bind_params(eqn.params)
                functions, params = params if isinstance(params, tuple) else ((), params)  # before JAX 0.10
                out = eqn.primitive.bind(*functions, *operands, **params)
                results = out if eqn.primitive.multiple_results else [out]
        values.update(zip(eqn.outvars, results))
    return [read(atom) for atom in jaxpr.outvars], told


def _evaluated_within(eqn: Any, operands: Sequence[Any], *, is_again: bool) -> tuple[list[Any], Told]:
    """Likewise, of what an equation contains."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scanned(params, operands, is_again=is_again)
    if name == "cond":
        return _branched(params["branches"], operands, is_again=is_again)
    if name not in _INLINED:
        raise ValueError(
            f"fp8flax.statistics cannot read the numbers of an FP8 layer inside of {name}. Call "
            f"fp8flax.statistics inside of the {name}, or measure a function without it."
        )
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    if isinstance(inner, Jaxpr):
        inner = ClosedJaxpr(inner, ())
    if params.get("differentiated"):  # a jax.checkpoint that computes again
        is_again = True
        if params["prevent_cse"]:
            operands = lax.optimization_barrier(list(operands))
    return _evaluated(inner, operands, is_again=is_again)


def _scanned(params: Any, operands: Sequence[Any], *, is_again: bool) -> tuple[list[Any], Told]:
    num_consts, num_carry = num_consts_and_carry(params)
    consts, init, xs = operands[:num_consts], operands[num_consts:][:num_carry], operands[num_consts:]

    def body(carry: Any, x: Any) -> Any:
        out, told = _evaluated(params["jaxpr"], (*consts, *carry, *x), is_again=is_again)
        return out[:num_carry], (out[num_carry:], told)

    carry, (ys, told) = lax.scan(
        body, list(init), list(xs[num_carry:]), params["length"], params["reverse"], params["unroll"]
    )
    return [*carry, *ys], told


def _branched(branches: Any, operands: Sequence[Any], *, is_again: bool) -> tuple[list[Any], Told]:
    """Each branch tells what all of them tell: of what it does not compute, nothing."""
    index, *args = operands
    run = [partial(_evaluated, branch, is_again=is_again) for branch in branches]
    shapes = [jax.eval_shape(lambda *xs, f=f: f(xs), *args)[1] for f in run]
    most: Told = {}
    for told in shapes:
        for key, calls in told.items():
            most[key] = max(most.get(key, []), calls, key=len)

    def filled(f: Any, *xs: Any) -> Any:
        out, told = f(xs)
        for key, calls in most.items():
            missing = calls[len(told.get(key, [])) :]
            told[key] = [*told.get(key, []), *(_nothing(like) for like in missing)]
        return out, {key: told[key] for key in most}

    return lax.switch(index, [partial(filled, f) for f in run], *args)


def _nothing(like: Numbers) -> Numbers:
    zeros = Numbers(*(jnp.zeros(x.shape, jnp.float32) for x in like))
    infinite = zeros.headroom + np.float32(np.inf)
    return zeros._replace(amax=-infinite, headroom=infinite)


def _tells(params: Any) -> bool:
    """Tells whether a primitive's parameters contain programs that tell anything."""
    return any(
        eqn.primitive is _tell_p or _tells(eqn.params)
        for inner in _programs_in(params)
        for eqn in inner.eqns
    )


def _programs_in(params: Any) -> list[Any]:
    """Returns the programs among a primitive's parameters."""
    values = [one for x in params.values() for one in (x if isinstance(x, tuple | list) else (x,))]
    inner = [getattr(one, "jaxpr", one) for one in values]
    return [one for one in inner if isinstance(one, Jaxpr)]
