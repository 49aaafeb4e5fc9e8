"""The FP8 convolution: a matmul where its windows do not overlap, else of FP8 values in a wide dtype."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._core.device import Fp8EmulationWarning, compile_target
from fp8flax._core.names import CONVOLVED_WIDE, DGRAD, FORWARD, KEPT_WIDE, OUTPUT_NAME, WGRAD
from fp8flax._dot_general import (
    STATELESS,
    DotStates,
    check_result_dtype,
    check_states,
    delayed_config,
    delayed_scale,
    fp8_dot_general,
    hashable_precision,
    keep,
    measuring,
    quantize_once,
    restore,
    scales_of,
)
from fp8flax._operands import Quantized, View, dequantize_operand, straight_through
from fp8flax._qdq import (
    DelayedConfig,
    delayed_amax,
    delayed_in_qdq,
    delayed_next_state,
    delayed_out_qdq,
    inf_to_nan,
    measured_next_state,
    report_measured,
)
from fp8flax._quantize import as_float_array
from fp8flax._recipes import CurrentQuantizer, CustomRecipe, DelayedQuantizer, Quantizer, Recipe
from fp8flax._state import ScalingState
from fp8flax._transforms import manual_axes, reverse_mode_only, sum_to_axes, traced_once

"""The scope of a convolution of FP8 values in a wide dtype."""


class _Convolution(NamedTuple):
    """What ``lax.conv_general_dilated`` takes beside its operands (hashable)."""

    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, dtype: Any = None) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, *self, preferred_element_type=dtype)


class _Windows(NamedTuple):
    """The windows along one spatial dimension, where they do not overlap."""

    padding: tuple[int, int]
    """Before and after, negative to crop: what is left are ``number`` pieces of ``step`` elements."""
    number: int
    step: int
    size: int
    """Elements of a window."""
    dilation: int
    """Distance between them; they start where the piece does."""


def _windows(
    conv: _Convolution, lhs_shape: Sequence[int], rhs_shape: Sequence[int], out_shape: Sequence[int]
) -> list[_Windows] | None:
    """Returns the windows of a convolution that is a matmul of them with the kernel, else None."""
    if conv.feature_group_count != 1 or conv.batch_group_count != 1 or set(conv.lhs_dilation) - {1}:
        return None
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    windows = []
    for lhs_dim, rhs_dim, out_dim, stride, dilation, (low, _) in zip(
        lhs_spec[2:], rhs_spec[2:], out_spec[2:], conv.window_strides, conv.rhs_dilation, conv.padding
    ):
        size, number = rhs_shape[rhs_dim], out_shape[out_dim]
        length = (size - 1) * dilation + 1
        step = length if number == 1 else stride  # a single window overlaps nothing
        if size == 0 or length > step:
            return None
        high = number * step - lhs_shape[lhs_dim] - low
        windows.append(_Windows((low, high), number, step, size, dilation))
    return windows


def is_matmul(lhs: Any, rhs: Any, *arguments: Any) -> bool:
    """Tells whether a convolution is computed as a matmul.

    Args:
        lhs: the input, or its shape and dtype.
        rhs: the kernel, likewise.
        *arguments: those of ``lax.conv_general_dilated`` up to ``precision``.
    """
    out = jax.eval_shape(lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *arguments), lhs, rhs)
    conv = _as_convolution(lhs, rhs, *arguments)
    return _windows(conv, lhs.shape, rhs.shape, out.shape) is not None


def _reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes; on explicit axes the first dimension stays sharded as it is, and others are gathered."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x.reshape(shape)
    first = sharding.spec[0] if shape[0] == x.shape[0] else None
    spec = PartitionSpec(first, *(None for _ in shape[1:]))
    x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(first)))
    return lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _as_matmul(
    conv: _Convolution, windows: list[_Windows], lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Returns the operands of the matmul that a convolution is, and how its result must be transposed.

    The input has a row for each window, ``(batch, windows…, elements of a window)``, the kernel a column
    for each output feature. Both are flattened in the kernel's order: first its spatial dimensions, then
    the input features.
    """
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    x = lax.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    if any(w.padding != (0, 0) for w in windows):
        padding = [(0, 0, 0), *((*w.padding, 0) for w in windows), (0, 0, 0)]
        x = lax.pad(x, np.zeros((), x.dtype), padding)
    batch, features = x.shape[0], x.shape[-1]
    x = _reshape(x, (batch, *(n for w in windows for n in (w.number, w.step)), features))
    for i, w in enumerate(windows):
        length = (w.size - 1) * w.dilation + 1
        x = lax.slice_in_dim(x, 0, length, w.dilation, axis=2 + 2 * i)
    spatial = range(len(windows))
    x = lax.transpose(
        x, (0, *(1 + 2 * i for i in spatial), *(2 + 2 * i for i in spatial), 1 + 2 * len(windows))
    )
    num_columns = math.prod(w.size for w in windows) * features
    x = _reshape(x, (batch, *(w.number for w in windows), num_columns))
    kernel = lax.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    kernel = _reshape(kernel, (num_columns, kernel.shape[-1]))
    transposed = np.argsort((out_spec[0], *out_spec[2:], out_spec[1]))
    return x, kernel, tuple(map(int, transposed))


