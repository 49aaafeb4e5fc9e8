"""Functions of ``flax.linen.fp8_ops`` under the same names, and products between casts to FP8 and back.

Such a product is Flax's way to compute a matmul, ``form="qdq"``, and ours for most convolutions.

A cast to FP8 and back counts as the identity in derivatives of any order (straight-through). Scale and amax
history have no derivative: their "gradients" are their next values. A product between such casts returns
the amax of this step as the cotangent of a scale of ``state.step_scales``, which computes the next values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8flax._compat.max_dtype import from_max_dtype, is_max_dtype
from fp8flax._core.axes import merge_amax
from fp8flax._core.formats import as_fp8_dtype
from fp8flax._core.names import OPERANDS, ROLES
from fp8flax._core.observe import is_calibrating, mode, report_amax
from fp8flax._core.ops.canonical import DimensionNumbers, Layout
from fp8flax._core.ops.contract import Contraction, Operands, Scales, traced
from fp8flax._core.qtensor import STATIC, Dims
from fp8flax._core.quantize import (
    as_float_array,
    dequantize,
    inf_to_nan,
    on_cotangent,
    quantize,
    quantize_dequantize,
    straight_through,
)
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.recipes import Recipe
from fp8flax._core.scaling import delayed_amax, push_amax
from fp8flax._core.shapes import Float, Float32, Shaped
from fp8flax._core.state.state import ScalingState, check_state_dtype, step_scales
from fp8flax._core.types import OutSharding

T = TypeVar("T")
Cast = Callable[[jax.Array, jax.Array | None], jax.Array]
"""A cast of a tensor to FP8 and back, with the scale of this step; None if there is no delayed scaling."""


def _cast_to(q_dtype: DTypeLike, compute_dtype: DTypeLike = jnp.float32) -> Cast:
    """Returns the cast with a delayed scale."""
    return lambda x, scale: quantize_dequantize(x, q_dtype, cast(jax.Array, scale), compute_dtype)


def _with_amax(result: T, x: jax.Array, scale: jax.Array) -> T:
    """Returns ``result``, an array or several; the "gradient" of ``scale`` is the amax of ``x``."""
    amax = merge_amax(delayed_amax(lax.stop_gradient(x)), scale)
    return cast(T, on_cotangent(lambda g, amax: (g, amax), result, scale, amax))


def _cast_operand(cast: Cast, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns ``x`` after the cast; the "gradient" of ``scale`` is the amax of ``x``."""
    result = straight_through(cast, x, scale)
    return result if scale is None else _with_amax(result, x, scale)


