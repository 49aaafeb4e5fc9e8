"""The FP8 matmul as a pure function of its operands and their scaling states."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._qdq import (
    DelayedConfig,
    check_state,
    delayed_amax,
    delayed_in_qdq,
    delayed_next_state,
    delayed_out_qdq,
    delayed_scales,
)
from fp8flax._quantize import as_float_array, quantize
from fp8flax._recipes import Accumulation, DelayedScaling
from fp8flax._state import ScalingState

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class DotStates(NamedTuple):
    """The scaling states of one matmul."""

    input: ScalingState
    kernel: ScalingState
    output_grad: ScalingState


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """``lax.dot_general`` with fast accumulation forward and exact accumulation in the two gradients.

    Args:
        lhs: left operand, any shape.
        rhs: right operand, any shape.
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: None for ``DEFAULT`` forward and ``HIGHEST`` backward; else used for all three GEMMs.
        preferred_element_type: dtype of the result, or None for that of the operands.

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
    precision = lax.Precision.DEFAULT if precision is None else precision
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
    )


@dot_general_with_precision.defjvp
def _dot_general_with_precision_jvp(
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    dot = partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=lax.Precision.HIGHEST if precision is None else precision,
        preferred_element_type=preferred_element_type,
    )
    return out, dot(lhs_dot, rhs) + dot(lhs, rhs_dot)


class Fp8EmulationWarning(UserWarning):
    """The device at hand has no FP8 units: FP8 matmuls give the same values, and no speed."""


RESIDUAL_NAMES = ("fp8_input", "fp8_kernel", "fp8_scaling")
"""The ``checkpoint_name``s of what an FP8 matmul keeps for its backward pass.

They are the quantized input and the quantized kernel (FP8 codes, as uint8), and five scalars: scales and
amaxes. The result of the forward GEMM is named ``"fp8_output"``. Policies for ``jax.checkpoint`` and
``nn.remat`` made of them::

    policies = jax.checkpoint_policies
    keep_fp8 = policies.save_only_these_names(*fp8.RESIDUAL_NAMES)
    requantize_kernels = policies.save_only_these_names("fp8_input", "fp8_scaling")
    keep_outputs = policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("fp8_output")
    )

Without a policy, or with one that names none of them, all are computed again from the block's inputs.
(``dots_saveable`` alone does not see FP8 GEMMs.)
"""

FORMS = ("direct", "qdq")
"""How an FP8 matmul is written down for the compiler."""

# cublasLt takes FP8 operands in multiples of this; XLA would pad, and copy, for it.
_CUBLASLT_MULTIPLE = 16
_NATIVE_COMPUTE_CAPABILITY = 8.9
_E5M2 = np.dtype(jnp.float8_e5m2)
_OCP_DTYPES = (np.dtype(jnp.float8_e4m3fn), _E5M2)


compile_target = jax.make_user_context(None)
"""Names the device that a program is compiled for, where that is not one of those at hand."""