class _Config(NamedTuple):
    """What the FP8 convolution must know statically (hashable)."""

    recipe: CustomRecipe
    conv: _Convolution
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    dtype: np.dtype
    """Of both operands."""
    out_dtype: np.dtype
    lhs_axes: frozenset[str]
    """The manual axes of ``shard_map`` over which the input varies."""
    rhs_axes: frozenset[str]

    @property
    def backward_dtype(self) -> np.dtype:
        """A dtype that holds the values of the operands and of the cotangent."""
        if self.dtype == self.out_dtype:
            return self.dtype
        return np.dtype(jnp.float64 if jnp.float64 in (self.dtype, self.out_dtype) else jnp.float32)


class _Residuals(NamedTuple):
    """What the backward pass needs: operands in FP8, scalars, and the states, which are arguments."""

    lhs: Any
    """The input as wgrad takes it: ``Quantized``, its codes as uint8; wide if wgrad is."""
    rhs: Any
    """Likewise the kernel as dgrad takes it."""
    scales: dict[str, jax.Array]
    """The scale of each role that has delayed scaling."""
    amaxes: dict[str, jax.Array]
    """The amax of the input and of the kernel, where they have delayed scaling."""
    states: DotStates


# Derivation. A convolution is linear in each of its operands: conv(x, w) = C_w x = D_x w. With
# straight-through quantization their cotangents are its two transposes, of quantized values,
# dx = C_{q(w)}^T q(g) and dw = D_{q(x)}^T q(g), where q scales as the recipe of that product says. JAX
# derives both transposes. The cotangents of the scaling states are their next values (see _qdq).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def _convolve(config: _Config, lhs: jax.Array, rhs: jax.Array, states: DotStates) -> jax.Array:
    scales = scales_of(cast("Any", config), states)
    recipe = config.recipe.forward
    q_lhs = _quantize(recipe.lhs, lhs, scales.get("input"))
    q_rhs = _quantize(recipe.rhs, rhs, scales.get("kernel"))
    return _forward(config, q_lhs, q_rhs)


def _whole(shape: tuple[int, ...]) -> View:
    """Returns a tensor as one with a single scale is seen, whatever is contracted."""
    return View(shape, (), ())


def _quantize(quantizer: Quantizer | None, x: jax.Array, delayed_scale: jax.Array | None) -> Any:
    return quantize_once(quantizer, _whole(x.shape), x, delayed_scale)


def _dequantize(quantizer: Quantizer | None, operand: Any, dtype: np.dtype) -> jax.Array:
    """Returns the values in a wide dtype.

    Behind a barrier: from float32 values XLA would go back to the codes, for a convolution of cuDNN's in
    FP8, and where cuDNN has none for these sizes the program would fail (openxla/xla#40021).
    """
    shape = operand.codes.shape if isinstance(operand, Quantized) else operand.shape
    wide = dequantize_operand(quantizer, operand, _whole(shape), dtype)
    return wide if quantizer is None else lax.optimization_barrier(wide)


def _scope(*quantizers: Quantizer | None) -> Any:
    return jax.named_scope(KEPT_WIDE if None in quantizers else CONVOLVED_WIDE)


def _forward(config: _Config, lhs: Any, rhs: Any) -> jax.Array:
    recipe = config.recipe.forward
    with jax.named_scope(FORWARD):
        x = _dequantize(recipe.lhs, lhs, config.dtype)
        w = _dequantize(recipe.rhs, rhs, config.dtype)
        with _scope(recipe.lhs, recipe.rhs):
            return config.conv(x, w, config.out_dtype)


