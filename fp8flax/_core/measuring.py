"""Measures the quantization error of each tensor of an FP8 op, and returns the numbers from any program.

An op knows its input and its kernel in the forward pass, and its output gradient in the backward pass. The
op may be inside a loop, a rematerialized block or a jitted function, which do not return the op's numbers.
So the op reports its numbers by a primitive that returns its operand unchanged. ``measured`` traces the
program and interprets it. In doing so it adds the reported numbers to the results of all loops and branches
around the op. A model does not have to declare anything for this: no variable, and no collection in
``nn.scan``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.interpreter import RUNS_ONCE, Values, interpret
from fp8flax._compat.jaxprs import equations, programs_in
from fp8flax._compat.report_primitive import is_report, key_of
from fp8flax._core.formats import fp8_max
from fp8flax._core.mode import Observing, mode
from fp8flax._core.qtensor import Dims
from fp8flax._core.quantizers import Quantizer, quantized
from fp8flax._core.scaling import floor_power_of_two
from fp8flax._core.shapes import Float, Float32

_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
_ROUNDING = 1 + 2.0**-20
"""A value counts as saturated if it exceeds the largest value of its scale by more than this factor.

The factor allows for the rounding of float32 arithmetic."""

_PROBE = np.float32(128)
"""An FP8 code from which the scale of an element is computed; every format represents 128 exactly."""


class Numbers(NamedTuple):
    """Numbers that describe the quantization of one tensor, and that ``merged`` can merge over calls.

    All are float32 arrays of one shape, with an axis for each loop and ``jax.vmap`` around the op.
    """

    values: Float32[jax.Array, "*stack"]
    """Count of the finite elements that are not zero."""
    underflowed: Float32[jax.Array, "*stack"]
    """Count of the ``values`` that FP8 rounds to zero."""
    saturated: Float32[jax.Array, "*stack"]
    """Count of the ``values`` that are clipped to the largest FP8 value."""
    signal: Float32[jax.Array, "*stack"]
    """Sum of the squares of the ``values``, divided by the square of ``_unit(amax)``."""
    noise: Float32[jax.Array, "*stack"]
    """Sum of the squares of the quantization errors of the ``values``, divided by the same number."""
    nonfinite: Float32[jax.Array, "*stack"]
    """Count of the NaN and Inf elements."""
    amax: Float32[jax.Array, "*stack"]
    """The largest finite magnitude; -inf for a tensor in a branch that did not run."""
    scale: Float32[jax.Array, "*stack"]
    """The largest scale. Scales of blocks that hold only zeros do not count, unless all blocks do so."""
    headroom: Float32[jax.Array, "*stack"]
    """The minimum, over all ``values``, of ``fp8_max * scale / abs(value)``. Below 1, a value saturates."""


@partial(jax.jit, static_argnums=(0, 1))
def numbers_of(
    quantizer: Quantizer, dims: Dims, x: Float[jax.Array, "*dims"], delayed_scale: Any = None
) -> Numbers:
    """Returns the ``Numbers`` of one tensor under one quantizer.

    The caller stops the gradients of ``x`` and of the scale. The counts have the precision of float32, for
    fewer than 2**32 elements.

    Args:
        quantizer: the quantizer of the tensor for one GEMM.
        dims: the tensor's dimensions in that GEMM.
        x: the tensor, a wide float.
        delayed_scale: the scale of delayed scaling; None if the quantizer computes the scale from ``x``.
    """
    q = quantized(quantizer, x, dims, delayed_scale)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    finite = lax.is_finite(x)
    # Subnormal float32 numbers count as zero, as everywhere in this package.
    is_value = finite & (jnp.abs(x.astype(wide)) >= np.asarray(_TINY, wide))

    def dequantized_codes(codes: jax.Array) -> jax.Array:
        """Returns the values of FP8 codes."""
        return dataclasses.replace(q, codes=codes.astype(q.codes.dtype)).dequantize(wide)

    is_zero = q.codes.astype(jnp.float32) == 0
    # Dequantizing a tensor of one code gives the scale of each element, whatever the layout of the scales.
    # The smallest scales are subnormal, but their products with this code are normal.
    probe = jnp.full(q.codes.shape, _PROBE)
    probe_values = dequantized_codes(probe)
    scale = probe_values / np.asarray(_PROBE, wide)
    largest_values = jnp.minimum(
        probe_values * np.asarray(fp8_max(q.codes.dtype) / float(_PROBE), wide), np.asarray(_HUGE, wide)
    )
    magnitude = jnp.where(is_value, jnp.abs(x.astype(wide)), np.asarray(0, wide))
    headrooms = jnp.where(
        is_value, largest_values / jnp.maximum(magnitude, np.asarray(_TINY, wide)), np.inf
    )
    # The scale of a block that holds only zeros is arbitrary, so it is left out.
    scale_of_values = jnp.where(is_value, scale, np.asarray(0, wide))
    is_saturated = magnitude > largest_values * np.asarray(_ROUNDING, wide)
    counted = [m.astype(jnp.uint32) for m in (is_value, is_value & is_zero, is_saturated, ~finite)]
    # One reduction computes all eight numbers, so XLA compiles and starts one kernel.
    operands = [*counted, magnitude, scale_of_values, scale, headrooms]
    starts = [np.full((), start, array.dtype) for (_, start), array in zip(_REDUCTIONS, operands)]
    *counts, amax, scale_of_values, scale, headroom = lax.reduce(
        operands, starts, _reduce_step, tuple(range(x.ndim))
    )
    # A factor that is a power of two changes no bits. It is applied before the subtraction, because the
    # difference of the unscaled numbers could be subnormal.
    inverse = (1 / _unit(amax)).astype(wide)
    error = x.astype(wide) * inverse - q.dequantize(wide) * inverse
    error = jnp.where(is_value, error, np.asarray(0, wide))
    values, underflowed, saturated, nonfinite = counts
    numbers = Numbers(
        values=values,
        underflowed=underflowed,
        saturated=saturated,
        # Without the barrier the sum was NaN for values below 1e-19 or beyond 1e19 (XLA on CPUs).
        signal=jnp.sum(jnp.square(lax.optimization_barrier(magnitude * inverse))),
        noise=jnp.sum(jnp.square(error)),
        nonfinite=nonfinite,
        amax=amax,
        scale=jnp.where(values > 0, scale_of_values, scale),
        headroom=headroom,
    )
    return Numbers(*(number.astype(jnp.float32) for number in numbers))


_REDUCTIONS: Any = (*[(lax.add, 0)] * 4, *[(lax.max, 0)] * 3, (lax.min, np.inf))
"""The function and the start value for four counts, for the amax, for two scales and for the headroom."""


# This is a function of the module, not a lambda, so that calls outside of jit compile the reduction once.
def _reduce_step(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    """Combines two elements of the reduction in ``numbers_of``."""
    return [f(x, y) for (f, _), x, y in zip(_REDUCTIONS, xs, ys)]


def _unit(amax: jax.Array) -> jax.Array:
    """Returns the largest power of two that is not above ``amax``, at most 2**126; 1 if ``amax`` is 0.

    Values are divided by this number before they are squared, so that the sum of squares fits into float32.
    The inverse of 2**127 would be subnormal.
    """
    return jnp.minimum(floor_power_of_two(amax.astype(jnp.float32)), np.float32(2.0**126))


def merged(numbers: Numbers) -> Numbers:
    """Returns the numbers of several calls together.

    Args:
        numbers: the numbers of all calls, stacked along the first axis. The result lacks this axis.
    """
    amax = jnp.max(numbers.amax, axis=0)
    units = [_unit(jnp.maximum(x, np.float32(0))) for x in (numbers.amax, amax)]
    # The unit of a call with zeros only is 1, which can exceed the common unit. Its sums are 0 anyway.
    share = jnp.square(jnp.minimum(units[0] / units[1], np.float32(1)))
    return Numbers(
        values=jnp.sum(numbers.values, axis=0),
        underflowed=jnp.sum(numbers.underflowed, axis=0),
        saturated=jnp.sum(numbers.saturated, axis=0),
        signal=jnp.sum(numbers.signal * share, axis=0),
        noise=jnp.sum(numbers.noise * share, axis=0),
        nonfinite=jnp.sum(numbers.nonfinite, axis=0),
        amax=amax,
        scale=jnp.max(numbers.scale, axis=0),
        headroom=jnp.min(numbers.headroom, axis=0),
    )


def merged_calls(calls: Sequence[Numbers]) -> Numbers:
    """Returns the numbers of several calls of one op together, elementwise over the loops around the op.

    If the calls are in different loops, their arrays have different shapes. Each call is then first merged
    over its loops, and the result is scalars.
    """
    if len({numbers.amax.shape for numbers in calls}) > 1:
        calls = [merged(jax.tree.map(lambda x: x.reshape(-1), numbers)) for numbers in calls]
    if len(calls) == 1:
        return calls[0]
    return merged(jax.tree.map(lambda *xs: jnp.stack(xs), *calls))


NumbersOfTensors = dict[tuple[tuple[str, ...], str], list[Numbers]]
"""For each path of an op and role of its tensor, the numbers of each call.

