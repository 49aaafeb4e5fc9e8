"""Measures what FP8 leaves of a tensor, and gets these numbers out of any program that has FP8 ops.

An op knows its input and its kernel in the forward pass, and its output gradient in the backward pass. It
may stand in a loop, a rematerialized block or a jitted function, which return only what they were written
to return. So the op reports its numbers by a primitive that is an identity. ``measured`` traces the program
and computes it again, with all reports as further results of the loops and branches around them. A model
does not have to declare anything for this: no variable, and no collection that ``nn.scan`` would have to
name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.interpreter import RUNS_ONCE, Sets, Values, interpret
from fp8flax._compat.jaxprs import equations, jaxpr_of, programs_in
from fp8flax._compat.report_primitive import is_report, key_of, with_report
from fp8flax._core.formats import fp8_max
from fp8flax._core.mode import Measuring, mode
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantizers import Quantizer, quantized
from fp8flax._core.scaling import power_of_two, scale_exponent

if TYPE_CHECKING:
    from jaxtyping import Float, Float32

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


Told = dict[tuple[tuple[str, ...], str], list[Numbers]]
"""For each path and role the numbers of its calls; with leading axes for the loops around a call."""


def report_numbers(path: tuple[str, ...], role: str, x: jax.Array, numbers: Numbers) -> jax.Array:
    """Returns ``x``, and reports the numbers of this tensor of this op to ``measured``."""
    return with_report(x, numbers, (path, role))


def measured(f: Callable[[Any], Any], x: Any) -> tuple[Any, Told]:
    """Returns ``f(x)``, and what the ops in it report.

    Args:
        f: a function of a tree of arrays that returns one, and may differentiate.
        x: its argument.

    Raises:
        ValueError: an op reports its numbers where they cannot get out, or under the path of another one.
    """
    with mode(Measuring(object())):
        program, shapes = jax.make_jaxpr(f, return_shape=True)(x)
    _check_paths(program)
    rules = _Measured()
    out = interpret(program, jax.tree.leaves(x), rules)
    told: Any = rules.reports
    return jax.tree.unflatten(jax.tree.structure(shapes), out), told


class _Measured(Values):
    """Computes a program again, and collects the ``Numbers`` that its ops report."""

    is_again = False
    """Whether this is the forward pass that ``jax.checkpoint`` repeats, whose ops have reported before."""

    def absent(self, like: Numbers) -> Numbers:
        zeros = Numbers(*(jnp.zeros(x.shape, jnp.float32) for x in like))
        infinite = zeros.headroom + np.float32(np.inf)
        return zeros._replace(amax=-infinite, headroom=infinite)

    def inside(self, eqn: Any) -> Self | None:
        name, programs = eqn.primitive.name, programs_in(eqn.params)
        if not any(is_report(found.eqn) for program in programs for found in equations(program)):
            return None
        if name not in (*RUNS_ONCE, "scan", "cond"):
            raise ValueError(
                f"fp8flax.statistics cannot read the numbers of an FP8 layer inside of {name}. Call "
                f"fp8flax.statistics inside of the {name}, or measure a function without it."
            )
        return self

    def call(
        self, primitive: Any, program: Any, operands: list[Any], params: Mapping[str, Any]
    ) -> list[Any]:
        if not params.get("differentiated"):
            return super().call(primitive, program, operands, params)
        again = copy.copy(self)  # with the same reports
        again.is_again = True
        if params["prevent_cse"]:
            operands = lax.optimization_barrier(operands)
        return interpret(program, operands, again)

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        if not is_report(eqn):
            return super().equation(eqn, operands)
        x, *numbers = operands
        path, role = key_of(eqn)
        if role == "output_grad" or not self.is_again:
            self.report((path, role), Numbers(*numbers))
        return [x]


def _check_paths(program: Any) -> None:
    """Raises ``ValueError`` where ``nn.jit`` has traced one layer for several: all would report its path.

    A layer that is called several times multiplies each time by a kernel of the same parameters.
    """
    inputs = [frozenset([i]) for i, _ in enumerate(jaxpr_of(program).invars)]
    interpret(program, inputs, _Origins({}, in_nn_jit=False))


_NN_JIT = "core_fn"
"""The name of the function that ``nn.jit`` gives to ``jax.jit``."""


class _Origins(Sets):
    """Finds the inputs of a program that each value is made of, and checks the kernels in ``nn.jit``."""

    def __init__(self, kernels: dict[tuple[str, ...], frozenset[Any]], in_nn_jit: bool) -> None:
        self.kernels = kernels
        """What the kernel of each op in ``nn.jit`` is made of, by the path that the op reports."""
        self.in_nn_jit = in_nn_jit

    def constant(self, value: Any) -> frozenset[Any]:
        return frozenset([("constant", id(value))]) if np.ndim(value) else frozenset()

    def inside(self, eqn: Any) -> Self | None:
        is_nn_jit = eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] == _NN_JIT
        # What jax.checkpoint repeats has other variables, and was checked before.
        kernels = {} if eqn.params.get("differentiated") else self.kernels
        return type(self)(kernels, self.in_nn_jit or is_nn_jit)

    def equation(self, eqn: Any, operands: list[frozenset[Any]]) -> list[frozenset[Any]]:
        if is_report(eqn) and self.in_nn_jit:
            path, role = key_of(eqn)
            if role == "kernel":
                self._check(path, operands[0])
        return [frozenset[Any]().union(*operands)] * len(eqn.outvars)

    def _check(self, path: tuple[str, ...], kernel: frozenset[Any]) -> None:
        before = self.kernels.setdefault(path, kernel)
        if before and kernel and before.isdisjoint(kernel):
            raise ValueError(
                f"Several layers have the path {'/'.join(path)}: nn.jit traces equal modules once, "
                "under the path of the first. Measure the model without nn.jit (its variables are the "
                "same), with jax.jit around fp8flax.statistics."
            )