def _quantize_for_both(
    quantizers: tuple[Quantizer | None, Quantizer | None], x: jax.Array, delayed_scale: jax.Array | None
) -> tuple[Any, Any, jax.Array | None]:
    """Returns a tensor for the two convolutions that it enters, and its amax if it has delayed scaling."""
    first = _quantize(quantizers[0], x, delayed_scale)
    second = first if quantizers[0] == quantizers[1] else _quantize(quantizers[1], x, delayed_scale)
    return first, second, None if delayed_scale is None else delayed_amax(x)


@traced_once
def _fwd(
    config: _Config, lhs: jax.Array, rhs: jax.Array, states: DotStates
) -> tuple[jax.Array, _Residuals]:
    forward, dgrad, wgrad = config.recipe.forward, config.recipe.dgrad, config.recipe.wgrad
    name_scaling = partial(jax.tree.map, partial(checkpoint_name, name="fp8_scaling"))
    scales = name_scaling(scales_of(cast("Any", config), states))
    lhs_first, lhs_second, lhs_amax = _quantize_for_both((forward.lhs, wgrad.lhs), lhs, scales.get("input"))
    rhs_first, rhs_second, rhs_amax = _quantize_for_both(
        (forward.rhs, dgrad.rhs), rhs, scales.get("kernel")
    )
    amaxes = name_scaling({k: a for k, a in (("input", lhs_amax), ("kernel", rhs_amax)) if a is not None})
    lhs_view, rhs_view = _whole(config.lhs_shape), _whole(config.rhs_shape)
    lhs_kept = keep(lhs_second, "fp8_input", wgrad.lhs, lhs_view, scales.get("input"))
    rhs_kept = keep(rhs_second, "fp8_kernel", dgrad.rhs, rhs_view, scales.get("kernel"))
    # From the residuals where it is the same: what is computed again then starts from what a policy kept.
    if forward.lhs == wgrad.lhs:
        lhs_first = restore(lhs_kept, wgrad.lhs, lhs_view)
    if forward.rhs == dgrad.rhs:
        rhs_first = restore(rhs_kept, dgrad.rhs, rhs_view)
    out = checkpoint_name(_forward(config, lhs_first, rhs_first), OUTPUT_NAME)
    return out, _Residuals(lhs_kept, rhs_kept, scales, amaxes, states)


def _transposed(f: Callable[[jax.Array], jax.Array], kept: Any, dtype: np.dtype, g: jax.Array) -> jax.Array:
    """Returns the transpose of a linear function of an operand at ``g``.

    By its derivative at what was kept of the operand, which is sharded as that was; any point would do, and
    XLA drops the function's value. (``jax.linear_transpose`` knows no manual axes.)
    """
    codes = kept.codes if isinstance(kept, Quantized) else kept
    return jax.vjp(f, codes.astype(dtype))[1](g)[0]


@traced_once
def _bwd(config: _Config, residuals: _Residuals, g: jax.Array) -> tuple[jax.Array, jax.Array, DotStates]:
    dgrad, wgrad, dtype = config.recipe.dgrad, config.recipe.wgrad, config.backward_dtype
    scales, states = residuals.scales, residuals.states
    g = inf_to_nan(g)
    g_first, g_second, g_amax = _quantize_for_both((dgrad.lhs, wgrad.rhs), g, scales.get("output_grad"))

    with jax.named_scope(DGRAD):
        w = restore(residuals.rhs, dgrad.rhs, _whole(config.rhs_shape))
        w, g_wide = _dequantize(dgrad.rhs, w, dtype), _dequantize(dgrad.lhs, g_first, dtype)
        with _scope(dgrad.lhs, dgrad.rhs):
            lhs_grad = _transposed(lambda x: config.conv(x, w, dtype), residuals.lhs, dtype, g_wide)
    with jax.named_scope(WGRAD):
        x = restore(residuals.lhs, wgrad.lhs, _whole(config.lhs_shape))
        x, g_wide = _dequantize(wgrad.lhs, x, dtype), _dequantize(wgrad.rhs, g_second, dtype)
        with _scope(wgrad.lhs, wgrad.rhs):
            rhs_grad = _transposed(lambda w: config.conv(x, w, dtype), residuals.rhs, dtype, g_wide)
    amaxes: dict[str, Any] = {**residuals.amaxes, "output_grad": g_amax}
    next_states = {
        role: delayed_next_state(amaxes[role], scales[role], getattr(states, role)) for role in scales
    }
    return (
        sum_to_axes(lhs_grad, config.lhs_axes).astype(config.dtype),
        sum_to_axes(rhs_grad, config.rhs_axes).astype(config.dtype),
        DotStates(**{role: next_states.get(role) for role in DotStates._fields}),
    )