def _device_has_fp8_units() -> bool:
    """Tells whether the default device multiplies in FP8."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return False
    try:
        return float(device.compute_capability) >= _NATIVE_COMPUTE_CAPABILITY
    except (AttributeError, ValueError):  # not an NVIDIA GPU
        return False


def _warn_if_emulated() -> None:
    if compile_target.value is None and not _device_has_fp8_units():
        # From one place, so that Python's default filter shows it once.
        warnings.warn(
            f"FP8 matmuls are emulated on {jax.devices()[0].device_kind}: the values are those of FP8, the "
            "speed is not. fp8flax.audit shows what a GPU would run.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


def _accumulation_of(precision: Any, recipe: DelayedScaling) -> Accumulation:
    """Returns the accumulation of the three GEMMs, or raises where ``precision`` cannot be honoured."""
    if precision is None:
        return recipe.accumulation
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    try:
        both = [lax.Precision(p) for p in pair]
        if len(both) != 2 or None in pair:
            raise ValueError
    except (ValueError, TypeError):
        raise TypeError(
            "precision of an FP8 matmul must be None (the recipe's accumulation), a lax.Precision, its "
            f"name, or a pair of them; got {precision!r}. For more control set accumulation in the "
            "recipe, for instance DelayedScaling(accumulation=Accumulation(forward='exact'))."
        ) from None
    word = "fast" if all(p == lax.Precision.DEFAULT for p in both) else "exact"
    return Accumulation(forward=word, dgrad=word, wgrad=word)


class _Gemm(NamedTuple):
    """What a GEMM of FP8 operands must know statically (hashable)."""

    dimension_numbers: DimensionNumbers
    out_dtype: np.dtype
    accumulation: str
    out_sharding: Any = None
    """Of the result, on a mesh with explicit axes, where JAX may not be able to tell."""


def _dot(gemm: _Gemm, q_lhs: jax.Array, q_rhs: jax.Array, precision: Any, sum_dtype: np.dtype) -> jax.Array:
    return lax.dot_general(
        q_lhs,
        q_rhs,
        gemm.dimension_numbers,
        # Not None, which would be the ambient jax.default_matmul_precision.
        lax.Precision.DEFAULT if precision is None else precision,
        preferred_element_type=sum_dtype,
        out_sharding=gemm.out_sharding,
    )


def _emulated_gemm(
    gemm: _Gemm, q_lhs: jax.Array, q_rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Multiplies FP8 values in float32, which holds them and their products exactly."""
    wide = jnp.dtype(jnp.float64 if gemm.out_dtype == jnp.float64 else jnp.float32)
    out = _dot(gemm, q_lhs.astype(wide), q_rhs.astype(wide), None, wide)
    # One after the other: the product of the scales may overflow where the result does not.
    return (out * lhs_scale.astype(wide) * rhs_scale.astype(wide)).astype(gemm.out_dtype)


def _cuda_gemm(
    gemm: _Gemm, q_lhs: jax.Array, q_rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Multiplies FP8 operands in FP8 units: by cublasLt, or as XLA chooses where that does not fit."""
    preset = {
        "fast": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
        "exact": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
    }.get(gemm.accumulation)
    sizes = _gemm_sizes(q_lhs.shape, q_rhs.shape, gemm.dimension_numbers)
    if any(size % _CUBLASLT_MULTIPLE for size in sizes) or q_lhs.dtype == q_rhs.dtype == _E5M2:
        preset = None
    # The unscaled sums would overflow float16; a kernel of XLA's own takes the float32 multiply in.
    narrow = preset is not None and gemm.out_dtype == jnp.bfloat16
    sum_dtype = jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
    out = _dot(gemm, _row_major(q_lhs), _row_major(q_rhs), preset, sum_dtype)
    # One scalar, so that the GEMM can take it in. An infinite one would turn zeros into NaN; the bound is
    # that of bfloat16, a little lower than float32's.
    scale = jnp.minimum(lhs_scale * rhs_scale, jnp.float32(jnp.finfo(jnp.bfloat16).max))
    # As written a bfloat16 scale would be rounded. XLA hands the float32 scalar to cublasLt instead,
    # which multiplies before it rounds (seen in the compiled program; a test holds it).
    return (out * scale.astype(sum_dtype)).astype(gemm.out_dtype)


# A custom_jvp for one effect: it is opaque to the policies of jax.checkpoint. One that saves the results
# of dots would otherwise find those of both branches, and keep each of them.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _platform_gemm(
    gemm: _Gemm, q_lhs: jax.Array, q_rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    return lax.platform_dependent(
        q_lhs,
        q_rhs,
        lhs_scale,
        rhs_scale,
        cuda=partial(_cuda_gemm, gemm),
        default=partial(_emulated_gemm, gemm),
    )


@_platform_gemm.defjvp
def _platform_gemm_jvp(gemm: _Gemm, primals: Any, tangents: Any) -> Any:
    del gemm, primals, tangents
    raise TypeError(_ONCE)


def _row_major(q: jax.Array) -> jax.Array:
    """Holds an FP8 operand to the layout that it has in memory anyway.

    cublasLt wants some operands transposed. Left alone, XLA prefers that layout for all that an operand is
    made from, back to the float32 kernels that ``nn.scan`` stacks, of which it then makes a transposed
    copy. Held here, it transposes FP8. The partitioner for many devices would gather an array for this, so
    there XLA is left alone.
    """
    if compile_target.value is None and jax.device_count() > 1:
        return q
    return with_layout_constraint(q, Layout(major_to_minor=tuple(range(q.ndim))))


def _gemm_sizes(
    lhs_shape: Sequence[int], rhs_shape: Sequence[int], dimension_numbers: DimensionNumbers
) -> tuple[int, int, int]:
    """Returns M, K and N of a ``dot_general``."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    return (
        math.prod(lhs_shape[i] for i in _free(len(lhs_shape), lhs_contract, lhs_batch)),
        math.prod(lhs_shape[i] for i in lhs_contract),
        math.prod(rhs_shape[i] for i in _free(len(rhs_shape), rhs_contract, rhs_batch)),
    )