The arrays of a call have a leading axis for each ``lax.scan`` around it."""


def measured(f: Callable[[Any], Any], x: Any) -> tuple[Any, NumbersOfTensors]:
    """Returns ``f(x)``, and the numbers that the FP8 ops in it report.

    Args:
        f: a function of a tree of arrays that returns a tree of arrays. It may use ``jax.grad``.
        x: the argument of ``f``.

    Raises:
        ValueError: an op is inside of a primitive that cannot return its numbers, such as ``shard_map``; or
            ``nn.jit`` runs several layers, or one layer several times, under one path.
    """
    # A new object is a new cache key: functions that were jitted before are traced again, with reports.
    with mode(Observing(object())):
        program, shapes = jax.make_jaxpr(f, return_shape=True)(x)
    rules = _Measured()
    out = interpret(program, jax.tree.leaves(x), rules)
    reports: Any = rules.reports
    for path in rules.in_nn_jit:
        if len(reports[path, "kernel"]) > 1:
            raise ValueError(
                f"nn.jit runs several layers, or one layer several times, under the path {'/'.join(path)}: "
                "it traces equal modules once, under the path of the first. Measure the model without "
                "nn.jit (its variables are the same), with jax.jit around fp8flax.statistics."
            )
    return jax.tree.unflatten(jax.tree.structure(shapes), out), reports


_NN_JIT = "core_fn"
"""The name of the function that ``nn.jit`` gives to ``jax.jit``."""


class _Measured(Values):
    """Computes a program again, and collects the ``Numbers`` that its ops report.

    Its methods override those of ``Values``, which has the attribute ``reports`` and fills it.
    """

    is_recomputing = False
    """Whether the program is a forward pass that ``jax.checkpoint`` repeats in the backward pass.

    Its inputs and kernels were reported in the first forward pass, so they are not reported again."""
    is_in_nn_jit = False
    """Whether ``nn.jit`` runs the program."""

    def __init__(self) -> None:
        super().__init__()
        self.in_nn_jit: set[tuple[str, ...]] = set()
        """The paths of the ops that report kernels in ``nn.jit``."""

    def absent(self, like: Numbers) -> Numbers:
        """Returns the numbers of a tensor that was not computed; merged with others they change nothing."""
        zeros = Numbers(*(jnp.zeros(x.shape, jnp.float32) for x in like))
        infinite = zeros.headroom + np.float32(np.inf)
        return zeros._replace(amax=-infinite, headroom=infinite)

    def together(self, first: Numbers, second: Numbers) -> Numbers:
        """Returns the numbers of two rounds of a while loop together."""
        return merged(jax.tree.map(lambda *xs: jnp.stack(xs), first, second))

    def inside(self, eqn: Any) -> Self | None:
        """Returns the rules for the programs of an equation, if one of them holds a report.

        Otherwise returns None, and JAX evaluates the equation as it is.
        """
        name, programs = eqn.primitive.name, programs_in(eqn.params)
        if not any(is_report(found.eqn) for program in programs for found in equations(program)):
            return None
        if name not in (*RUNS_ONCE, "scan", "cond", "while"):
            raise ValueError(
                f"fp8flax.statistics cannot read the numbers of an FP8 layer inside of {name}. Call "
                f"fp8flax.statistics inside of the {name}, or measure a function without it."
            )
        if name not in ("jit", "pjit") or eqn.params["name"] != _NN_JIT:
            return self
        inside = copy.copy(self)  # shares the reports and the paths
        inside.is_in_nn_jit = True
        return inside

    def call(
        self, primitive: Any, program: Any, operands: list[Any], params: Mapping[str, Any]
    ) -> list[Any]:
        """Interprets a program that an equation calls, and notes whether it repeats a forward pass."""
        if not params.get("differentiated"):
            return super().call(primitive, program, operands, params)
        # ``jax.checkpoint`` sets ``differentiated`` in the backward pass, which repeats the forward pass.
        recomputing = copy.copy(self)  # shares the list of reports
        recomputing.is_recomputing = True
        if params["prevent_cse"]:
            operands = lax.optimization_barrier(operands)
        return interpret(program, operands, recomputing)

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Collects the numbers of a report, by ``Values.report``; evaluates any other equation."""
        if not is_report(eqn):
            return super().equation(eqn, operands)
        x, *numbers = operands
        path, role = key_of(eqn)
        if role == "output_grad" or not self.is_recomputing:
            self.report((path, role), Numbers(*numbers))
            if role == "kernel" and self.is_in_nn_jit:
                self.in_nn_jit.add(path)
        return [x]