def _cast_cotangent(cast: Cast, out: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns ``out``, whose cotangent is cast; the "gradient" of ``scale`` is the cotangent's amax."""

    def backward(g: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        g = inf_to_nan(g)
        amax = None if scale is None else merge_amax(delayed_amax(g), scale)
        return straight_through(cast, g, scale), amax

    return on_cotangent(backward, out, scale, scale)


# The plan of an op between such casts.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeQuantized(Contraction):
    """A product of wide tensors that hold FP8 values: ``in_qdq`` of both operands, product, ``out_qdq``.

    JAX differentiates the product, any number of times. Each tensor has one scale, so it does not matter
    which dimensions are contracted.
    """

    multiply: Callable[[jax.Array, jax.Array], jax.Array] = dataclasses.field(metadata=STATIC)
    """The product of wide operands."""

    @property
    def function(self) -> Callable[..., jax.Array]:
        return _between_casts

    @property
    def layouts(self) -> dict[str, Layout]:
        tensors = zip(ROLES, (self.lhs, self.rhs, self.out))
        return {role: Layout.of(x.shape, (Dims(0, ()), Dims(0, ()))) for role, x in tensors}

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return self.multiply(lhs, rhs)

    def cast_of(self, role: str) -> Cast:
        """Returns the cast of a tensor."""
        (quantizer, _), (dims, _) = self.recipe.of_role(role), self.dims[role]
        if quantizer is None:
            return lambda x, _: x
        if role in self.recipe.delayed:
            return _cast_to(quantizer.dtype)
        return lambda x, _: quantizer.quantize(x, dims).dequantize(x.dtype)


def _between_casts(plan: FakeQuantized, operands: Operands, scales: Scales) -> jax.Array:
    """Returns the result of a plan."""
    lhs, rhs = (
        _cast_operand(plan.cast_of(role), x, scales.get(role)) for role, x in zip(OPERANDS, operands)
    )
    return _cast_cotangent(plan.cast_of("output_grad"), plan.multiply(lhs, rhs), scales.get("output_grad"))


def qdq_plan(
    lhs: jax.Array, rhs: jax.Array, *arguments: Any, recipe: Recipe, out_sharding: OutSharding = None
) -> FakeQuantized:
    """Returns the plan of a matmul with ``form="qdq"``, from the arguments of ``lax.dot_general``."""
    if not {*recipe.gemms.quantizers} <= {*recipe.gemms.delayed.values()}:
        raise ValueError(
            f"form='qdq' takes DelayedScaling, for input, kernel and output gradient; got {recipe!r}. Give "
            "the op this recipe, or leave form='qdq' out."
        )
    found = traced(lax.dot_general, (lhs, rhs), *arguments, out_sharding=out_sharding)
    multiply = lambda lhs, rhs: dot_general_with_precision(lhs, rhs, *arguments)  # noqa: E731
    return FakeQuantized.of((lhs, rhs), found, recipe, multiply=multiply)


# With a scaling state, as users call them.


def _checked(
    q_dtype: DTypeLike, x: ArrayLike, name: str, scale: ArrayLike, amax_history: ArrayLike
) -> tuple[DelayedQuantizer, jax.Array, ScalingState]:
    """Checks what a user passes; returns the quantizer, the tensor and its state."""
    quantizer, x = DelayedQuantizer(dtype=as_fp8_dtype(q_dtype, "q_dtype")), as_float_array(x, name)
    state = ScalingState(*(x if is_max_dtype(x) else jnp.asarray(x) for x in (scale, amax_history)))
    for field, value in state._asdict().items():
        check_state_dtype(field, value)
    if state.scale.shape not in ((), (1,)):
        raise ValueError(f"scale must be a scalar or have shape (1,); got shape {state.scale.shape}.")
    if state.amax_history.ndim != 1 or state.amax_history.size == 0:
        raise ValueError(
            f"amax_history must have shape (length,) with length 1 or more; got {state.amax_history.shape}."
        )
    return quantizer, x, state


def in_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> Float[jax.Array, "*dims"]:
    """Passes a GEMM operand through FP8 with delayed scaling.

    The scale is computed from ``amax_history`` as given. The "gradients" of ``scale`` and ``amax_history``
    are their next values: the scale used, and the history with the amax of ``inp`` in it. The gradient of
    ``inp`` is the incoming cotangent (straight-through).

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        inp: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        Array of ``inp``'s shape and dtype.

    Raises:
        TypeError: an argument has another dtype than those above.
        ValueError: ``scale`` or ``amax_history`` has another shape than those above.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(x, scale, history):
        ...     return jnp.sum(fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history))
        >>> x, scale, history = jnp.array([1.0, -3.0]), jnp.ones((1,)), jnp.zeros((4,))
        >>> jax.grad(f, argnums=(1, 2))(x, scale, history)
        (Array([1.], dtype=float32), Array([3., 0., 0., 0.], dtype=float32))
    """
    quantizer, inp, state = _checked(q_dtype, inp, "inp", scale, amax_history)
    if is_calibrating():
        return report_amax(quantizer, inp, delayed_amax(inp), state)
    (new_scale,) = step_scales([quantizer], [state])
    return _cast_operand(_cast_to(q_dtype, compute_dtype), inp, new_scale)


def out_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    out: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> Float[jax.Array, "*dims"]:
    """Returns ``out`` unchanged, and passes its *cotangent* through FP8 with delayed scaling.

    The "gradients" of ``scale`` and ``amax_history`` are their next values, computed from the cotangent.

    The arguments and the errors are those of ``in_qdq``.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(y, scale, history):
        ...     return jnp.sum(5 * fp8.out_qdq(jnp.float32, jnp.float8_e5m2, y, scale, history))
        >>> jax.grad(f, argnums=(1, 2))(jnp.ones((2,)), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([1.], dtype=float32), Array([5., 0., 0., 0.], dtype=float32))
    """
    quantizer, out, state = _checked(q_dtype, out, "out", scale, amax_history)
    (new_scale,) = step_scales([quantizer], [state])
    if not is_calibrating():
        return _cast_cotangent(_cast_to(q_dtype, compute_dtype), out, new_scale)

    def report(g: jax.Array, scale_and_state: tuple[jax.Array, ScalingState]) -> Operands:
        """Reports the amax of the cotangent, which the "gradient" of the state depends on."""
        scale, state = scale_and_state
        amax = delayed_amax(g)
        return g, merge_amax(report_amax(quantizer, amax, amax, state), scale)

    return on_cotangent(report, out, new_scale, (new_scale, state)) if mode.value.backward else out


def in_q(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> tuple[Float[jax.Array, "*dims"], Float32[jax.Array, "*scale"]]:
    """Quantizes a GEMM operand with delayed scaling and returns ``(q, scale used)``.

    It quantizes as ``in_qdq`` does, but ``q`` stays FP8, and no gradient reaches ``inp`` through it. The
    "gradients" of ``scale`` and ``amax_history`` are their next values.

    The arguments and the errors are those of ``in_qdq``.

    Returns:
        ``q`` of ``inp``'s shape in ``q_dtype``, and the scale in float32, of the shape of ``scale``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.in_q(jnp.float32, jnp.float8_e4m3fn, jnp.array([0.3]), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([0.3125], dtype=float8_e4m3fn), Array([1.], dtype=float32))
    """
    quantizer, inp, state = _checked(q_dtype, lax.stop_gradient(inp), "inp", scale, amax_history)
    if is_calibrating():
        inp = report_amax(quantizer, inp, delayed_amax(inp), state)
        state = state._replace(scale=jnp.ones_like(state.scale))  # it was the number of the tensor
    (new_scale,) = step_scales([quantizer], [state])
    used = lax.stop_gradient(new_scale)
    q = quantize(inp, quantizer.dtype, used, compute_dtype)
    return _with_amax((q, used.reshape(jnp.shape(scale))), inp, new_scale)


def out_dq(
    dq_type: DTypeLike,
    lhs_scale: Shaped[ArrayLike, "*lhs_scale"],
    rhs_scale: Shaped[ArrayLike, "*rhs_scale"],
    out: Float[ArrayLike, "*dims"],
) -> Float[jax.Array, "*dims"]:
    """Rescales the result of an FP8 GEMM: ``out * (lhs_scale * rhs_scale)``.

    The cotangent passes to ``out`` unchanged, because the backward GEMMs apply their own scales.

    Args:
        dq_type: floating-point dtype of the result.
        lhs_scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        rhs_scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        out: array of any shape.

    Returns:
        Array of ``out``'s shape in ``dq_type``.

    Raises:
        TypeError: ``dq_type`` is not bfloat16, float16, float32 or float64.
        ValueError: a scale does not fit ``out``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.out_dq(jnp.float32, jnp.float32(0.5), jnp.float32(4.0), jnp.array([3.0]))
        Array([6.], dtype=float32)
    """
    lhs_scale, rhs_scale = (s if is_max_dtype(s) else jnp.asarray(s) for s in (lhs_scale, rhs_scale))
    factor = from_max_dtype(lhs_scale) * from_max_dtype(rhs_scale)
    return straight_through(lambda out, factor: dequantize(out, dq_type, factor), jnp.asarray(out), factor)


# Without a state.


qdq = quantize_dequantize
"""``quantize_dequantize`` under its name in ``flax.linen.fp8_ops``."""


def compute_amax_history(
    x: Float[jax.Array, "*dims"], amax_history: Float32[jax.Array, " length"]
) -> Float32[jax.Array, " length"]:
    """Returns ``amax_history`` with the amax of ``x`` entered at index 0.

    After index 0 come the older amaxes, from the oldest to the second newest. The history stays unchanged
    if ``x`` is empty, or holds a NaN or an Inf.

    Args:
        x: a floating-point array of any shape.
        amax_history: past amaxes, shape ``(length,)``, float32.

    Returns:
        The new history, shape and dtype of ``amax_history``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> history = jnp.zeros((4,))
        >>> for amax in (1.0, 2.0, 3.0):
        ...     history = fp8.compute_amax_history(jnp.array([0.5, -amax]), history)
        ...     print(history)
        [1. 0. 0. 0.]
        [2. 0. 0. 1.]
        [3. 0. 1. 2.]

    Source: the layout of ``flax.linen.fp8_ops``.
    """
    amax = delayed_amax(jnp.asarray(x, jnp.float32))
    pushed = push_amax(amax.astype(amax_history.dtype), amax_history)
    return jnp.where(jnp.isfinite(amax), pushed, amax_history)


def dot_general_with_precision(
    lhs: Float[jax.Array, "*lhs"],
    rhs: Float[jax.Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[jax.Array, "*output"]:
    """Computes ``lax.dot_general`` with fast accumulation forward and exact accumulation in both gradients.

    Args:
        lhs: left operand, any shape.
        rhs: right operand, any shape.
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: None takes ``DEFAULT`` forward and ``HIGHEST`` backward. Another value is used for all
            three GEMMs.
        preferred_element_type: dtype of the result, or None for the dtype of the operands.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: the operands do not fit the dimension numbers.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.dot_general_with_precision(jnp.ones((2, 3)), jnp.ones((3,)), (((1,), (0,)), ((), ())))
        Array([3., 3.], dtype=float32)

    Source: ``flax.linen.fp8_ops.dot_general_with_precision``, which ignores the last two arguments.
    """

    def dot(default: lax.Precision, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        of_gemm = default if precision is None else precision
        return lax.dot_general(lhs, rhs, dimension_numbers, of_gemm, preferred_element_type)

    product = jax.custom_jvp(partial(dot, lax.Precision.DEFAULT))

    @product.defjvp
    def derivative(primals: Operands, tangents: Operands) -> Operands:
        (lhs, rhs), (lhs_dot, rhs_dot), exact = primals, tangents, partial(dot, lax.Precision.HIGHEST)
        return product(lhs, rhs), exact(lhs_dot, rhs) + exact(lhs, rhs_dot)

    return cast(jax.Array, product(lhs, rhs))