def _free(ndim: int, contract: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i not in contract and i not in batch)


def _gemm(
    q_lhs: jax.Array, q_rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array, gemm: _Gemm
) -> jax.Array:
    """Returns ``dot_general(q_lhs, q_rhs) * lhs_scale * rhs_scale``."""
    ocp = q_lhs.dtype in _OCP_DTYPES and q_rhs.dtype in _OCP_DTYPES
    too_old = (
        compile_target.value is None and jax.default_backend() == "gpu" and not _device_has_fp8_units()
    )
    gemm_on = _platform_gemm if ocp and not too_old else _emulated_gemm
    return gemm_on(gemm, q_lhs, q_rhs, lhs_scale, rhs_scale)


class _Transpose(NamedTuple):
    """A GEMM of the backward pass, and for each axis of its result that of the operand it belongs to."""

    dimension_numbers: DimensionNumbers
    axes: tuple[int, ...]


def _transposes(
    dimension_numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int
) -> tuple[_Transpose, _Transpose]:
    """Derives dgrad and wgrad of ``out = dot_general(lhs, rhs)``.

    The axes of ``out``, and so of its cotangent ``g``, are ``(batch, free of lhs, free of rhs)``.

    * dgrad contracts ``g`` with ``rhs`` over the free axes of ``rhs``. What is left is ``(batch, free of
      lhs, contracted axes in the order of rhs)``.
    * wgrad contracts ``lhs`` with ``g`` over the free axes of ``lhs``. What is left is ``(batch, contracted
      axes in the order of lhs, free of rhs)``; for a Dense layer that is the kernel's own order.

    A transpose then puts each result into the order of the operand whose cotangent it is.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free = _free(lhs_ndim, lhs_contract, lhs_batch)
    rhs_free = _free(rhs_ndim, rhs_contract, rhs_batch)
    num_batch, num_lhs_free = len(lhs_batch), len(lhs_free)
    g_batch = tuple(range(num_batch))
    g_lhs_free = tuple(range(num_batch, num_batch + num_lhs_free))
    g_rhs_free = tuple(range(num_batch + num_lhs_free, num_batch + num_lhs_free + len(rhs_free)))
    partner_in_lhs = dict(zip(rhs_contract, lhs_contract))
    partner_in_rhs = dict(zip(lhs_contract, rhs_contract))
    dgrad_axes = (*lhs_batch, *lhs_free, *(partner_in_lhs[i] for i in sorted(rhs_contract)))
    wgrad_axes = (*rhs_batch, *(partner_in_rhs[i] for i in sorted(lhs_contract)), *rhs_free)
    return (
        _Transpose(((g_rhs_free, rhs_free), (g_batch, tuple(rhs_batch))), dgrad_axes),
        _Transpose(((lhs_free, g_lhs_free), (tuple(lhs_batch), g_batch)), wgrad_axes),
    )


def _explicit_sharding(x: jax.Array) -> Any:
    """Returns the sharding of an array on a mesh with explicit axes, else None."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class _DirectConfig(NamedTuple):
    """What the direct form must know statically (hashable)."""

    forward: DelayedConfig
    backward: DelayedConfig
    accumulation: Accumulation
    dimension_numbers: DimensionNumbers
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    lhs_sharding: Any
    rhs_sharding: Any