_convolve.defvjp(_fwd, _bwd)


# Derivation. Both return the array as it is, and pass its cotangent. The cotangent of the state is the
# state after a step whose tensor is the array, or its cotangent, with the scale that follows from it.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _measured(config: DelayedConfig, state: ScalingState, x: jax.Array) -> jax.Array:
    del config, state
    return x


_measured.defvjp(
    lambda config, state, x: (x, (x, state)),
    lambda config, residuals, g: (measured_next_state(config, *residuals), g),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_measured_grad(config: DelayedConfig, state: ScalingState, x: jax.Array) -> jax.Array:
    del config, state
    return x


_with_measured_grad.defvjp(
    lambda config, state, x: (x, state),
    lambda config, state, g: (measured_next_state(config, g, state), g),
)


def _check_one_scale(recipe: Recipe, uses: Sequence[Quantizer | None], conv: _Convolution) -> None:
    for quantizer in uses:
        if quantizer is None or isinstance(quantizer, DelayedQuantizer):
            continue
        if isinstance(quantizer, CurrentQuantizer) and quantizer.granularity == "tensorwise":
            continue
        raise ValueError(
            "A convolution whose windows overlap, or with groups or a dilated input, is not a matmul, and "
            "takes one scale per tensor: DelayedScaling() or Float8CurrentScaling(). Got the recipe "
            f"{recipe!r}, which scales along the contraction of a matmul, with "
            f"window_strides={conv.window_strides}, rhs_dilation={conv.rhs_dilation}, "
            f"lhs_dilation={conv.lhs_dilation}, feature_group_count={conv.feature_group_count} and "
            f"batch_group_count={conv.batch_group_count}. Give this layer a recipe of its own, or leave it "
            "as it is."
        )


def _warn_if_wide() -> None:
    """Warns, once, that a convolution is slower than its values look."""
    if compile_target.value is None:
        warnings.warn(
            "FP8 convolutions that are not matmuls run in the dtype of their operands, on every device: "
            "the values are those of FP8, the speed is not. fp8flax.audit shows which.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


def _as_convolution(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
) -> _Convolution:
    """Returns the arguments, which must have passed the checks of lax, with defaults settled."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    specs = [tuple(map(int, spec)) for spec in numbers]
    num_spatial = len(specs[0]) - 2
    ones = (1,) * num_spatial
    rhs_dilation = ones if rhs_dilation is None else rhs_dilation
    pairs = padding
    if isinstance(pairs, str):
        pairs = lax.padtype_to_pads(
            [lhs.shape[i] for i in specs[0][2:]],
            [
                (rhs.shape[i] - 1) * dilation + 1 if rhs.shape[i] else 0
                for i, dilation in zip(specs[1][2:], rhs_dilation)
            ],
            window_strides,
            pairs,
        )
    return _Convolution(
        tuple(map(int, window_strides)),
        tuple((int(low), int(high)) for low, high in pairs),
        ones if lhs_dilation is None else tuple(map(int, lhs_dilation)),
        tuple(map(int, rhs_dilation)),
        lax.ConvDimensionNumbers(*specs),
        int(feature_group_count),
        int(batch_group_count),
        hashable_precision(precision),
    )


def fp8_conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    states: DotStates = STATELESS,
    recipe: Recipe,
    form: str = "direct",
    is_frozen: bool = False,
) -> jax.Array:
    """Convolves in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    Where the windows do not overlap (1×1 kernels, patches, a window that covers all of the input),
    without groups and with an input that is not dilated, it is ``fp8_dot_general`` of the windows and the
    kernel, in FP8 units where there are any. The amax of the input then is that of what enters a window.

    Else both operands, and the cotangent, are cast to FP8 and back, and convolved in the dtype of the
    operands, on every device: XLA knows no gradients of convolutions in FP8, and its forward convolution
    in FP8 fails where cuDNN has none for the sizes at hand. What is kept for the backward pass is FP8.

    Args:
        lhs: the input, in the layout of ``dimension_numbers``, a wide float.
        rhs: the kernel, likewise, of the same dtype.
        window_strides: those of ``lax.conv_general_dilated``, as all that follow.
        padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair ``(before, after)`` per dimension.
        lhs_dilation: None for 1 in each dimension.
        rhs_dilation: None for 1 in each dimension.
        dimension_numbers: layouts of input, kernel and result.
        feature_group_count: number of groups of features.
        batch_group_count: number of groups of the batch.
        precision: as for ``fp8_dot_general`` where this is a matmul; else that of all three convolutions.
        preferred_element_type: dtype of the result; None for that of the operands.
        states: scaling states of the roles that have delayed scaling; their "gradients" are their next
            values.
        recipe: how the tensors are scaled; where this is not a matmul, with one scale per tensor.
        form: ``"direct"``; or ``"qdq"``, which keeps wide operands for the backward pass, and can be
            differentiated twice.
        is_frozen: as of ``fp8_dot_general``.

    Returns:
        The result, shaped like that of ``lax.conv_general_dilated``.

    Raises:
        TypeError: an operand is not a wide float, or ``preferred_element_type`` is not, or the operands do
            not fit each other.
        ValueError: the recipe takes matmuls only and this is none, or the shapes do not fit.
    """
    lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
    check_result_dtype(preferred_element_type)
    arguments = (
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
    )
    # Checks them, with the errors that users know, and settles the shape and the dtype of the result.
    out = jax.eval_shape(
        lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *arguments, preferred_element_type), lhs, rhs
    )
    conv = _as_convolution(lhs, rhs, *arguments)
    windows = _windows(conv, lhs.shape, rhs.shape, out.shape)
    if windows is not None:
        x, w, transposed = _as_matmul(conv, windows, lhs, rhs)
        y = fp8_dot_general(
            x,
            w,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision,
            preferred_element_type,
            states=states,
            recipe=recipe,
            form=form,
            is_frozen=is_frozen,
        )
        return lax.transpose(y, transposed)
    gemms = recipe.gemms
    uses = [q for g in (gemms.forward, gemms.dgrad, gemms.wgrad) for q in (g.lhs, g.rhs)]
    if not any(uses):
        with jax.named_scope(KEPT_WIDE):
            return conv(lhs, rhs, out.dtype)
    _check_one_scale(recipe, uses, conv)
    states = check_states(states, gemms)
    if is_frozen:
        _warn_if_wide()
        scales = {role: delayed_scale(q, getattr(states, role)) for role, q in gemms.delayed.items()}
        forward = gemms.forward
        with jax.named_scope(FORWARD):
            x = straight_through(forward.lhs, _whole(lhs.shape), lhs, scales.get("input"))
            w = straight_through(forward.rhs, _whole(rhs.shape), rhs, scales.get("kernel"))
            x, w = lax.optimization_barrier((x, w))  # see _dequantize
            with _scope(forward.lhs, forward.rhs):
                return conv(x, w, out.dtype)
    delayed = {role: (delayed_config(q), getattr(states, role)) for role, q in gemms.delayed.items()}
    if callable(measuring.value):
        for role, x in (("input", lhs), ("kernel", rhs)):
            if role in delayed:
                report_measured(measuring.value, delayed[role][0], x, delayed[role][1])
        return conv(lhs, rhs, out.dtype)
    lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    if measuring.value:
        lhs = _measured(*delayed["input"], lhs) if "input" in delayed else lhs
        rhs = _measured(*delayed["kernel"], rhs) if "kernel" in delayed else rhs
        y = conv(lhs, rhs, out.dtype)
        return _with_measured_grad(*delayed["output_grad"], y) if "output_grad" in delayed else y
    _warn_if_wide()
    if form == "qdq" and all(isinstance(quantizer, DelayedQuantizer) for quantizer in uses):
        (lhs_config, lhs_state), (rhs_config, rhs_state) = delayed["input"], delayed["kernel"]
        lhs = delayed_in_qdq(lhs_config, lhs, *lhs_state)
        rhs = delayed_in_qdq(rhs_config, rhs, *rhs_state)
        lhs, rhs = lax.optimization_barrier((lhs, rhs))  # see _dequantize
        with jax.named_scope(CONVOLVED_WIDE):
            y = conv(lhs, rhs, out.dtype)
        g_config, g_state = delayed["output_grad"]
        return delayed_out_qdq(g_config, y, *g_state)
    config = _Config(
        gemms, conv, lhs.shape, rhs.shape, lhs.dtype, out.dtype, manual_axes(lhs), manual_axes(rhs)
    )
    return _convolve(config, lhs, rhs, states)