_ONCE = (
    "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second derivatives "
    "use partial(fp8flax.Fp8DotGeneralOp, form='qdq')."
)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _quantize_once(config: DelayedConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Quantizes, and refuses to be differentiated: a second derivative would silently be zero."""
    return quantize(x, config.q_dtype, scale, config.compute_dtype)


@_quantize_once.defjvp
def _quantize_once_jvp(config: DelayedConfig, primals: Any, tangents: Any) -> Any:
    raise TypeError(_ONCE)


class _Residuals(NamedTuple):
    """What the backward pass needs: FP8 operands, scalars, and the states, which are arguments."""

    lhs_codes: jax.Array
    """The FP8 input as uint8. ``jax.checkpoint`` passes every float that it saves through
    ``lax.reduce_precision``, which knows no e4m3fn: 448 would become NaN, subnormals zero."""
    rhs_codes: jax.Array
    """Likewise the FP8 kernel."""
    lhs_scale: jax.Array
    rhs_scale: jax.Array
    g_scale: jax.Array
    lhs_amax: jax.Array
    rhs_amax: jax.Array
    states: DotStates


# Derivation. With straight-through quantization the cotangents of the operands are the two transposed
# products, of quantized values: dlhs = q(g) . q(rhs), drhs = q(lhs) . q(g), each times the scales of its
# two operands. The cotangents of the scaling states are their next values (see _qdq).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _direct_dot_general(
    config: _DirectConfig, lhs: jax.Array, rhs: jax.Array, states: DotStates
) -> jax.Array:
    lhs_scale, rhs_scale, _ = _scales(config, states)
    return _forward_gemm(
        config,
        quantize(lhs, config.forward.q_dtype, lhs_scale, config.forward.compute_dtype),
        quantize(rhs, config.forward.q_dtype, rhs_scale, config.forward.compute_dtype),
        lhs_scale,
        rhs_scale,
    )


def _scales(config: _DirectConfig, states: DotStates) -> tuple[jax.Array, ...]:
    return delayed_scales((config.forward, config.forward, config.backward), states)


@jax.named_scope("fp8_forward")
def _forward_gemm(
    config: _DirectConfig,
    q_lhs: jax.Array,
    q_rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
) -> jax.Array:
    return _gemm(
        q_lhs,
        q_rhs,
        lhs_scale,
        rhs_scale,
        _Gemm(config.dimension_numbers, config.out_dtype, config.accumulation.forward),
    )


def _quantize_with_amax(
    config: DelayedConfig, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the quantized tensor and its amax."""
    q = _quantize_once(config, x, scale)
    # Together, so that XLA reads the wide tensor once for both, and does not cast it a second time where
    # a GEMM wants it transposed. (For kernels that saves nothing, and a policy that recomputes the
    # quantized kernel would take the amax along.)
    return lax.optimization_barrier((q, delayed_amax(x)))


def _direct_fwd(
    config: _DirectConfig, lhs: jax.Array, rhs: jax.Array, states: DotStates
) -> tuple[jax.Array, _Residuals]:
    lhs_scale, rhs_scale, g_scale = _scales(config, states)
    q_lhs, lhs_amax = _quantize_with_amax(config.forward, lhs, lhs_scale)
    q_rhs = _quantize_once(config.forward, rhs, rhs_scale)
    rhs_amax = delayed_amax(rhs)
    residuals = _Residuals(
        checkpoint_name(_codes(q_lhs), "fp8_input"),
        checkpoint_name(_codes(q_rhs), "fp8_kernel"),
        checkpoint_name(lhs_scale, "fp8_scaling"),
        checkpoint_name(rhs_scale, "fp8_scaling"),
        checkpoint_name(g_scale, "fp8_scaling"),
        checkpoint_name(lhs_amax, "fp8_scaling"),
        checkpoint_name(rhs_amax, "fp8_scaling"),
        states,
    )
    # From the residuals, so that a GEMM that is computed again starts from what a policy kept.
    out = _forward_gemm(config, *_operands(config, residuals), residuals.lhs_scale, residuals.rhs_scale)
    return checkpoint_name(out, "fp8_output"), residuals


def _codes(q: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(q, jnp.uint8)


def _operands(config: _DirectConfig, residuals: _Residuals) -> tuple[jax.Array, jax.Array]:
    dtype = config.forward.q_dtype
    return (
        lax.bitcast_convert_type(residuals.lhs_codes, dtype),
        lax.bitcast_convert_type(residuals.rhs_codes, dtype),
    )


def _transposed_gemm(
    transpose: _Transpose,
    operands: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    dtype: np.dtype,
    sharding: Any,
    accumulation: str,
) -> jax.Array:
    """Returns the cotangent of an operand that has this dtype and sharding."""
    if sharding is not None:
        spec = PartitionSpec(*(sharding.spec[i] for i in transpose.axes))
        sharding = NamedSharding(sharding.mesh, spec)
    grad = _gemm(*operands, _Gemm(transpose.dimension_numbers, dtype, accumulation, sharding))
    return lax.transpose(grad, np.argsort(transpose.axes))


def _direct_bwd(
    config: _DirectConfig, residuals: _Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, DotStates]:
    _, _, lhs_scale, rhs_scale, g_scale, lhs_amax, rhs_amax, states = residuals
    q_lhs, q_rhs = _operands(config, residuals)
    q_g, g_amax = _quantize_with_amax(config.backward, g, g_scale)
    dgrad, wgrad = _transposes(config.dimension_numbers, q_lhs.ndim, q_rhs.ndim)
    with jax.named_scope("fp8_dgrad"):
        lhs_grad = _transposed_gemm(
            dgrad,
            (q_g, q_rhs, g_scale, rhs_scale),
            config.lhs_dtype,
            config.lhs_sharding,
            config.accumulation.dgrad,
        )
    with jax.named_scope("fp8_wgrad"):
        rhs_grad = _transposed_gemm(
            wgrad,
            (q_lhs, q_g, lhs_scale, g_scale),
            config.rhs_dtype,
            config.rhs_sharding,
            config.accumulation.wgrad,
        )
    next_states = DotStates(
        delayed_next_state(lhs_amax, lhs_scale, states.input),
        delayed_next_state(rhs_amax, rhs_scale, states.kernel),
        delayed_next_state(g_amax, g_scale, states.output_grad),
    )
    return lhs_grad, rhs_grad, next_states


_direct_dot_general.defvjp(_direct_fwd, _direct_bwd)


def _is_wide_float(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    states: DotStates,
    recipe: DelayedScaling,
    form: str = "direct",
) -> jax.Array:
    """Multiplies in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    Args:
        lhs: the input, any shape, a wide float.
        rhs: the kernel, any shape, a wide float.
        dimension_numbers: those of ``lax.dot_general``.
        precision: None for the recipe's accumulation; ``DEFAULT`` for fast and ``HIGH`` or ``HIGHEST``
            for exact accumulation in all three GEMMs.
        preferred_element_type: dtype of the result; None for what ``lax.dot_general`` gives.
        states: scaling states; their "gradients" are their next values.
        recipe: how the tensors are scaled.
        form: ``"direct"`` puts FP8 operands into the GEMMs; ``"qdq"`` quantizes and dequantizes around
            GEMMs in the dtype of the operands.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: an operand is not a wide float, or ``preferred_element_type`` is not, or ``precision``
            is none of the above, or the operands do not fit the dimension numbers.
    """
    lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
    if preferred_element_type is not None and not _is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    config = partial(
        DelayedConfig,
        jnp.float32,
        margin=recipe.margin,
        amax_compute_algo=recipe.amax_compute_algo,
    )
    forward = config(q_dtype=recipe.fp8_format.forward_dtype)
    backward = config(q_dtype=recipe.fp8_format.backward_dtype)
    if form == "qdq":
        lhs = delayed_in_qdq(forward, lhs, *states.input)
        rhs = delayed_in_qdq(forward, rhs, *states.kernel)
        out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
        return delayed_out_qdq(backward, out, *states.output_grad)
    accumulation = _accumulation_of(precision, recipe)
    # Checks the shapes, with the errors that users know, and settles the dtype of the result.
    out = jax.eval_shape(
        partial(
            lax.dot_general,
            dimension_numbers=dimension_numbers,
            preferred_element_type=preferred_element_type,
        ),
        lhs,
        rhs,
    )
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    direct = _DirectConfig(
        forward,
        backward,
        accumulation,
        (
            (tuple(map(int, lhs_contract)), tuple(map(int, rhs_contract))),
            (tuple(map(int, lhs_batch)), tuple(map(int, rhs_batch))),
        ),
        lhs.dtype,
        rhs.dtype,
        out.dtype,
        _explicit_sharding(lhs),
        _explicit_sharding(rhs),
    )
    _warn_if_emulated()
    return _direct_dot_general(direct, lhs, rhs, DotStates(*(check_state(*state) for state in states)))


class _EinsumPlan(NamedTuple):
    lhs_summed: tuple[int, ...]
    rhs_summed: tuple[int, ...]
    dimension_numbers: DimensionNumbers
    permutation: tuple[int, ...]


def _plan_einsum(eqn: str, lhs: jax.Array, rhs: jax.Array) -> _EinsumPlan:
    """Turns a two-operand einsum into sums, one ``dot_general`` with operands in order, a transpose."""
    try:
        inputs, result, _ = opt_einsum.parser.parse_einsum_input((eqn, lhs, rhs))
        lhs_names, rhs_names = inputs.split(",")
    except ValueError as error:
        raise ValueError(
            f"The einsum equation {eqn!r} does not fit operands of shapes {lhs.shape} and {rhs.shape}: "
            f"{error}"
        ) from error
    for names, operand in ((lhs_names, lhs), (rhs_names, rhs)):
        if len(names) != operand.ndim:
            raise ValueError(
                f"The einsum equation {eqn!r} names {len(names)} indices ({names!r}) for an operand of "
                f"shape {operand.shape}."
            )
        if len(set(names)) != len(names):
            raise ValueError(
                f"The einsum equation {eqn!r} repeats an index within one operand ({names!r}). Take the "
                "diagonal before the FP8 einsum."
            )

    def summed(names: str, other: str) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(names) if n not in other and n not in result)

    lhs_summed, rhs_summed = summed(lhs_names, rhs_names), summed(rhs_names, lhs_names)
    lhs_names = "".join(n for i, n in enumerate(lhs_names) if i not in lhs_summed)
    rhs_names = "".join(n for i, n in enumerate(rhs_names) if i not in rhs_summed)
    shared = [n for n in lhs_names if n in rhs_names]
    batch = [n for n in result if n in shared]
    contract = [n for n in shared if n not in result]
    names = [
        *batch,
        *(n for n in lhs_names if n not in shared),
        *(n for n in rhs_names if n not in shared),
    ]

    def axes(of: str, wanted: list[str]) -> tuple[int, ...]:
        return tuple(of.index(n) for n in wanted)

    return _EinsumPlan(
        lhs_summed,
        rhs_summed,
        (
            (axes(lhs_names, contract), axes(rhs_names, contract)),
            (axes(lhs_names, batch), axes(rhs_names, batch)),
        ),
        tuple(names.index(n) for n in result),
    )


def einsum_with(
    dot_general: Callable[..., jax.Array],
    eqn: str,
    lhs: jax.Array,
    rhs: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Evaluates a two-operand einsum by one call of ``dot_general(lhs, rhs, …)``, never with them swapped.

    ``jnp.einsum`` swaps the operands where that saves a transpose, which would exchange the roles of
    input and kernel.

    Raises:
        ValueError: ``eqn`` does not have two operands that fit, or repeats an index within one.
    """
    plan = _plan_einsum(eqn, lhs, rhs)
    lhs = jnp.sum(lhs, axis=plan.lhs_summed) if plan.lhs_summed else lhs
    rhs = jnp.sum(rhs, axis=plan.rhs_summed) if plan.rhs_summed else rhs
    out = dot_general(
        lhs,
        rhs,
        plan.dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return lax.transpose(out, plan.permutation)
