"""The FP8 matmul as a pure function of its operands and their scaling states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._core.names import DGRAD, FORWARD, KEPT_WIDE, OUTPUT_NAME, WGRAD
from fp8flax._gemm import ONCE, Gemm, multiply, warn_if_emulated
from fp8flax._max_dtype import is_max_dtype
from fp8flax._operands import (
    Quantized,
    View,
    dequantize_operand,
    is_blockwise,
    quantize_operand,
    stored,
    straight_through,
    swapped,
    swaps_with,
    unstored,
    with_padding,
    without_padding,
)
from fp8flax._qdq import (
    DelayedConfig,
    check_state,
    delayed_amax,
    delayed_in_qdq,
    delayed_next_state,
    delayed_out_qdq,
    delayed_scales,
    inf_to_nan,
    measured_next_state,
    report_measured,
)
from fp8flax._quantize import as_float_array
from fp8flax._recipes import CustomRecipe, DelayedQuantizer, GemmRecipe, Recipe
from fp8flax._state import ScalingState
from fp8flax._transforms import (
    manual_axes,
    refuse_unchecked_axes,
    reverse_mode_only,
    sum_to_axes,
    traced_once,
)

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
_Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class DotStates(NamedTuple):
    """The scaling states of one matmul; None for a tensor without delayed scaling."""

    input: ScalingState | None = None
    kernel: ScalingState | None = None
    output_grad: ScalingState | None = None


STATELESS = DotStates()


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


FORMS = ("direct", "qdq")
"""How an FP8 matmul is written down for the compiler."""


class _Transpose(NamedTuple):
    """A GEMM of the backward pass, and for each axis of its result that of the operand it belongs to."""

    dimension_numbers: _Dims
    axes: tuple[int, ...]


def _transposes(lhs: View, rhs: View) -> tuple[_Transpose, _Transpose]:
    """Derives dgrad and wgrad of ``out = dot_general(lhs, rhs)``.

    The axes of ``out``, and so of its cotangent ``g``, are ``(batch, free of lhs, free of rhs)``.

    * dgrad contracts ``g`` with ``rhs`` over the free axes of ``rhs``. What is left is ``(batch, free of
      lhs, contracted axes in the order of rhs)``.
    * wgrad contracts ``lhs`` with ``g`` over the free axes of ``lhs``. What is left is ``(batch, contracted
      axes in the order of lhs, free of rhs)``; for a Dense layer that is the kernel's own order.

    A transpose then puts each result into the order of the operand whose cotangent it is.
    """
    num_batch, num_lhs_free = len(lhs.batch), len(lhs.free)
    g_batch = tuple(range(num_batch))
    g_lhs_free = tuple(range(num_batch, num_batch + num_lhs_free))
    g_rhs_free = tuple(range(num_batch + num_lhs_free, num_batch + num_lhs_free + len(rhs.free)))
    partner_in_lhs = dict(zip(rhs.contract, lhs.contract))
    partner_in_rhs = dict(zip(lhs.contract, rhs.contract))
    dgrad_axes = (*lhs.batch, *lhs.free, *(partner_in_lhs[i] for i in sorted(rhs.contract)))
    wgrad_axes = (*rhs.batch, *(partner_in_rhs[i] for i in sorted(lhs.contract)), *rhs.free)
    return (
        _Transpose(((g_rhs_free, rhs.free), (g_batch, tuple(rhs.batch))), dgrad_axes),
        _Transpose(((lhs.free, g_lhs_free), (tuple(lhs.batch), g_batch)), wgrad_axes),
    )


def explicit_sharding(x: jax.Array) -> Any:
    """Returns the sharding of an array on a mesh with explicit axes, else None."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class _Config(NamedTuple):
    """What the FP8 matmul must know statically (hashable)."""

    recipe: CustomRecipe
    dimension_numbers: _Dims
    lhs_shape: tuple[int, ...]
    rhs_shape: tuple[int, ...]
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    lhs_sharding: Any
    rhs_sharding: Any
    out_sharding: Any
    lhs_axes: frozenset[str]
    """The manual axes of ``shard_map`` over which the input varies."""
    rhs_axes: frozenset[str]
    precision: Any
    """Of the GEMMs that do not run in FP8."""
    dequantized: bool
    """Whether all GEMMs run in the operands' wide dtypes, as a reference."""

    @property
    def forward(self) -> Gemm:
        """The forward GEMM."""
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = self.dimension_numbers
        return Gemm(
            recipe=self.recipe.forward,
            dimension_numbers=self.dimension_numbers,
            lhs=View(self.lhs_shape, lhs_contract, lhs_batch),
            rhs=View(self.rhs_shape, rhs_contract, rhs_batch),
            lhs_dtype=self.lhs_dtype,
            rhs_dtype=self.rhs_dtype,
            out_dtype=self.out_dtype,
            precision=self.precision,
            dequantized=self.dequantized,
            is_read_by_model=True,
        )

    @property
    def g_shape(self) -> tuple[int, ...]:
        """The shape of the result, and so of its cotangent."""
        lhs, rhs = self.forward.lhs, self.forward.rhs
        return (*lhs.sizes(lhs.batch), *lhs.sizes(lhs.free), *rhs.sizes(rhs.free))

    def _transposed(self, side: int) -> tuple[Gemm, _Transpose]:
        """Returns dgrad (0) or wgrad (1)."""
        transposes = _transposes(self.forward.lhs, self.forward.rhs)
        dims, axes = transposes[side]
        shapes = ((self.g_shape, self.rhs_shape), (self.lhs_shape, self.g_shape))[side]
        dtypes = ((self.out_dtype, self.rhs_dtype), (self.lhs_dtype, self.out_dtype))[side]
        sharding = (self.lhs_sharding, self.rhs_sharding)[side]
        if sharding is not None:
            sharding = NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in axes)))
        gemm = Gemm(
            recipe=(self.recipe.dgrad, self.recipe.wgrad)[side],
            dimension_numbers=dims,
            lhs=View(shapes[0], dims[0][0], dims[1][0]),
            rhs=View(shapes[1], dims[0][1], dims[1][1]),
            lhs_dtype=dtypes[0],
            rhs_dtype=dtypes[1],
            out_dtype=(self.lhs_dtype, self.rhs_dtype)[side],
            precision=self.precision,
            out_sharding=sharding,
            dequantized=self.dequantized,
        )
        return gemm, transposes[side]

    @property
    def is_automatic(self) -> bool:
        """Whether axes of the mesh that are explicit are left to XLA inside the matmul.

        Blocks are made by reshapes, of which JAX cannot tell how the result is sharded.
        """
        gemms = (self.recipe.forward, self.recipe.dgrad, self.recipe.wgrad)
        return self.lhs_sharding is not None and any(is_blockwise(q) for g in gemms for q in (g.lhs, g.rhs))

    @property
    def kept_shardings(self) -> tuple[Any, Any]:
        """The shardings of what is kept of the input and of the kernel."""
        (dgrad, _), (wgrad, _) = self.dgrad, self.wgrad
        return (
            _kept_sharding(wgrad.recipe.lhs, wgrad.lhs, self.lhs_sharding),
            _kept_sharding(dgrad.recipe.rhs, dgrad.rhs, self.rhs_sharding),
        )

    @property
    def dgrad(self) -> tuple[Gemm, _Transpose]:
        """The GEMM of the input's cotangent."""
        return self._transposed(0)

    @property
    def wgrad(self) -> tuple[Gemm, _Transpose]:
        """The GEMM of the kernel's cotangent."""
        return self._transposed(1)


def _kept_sharding(quantizer: Any, view: View, sharding: NamedSharding | None) -> Any:
    """Returns the sharding of an operand as ``keep`` returns it."""
    if sharding is None:  # not on the mesh
        return None
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    if quantizer is None:
        return sharding
    if not is_blockwise(quantizer):
        return Quantized(sharding, whole)
    # Dimensions that are flattened together can only be sharded by the first of them.
    spec = []
    for dims, size in zip((view.batch, view.free, view.contract), view.matrix_shape):
        names = [sharding.spec[i] for i in dims]
        axes = names[0] if names and not any(names[1:]) else None
        axes = (axes,) if isinstance(axes, str) else axes or ()
        devices = math.prod(sharding.mesh.shape[axis] for axis in axes)
        spec.append(axes if axes and size % devices == 0 else None)
    return Quantized(NamedSharding(sharding.mesh, PartitionSpec(*spec)), whole)


def _in_automatic_axes(config: _Config, f: Callable[..., Any], out_shardings: Any, *args: Any) -> Any:
    """Calls ``f(config, *args)`` with explicit axes left to XLA; None stands for a replicated result."""
    mesh = config.lhs_sharding.mesh
    explicit = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    inner = partial(f, config._replace(lhs_sharding=None, rhs_sharding=None))
    whole = NamedSharding(mesh, PartitionSpec())
    out_shardings = jax.tree.map(
        lambda s: whole if s is None else s, out_shardings, is_leaf=lambda s: s is None
    )
    return jax.sharding.auto_axes(inner, axes=explicit, out_sharding=out_shardings)(*args)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def quantize_once(quantizer: Any, view: View, x: jax.Array, delayed_scale: Any) -> Any:
    """Quantizes, and refuses to be differentiated: a second derivative would silently be zero."""
    return quantize_operand(quantizer, x, view, delayed_scale)


@quantize_once.defjvp
def _quantize_once_jvp(quantizer: Any, view: View, primals: Any, tangents: Any) -> Any:
    raise TypeError(ONCE)


class _Residuals(NamedTuple):
    """What the backward pass needs: operands in FP8, scalars, and the states, which are arguments."""

    lhs: Any
    """The input as wgrad takes it: ``Quantized``, its codes as uint8; wide if wgrad is in high precision.

    ``jax.checkpoint`` passes every float that it saves through ``lax.reduce_precision``, which knows no
    e4m3fn: 448 would become NaN, subnormals zero."""
    rhs: Any
    """Likewise the kernel as dgrad takes it."""
    scales: dict[str, jax.Array]
    """The scale of each role that has delayed scaling."""
    amaxes: dict[str, jax.Array]
    """The amax of the input and of the kernel, where they have delayed scaling."""
    states: DotStates


# Derivation. With straight-through quantization the cotangents of the operands are the two transposed
# products, of quantized values: dlhs = q(g) . q(rhs), drhs = q(lhs) . q(g), where q scales as the recipe of
# that GEMM says. The cotangents of the scaling states are their next values (see _qdq).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def _direct_dot_general(config: _Config, lhs: jax.Array, rhs: jax.Array, states: DotStates) -> jax.Array:
    scales = scales_of(config, states)
    if config.is_automatic:
        return _in_automatic_axes(config, _primal, config.out_sharding, lhs, rhs, scales)
    return _primal(config, lhs, rhs, scales)


def _primal(config: _Config, lhs: jax.Array, rhs: jax.Array, scales: dict[str, jax.Array]) -> jax.Array:
    gemm = config.forward
    q_lhs = quantize_once(gemm.recipe.lhs, gemm.lhs, lhs, scales.get("input"))
    q_rhs = quantize_once(gemm.recipe.rhs, gemm.rhs, rhs, scales.get("kernel"))
    with jax.named_scope(FORWARD):
        return multiply(gemm, q_lhs, q_rhs)


def scales_of(config: _Config, states: DotStates) -> dict[str, jax.Array]:
    """Returns the scale of each role with delayed scaling; where they are alike, computed as one."""
    delayed = config.recipe.delayed
    of = {role: (delayed_config(q), getattr(states, role)) for role, q in delayed.items()}
    if len({(q.amax_history_len, q.amax_compute_algo) for q in delayed.values()}) == 1:
        return dict(zip(of, delayed_scales(*zip(*of.values()))))
    return {role: delayed_scales((c,), (state,))[0] for role, (c, state) in of.items()}


def delayed_scale(quantizer: DelayedQuantizer, state: ScalingState) -> jax.Array:
    """Returns the scale, of one element, that a matmul with this state would use."""
    return delayed_scales((delayed_config(quantizer),), (check_state(*state),))[0]


def delayed_config(quantizer: DelayedQuantizer) -> DelayedConfig:
    """Returns a quantizer as the arithmetic of delayed scaling takes it."""
    return DelayedConfig(
        jnp.float32,
        quantizer.dtype,
        quantizer.margin,
        quantizer.amax_compute_algo,
        quantizer.use_power_2_scales,
    )


def _quantize_for_both(
    config: _Config, role: str, x: jax.Array, delayed_scale: jax.Array | None
) -> tuple[Any, Any]:
    """Returns a tensor as the first and as the second GEMM that it enters takes it."""
    forward, (dgrad, _), (wgrad, _) = config.forward, config.dgrad, config.wgrad
    first, second = {
        "input": ((forward.recipe.lhs, forward.lhs), (wgrad.recipe.lhs, wgrad.lhs)),
        "kernel": ((forward.recipe.rhs, forward.rhs), (dgrad.recipe.rhs, dgrad.rhs)),
        "output_grad": ((dgrad.recipe.lhs, dgrad.lhs), (wgrad.recipe.rhs, wgrad.rhs)),
    }[role]
    q = quantize_once(*first, x, delayed_scale)
    if swaps_with(first[0], second[0], first[1]):
        return q, swapped(q, first[0])
    return q, quantize_once(*second, x, delayed_scale)


def _quantize_with_amax(
    config: _Config, role: str, x: jax.Array, delayed_scale: jax.Array | None
) -> tuple[Any, Any, jax.Array | None]:
    """Returns a tensor for its two GEMMs, and its amax where it has delayed scaling."""
    first, second = _quantize_for_both(config, role, x, delayed_scale)
    amax = None if delayed_scale is None else delayed_amax(x)
    # Together, so that XLA reads the wide tensor once for all, and does not cast it a second time where
    # a GEMM wants it transposed. (For kernels that saves nothing, and a policy that recomputes the
    # quantized kernel would take the amax along.)
    codes = [q.codes if isinstance(q, Quantized) else None for q in (first, second)]
    shared = codes[0] is codes[1]
    codes, amax = lax.optimization_barrier((codes[:1] if shared else codes, amax))
    first, second = (
        q._replace(codes=c) if isinstance(q, Quantized) else q
        for q, c in zip((first, second), codes * 2 if shared else codes)
    )
    return first, second, amax


@traced_once
def _direct_fwd(
    config: _Config, lhs: jax.Array, rhs: jax.Array, states: DotStates
) -> tuple[jax.Array, _Residuals]:
    scales = jax.tree.map(partial(checkpoint_name, name="fp8_scaling"), scales_of(config, states))
    if config.is_automatic:
        out, lhs_kept, rhs_kept, amaxes = _in_automatic_axes(
            config, _forward, (config.out_sharding, *config.kept_shardings, None), lhs, rhs, scales
        )
    else:
        out, lhs_kept, rhs_kept, amaxes = _forward(config, lhs, rhs, scales)
    return out, _Residuals(lhs_kept, rhs_kept, scales, amaxes, states)


def _forward(
    config: _Config, lhs: jax.Array, rhs: jax.Array, scales: dict[str, jax.Array]
) -> tuple[jax.Array, Any, Any, dict[str, jax.Array]]:
    """Returns the product, both operands to keep, and their amaxes where they have delayed scaling."""
    lhs_first, lhs_second, lhs_amax = _quantize_with_amax(config, "input", lhs, scales.get("input"))
    rhs_first, rhs_second = _quantize_for_both(config, "kernel", rhs, scales.get("kernel"))
    amaxes = {} if lhs_amax is None else {"input": lhs_amax}
    if "kernel" in scales:
        amaxes["kernel"] = delayed_amax(rhs)
    (dgrad, _), (wgrad, _) = config.dgrad, config.wgrad
    amaxes = jax.tree.map(partial(checkpoint_name, name="fp8_scaling"), amaxes)
    lhs_kept = keep(lhs_second, "fp8_input", wgrad.recipe.lhs, wgrad.lhs, scales.get("input"))
    rhs_kept = keep(rhs_second, "fp8_kernel", dgrad.recipe.rhs, dgrad.rhs, scales.get("kernel"))
    # Where a tensor's codes serve both GEMMs, from the residuals: a GEMM that is computed again then
    # starts from what a policy kept.
    gemm = config.forward
    if swaps_with(gemm.recipe.lhs, wgrad.recipe.lhs, gemm.lhs):
        lhs_first = swapped(restore(lhs_kept, wgrad.recipe.lhs, wgrad.lhs), gemm.recipe.lhs)
    if swaps_with(gemm.recipe.rhs, dgrad.recipe.rhs, gemm.rhs):
        rhs_first = swapped(restore(rhs_kept, dgrad.recipe.rhs, dgrad.rhs), gemm.recipe.rhs)
    with jax.named_scope(FORWARD):
        out = multiply(gemm, lhs_first, rhs_first)
    return checkpoint_name(out, OUTPUT_NAME), lhs_kept, rhs_kept, amaxes


def keep(operand: Any, name: str, quantizer: Any, view: View, delayed_scale: Any) -> Any:
    """Returns an operand to keep for the backward pass, under a name for policies."""
    if quantizer is None:
        # A wide kernel is an argument, and there anyway.
        return checkpoint_name(operand, name) if name == "fp8_input" else operand
    codes, scale = without_padding(quantizer, operand, view)
    codes = checkpoint_name(lax.bitcast_convert_type(codes, jnp.uint8), name)
    if isinstance(quantizer, DelayedQuantizer):
        return Quantized(codes, delayed_scale)  # which has its name
    if scale.dtype == jnp.float8_e8m0fnu:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
    return Quantized(codes, checkpoint_name(scale, "fp8_scaling"))


def restore(kept: Any, quantizer: Any, view: View) -> Any:
    """Returns the operand that ``keep`` was given."""
    if quantizer is None:
        return kept
    scale = kept.scale
    if scale.dtype == jnp.uint8:
        scale = lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    codes = lax.bitcast_convert_type(kept.codes, quantizer.dtype)
    return with_padding(quantizer, Quantized(codes, scale), view)


@traced_once
def _direct_bwd(
    config: _Config, residuals: _Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, DotStates]:
    scales, states = residuals.scales, residuals.states
    g = inf_to_nan(g)
    kept = residuals.lhs, residuals.rhs
    if config.is_automatic:
        lhs_grad, rhs_grad, g_amax = _in_automatic_axes(
            config, _backward, (config.lhs_sharding, config.rhs_sharding, None), *kept, scales, g
        )
    else:
        lhs_grad, rhs_grad, g_amax = _backward(config, *kept, scales, g)
    amaxes: dict[str, Any] = {**residuals.amaxes, "output_grad": g_amax}
    next_states = {
        role: delayed_next_state(amaxes[role], scales[role], getattr(states, role)) for role in scales
    }
    # Inside shard_map an operand that is the same everywhere gets the sum of all cotangents.
    lhs_grad, rhs_grad = sum_to_axes(lhs_grad, config.lhs_axes), sum_to_axes(rhs_grad, config.rhs_axes)
    # On explicit axes scales per row or column may have brought a sharding of their own.
    lhs_grad, rhs_grad = (
        grad if sharding is None else jax.sharding.reshard(grad, sharding)
        for grad, sharding in ((lhs_grad, config.lhs_sharding), (rhs_grad, config.rhs_sharding))
    )
    return lhs_grad, rhs_grad, DotStates(**{role: next_states.get(role) for role in DotStates._fields})


def _backward(
    config: _Config, lhs_kept: Any, rhs_kept: Any, scales: dict[str, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the two gradients, and the amax of ``g`` where it has delayed scaling."""
    g_first, g_second, g_amax = _quantize_with_amax(config, "output_grad", g, scales.get("output_grad"))
    (dgrad, dgrad_transpose), (wgrad, wgrad_transpose) = config.dgrad, config.wgrad
    with jax.named_scope(DGRAD):
        lhs_grad = multiply(dgrad, g_first, restore(rhs_kept, dgrad.recipe.rhs, dgrad.rhs))
        lhs_grad = lax.transpose(lhs_grad, np.argsort(dgrad_transpose.axes))
    with jax.named_scope(WGRAD):
        rhs_grad = multiply(wgrad, restore(lhs_kept, wgrad.recipe.lhs, wgrad.lhs), g_second)
        rhs_grad = lax.transpose(rhs_grad, np.argsort(wgrad_transpose.axes))
    return lhs_grad, rhs_grad, g_amax


_direct_dot_general.defvjp(_direct_fwd, _direct_bwd)


measuring = jax.make_user_context(False)
"""Whether matmuls run in the operands' wide dtypes, and only the next scaling states are made.

True to make them as gradients of the states; a function to tell it those of inputs and kernels."""


# Derivation. The product and its derivatives are those of lax.dot_general; the cotangents of the scaling
# states are the states after a step whose tensors these are, with the scale that follows from them.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _measured_dot_general(
    recipe: CustomRecipe,
    dimension_numbers: _Dims,
    precision: Any,
    preferred_element_type: Any,
    lhs: jax.Array,
    rhs: jax.Array,
    states: DotStates,
) -> jax.Array:
    del recipe, states
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
    )


def _measured_fwd(
    recipe: CustomRecipe,
    dimension_numbers: _Dims,
    precision: Any,
    preferred_element_type: Any,
    lhs: jax.Array,
    rhs: jax.Array,
    states: DotStates,
) -> tuple[jax.Array, Any]:
    args = (recipe, dimension_numbers, precision, preferred_element_type, lhs, rhs, states)
    return _measured_dot_general(*args), (lhs, rhs, states)


def _measured_bwd(
    recipe: CustomRecipe,
    dimension_numbers: _Dims,
    precision: Any,
    preferred_element_type: Any,
    residuals: Any,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, DotStates]:
    lhs, rhs, states = residuals
    _, transpose = jax.vjp(
        partial(
            lax.dot_general,
            dimension_numbers=dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
        ),
        lhs,
        rhs,
    )
    tensors = {"input": lhs, "kernel": rhs, "output_grad": g}
    next_states = {
        role: measured_next_state(delayed_config(quantizer), tensors[role], getattr(states, role))
        for role, quantizer in recipe.delayed.items()
    }
    return *transpose(g), DotStates(**next_states)


_measured_dot_general.defvjp(_measured_fwd, _measured_bwd)


def _hashable_dims(dimension_numbers: DimensionNumbers) -> _Dims:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    return (
        (tuple(map(int, lhs_contract)), tuple(map(int, rhs_contract))),
        (tuple(map(int, lhs_batch)), tuple(map(int, rhs_batch))),
    )


def hashable_precision(precision: Any) -> Any:
    """Returns a precision as a static argument."""
    return tuple(precision) if isinstance(precision, list) else precision


def check_result_dtype(preferred_element_type: Any) -> None:
    """Raises ``TypeError`` where a result is asked for in another dtype than a wide float."""
    if preferred_element_type is not None and not is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )


def check_states(states: DotStates, gemms: CustomRecipe) -> DotStates:
    """Returns the states that some GEMM uses, or raises where one cannot be state."""
    if any(map(is_max_dtype, jax.tree.leaves(states, is_leaf=is_max_dtype))):
        refuse_unchecked_axes()
    return DotStates(**{role: check_state(*getattr(states, role)) for role in gemms.delayed})


def is_wide_float(dtype: Any) -> bool:
    """Tells whether a dtype is a float of two bytes or more."""
    try:
        return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False


def with_precision(recipe: CustomRecipe, precision: Any) -> CustomRecipe:
    """Returns the recipe with the accumulation that ``precision`` asks for, or raises ``TypeError``."""
    if precision is None:
        return recipe
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
    gemms = {name: getattr(recipe, name) for name in ("forward", "dgrad", "wgrad")}
    return CustomRecipe(**{k: dataclasses.replace(gemm, accumulation=word) for k, gemm in gemms.items()})


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    states: DotStates = STATELESS,
    recipe: Recipe,
    form: str = "direct",
    is_frozen: bool = False,
) -> jax.Array:
    """Multiplies in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    Args:
        lhs: the input, any shape, a wide float.
        rhs: the kernel, any shape, a wide float.
        dimension_numbers: those of ``lax.dot_general``.
        precision: None for the recipe's accumulation; ``DEFAULT`` for fast and ``HIGH`` or ``HIGHEST``
            for exact accumulation in all three GEMMs. A GEMM that stays wide gets it as it is.
        preferred_element_type: dtype of the result; None for what ``lax.dot_general`` gives.
        states: scaling states of the roles that have delayed scaling; their "gradients" are their next
            values.
        recipe: how the tensors are scaled.
        form: ``"direct"`` puts FP8 operands into the GEMMs; ``"qdq"`` quantizes and dequantizes around
            GEMMs in the dtype of the operands.
        is_frozen: whether the states stay as they are, and derivatives are those of
            ``frozen_dot_general``.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: an operand is not a wide float, or ``preferred_element_type`` is not, or ``precision``
            is none of the above, or the operands do not fit the dimension numbers.
    """
    lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
    check_result_dtype(preferred_element_type)
    gemms = recipe.gemms
    uses = [q for g in (gemms.forward, gemms.dgrad, gemms.wgrad) for q in (g.lhs, g.rhs)]
    if not any(uses):
        with jax.named_scope(KEPT_WIDE):
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
            )
    if is_frozen:
        config = _config(lhs, rhs, dimension_numbers, precision, preferred_element_type, gemms, form)
        warn_if_emulated(config.recipe.forward)
        scales = scales_of(config, check_states(states, gemms))
        return _frozen_dot_general(
            config, lhs, rhs, _Fixed(None, scales.get("kernel"), scales.get("input"))
        )
    if callable(measuring.value):
        given = check_states(states, gemms)._asdict()
        for role, x in (("input", lhs), ("kernel", rhs)):
            if role in gemms.delayed:
                report_measured(measuring.value, delayed_config(gemms.delayed[role]), x, given[role])
        return lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
        )
    lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    if measuring.value:
        return _measured_dot_general(
            gemms,
            _hashable_dims(dimension_numbers),
            hashable_precision(precision),
            preferred_element_type,
            lhs,
            rhs,
            check_states(states, gemms),
        )
    if form == "qdq" and all(isinstance(quantizer, DelayedQuantizer) for quantizer in uses):
        configs = {role: delayed_config(quantizer) for role, quantizer in gemms.delayed.items()}
        given = check_states(states, gemms)._asdict()
        lhs = delayed_in_qdq(configs["input"], lhs, *given["input"])
        rhs = delayed_in_qdq(configs["kernel"], rhs, *given["kernel"])
        out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
        return delayed_out_qdq(configs["output_grad"], out, *given["output_grad"])
    config = _config(lhs, rhs, dimension_numbers, precision, preferred_element_type, gemms, form)
    warn_if_emulated(config.recipe.forward, config.recipe.dgrad, config.recipe.wgrad)
    return _direct_dot_general(config, lhs, rhs, check_states(states, gemms))


def _config(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    gemms: CustomRecipe,
    form: str,
) -> _Config:
    gemms = with_precision(gemms, precision)
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
    return _Config(
        gemms,
        _hashable_dims(dimension_numbers),
        lhs.shape,
        rhs.shape,
        lhs.dtype,
        rhs.dtype,
        out.dtype,
        explicit_sharding(lhs),
        explicit_sharding(rhs),
        getattr(out, "sharding", None),
        manual_axes(lhs),
        manual_axes(rhs),
        hashable_precision(precision),
        form == "qdq",
    )


def quantize_kernel(
    lhs: Any, rhs: jax.Array, dimension_numbers: DimensionNumbers, recipe: CustomRecipe, scale: Any
) -> Quantized:
    """Quantizes a kernel as the forward GEMM takes it, with its codes in its own shape.

    Args:
        lhs: the input, or its shape and dtype.
        rhs: the kernel, any shape, a wide float.
        dimension_numbers: those of ``lax.dot_general``.
        recipe: how; the kernel's quantizer in the forward GEMM is not None.
        scale: for delayed scaling, the scale to use.
    """
    lhs = jax.eval_shape(lambda x: x, lhs)
    gemm = _config(lhs, rhs, dimension_numbers, None, None, recipe, "direct").forward
    quantizer = gemm.recipe.rhs
    assert quantizer is not None
    operand = quantize_operand(quantizer, rhs, gemm.rhs, scale)
    assert isinstance(operand, Quantized)
    return stored(quantizer, operand, gemm.rhs)


def frozen_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    kernel: Quantized,
    input_scale: jax.Array | None,
    recipe: CustomRecipe,
    form: str = "direct",
) -> jax.Array:
    """Multiplies an input by a kernel that is quantized already: the forward GEMM of ``fp8_dot_general``.

    It can be differentiated with respect to the input, in forward and reverse mode and any number of times:
    its derivative is the product of the tangent and the dequantized kernel, both in their wide dtypes.

    Args:
        lhs: the input, any shape, a wide float.
        rhs: anything of the kernel's shape and wide dtype; its values are not read.
        dimension_numbers: those of ``lax.dot_general``.
        precision: as of ``fp8_dot_general``.
        preferred_element_type: dtype of the result; None for what ``lax.dot_general`` gives.
        kernel: what ``quantize_kernel`` returned.
        input_scale: the input's scale, where that is delayed.
        recipe: how the input is scaled, and how the kernel was.
        form: ``"direct"`` or ``"qdq"``, as of ``fp8_dot_general``.
    """
    config = _config(lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe, form)
    warn_if_emulated(config.recipe.forward)
    return _frozen_dot_general(config, lhs, lax.stop_gradient(rhs), _Fixed(kernel, None, input_scale))


class _Fixed(NamedTuple):
    """What does not change from call to call of a frozen matmul."""

    kernel: Quantized | None
    """None where it is quantized at each call, with its own scale if that is delayed."""
    kernel_scale: jax.Array | None
    input_scale: jax.Array | None


# Derivation. With straight-through quantization the derivative of q(x) . q(w) in the direction (dx, dw) is
# dx . q(w) + q(x) . dw. There is no scale for tangents, nor for cotangents: both stay wide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _frozen_dot_general(config: _Config, lhs: jax.Array, rhs: jax.Array, fixed: _Fixed) -> jax.Array:
    return _maybe_in_automatic_axes(config, _frozen_primal, lhs, rhs, fixed)


def _maybe_in_automatic_axes(config: _Config, f: Callable[..., Any], *args: Any) -> Any:
    if config.is_automatic:
        return _in_automatic_axes(config, f, config.out_sharding, *args)
    return f(config, *args)


def _frozen_primal(config: _Config, lhs: jax.Array, rhs: jax.Array, fixed: _Fixed) -> jax.Array:
    gemm = config.forward
    q_lhs = quantize_operand(gemm.recipe.lhs, lhs, gemm.lhs, fixed.input_scale)
    if fixed.kernel is None:
        q_rhs = quantize_operand(gemm.recipe.rhs, rhs, gemm.rhs, fixed.kernel_scale)
    else:
        assert gemm.recipe.rhs is not None
        q_rhs = unstored(gemm.recipe.rhs, fixed.kernel, gemm.rhs)
    with jax.named_scope(FORWARD):
        return multiply(gemm, q_lhs, q_rhs)


def _along_lhs(config: _Config, tangent: jax.Array, rhs: jax.Array, fixed: _Fixed) -> jax.Array:
    gemm = config.forward
    if fixed.kernel is None:
        rhs = straight_through(gemm.recipe.rhs, gemm.rhs, rhs, fixed.kernel_scale)
    else:
        assert gemm.recipe.rhs is not None
        kernel = unstored(gemm.recipe.rhs, fixed.kernel, gemm.rhs)
        rhs = dequantize_operand(gemm.recipe.rhs, kernel, gemm.rhs, gemm.rhs_dtype)
    return multiply(gemm._replace(recipe=GemmRecipe()), tangent, rhs)


def _along_rhs(config: _Config, tangent: jax.Array, lhs: jax.Array, fixed: _Fixed) -> jax.Array:
    gemm = config.forward
    lhs = straight_through(gemm.recipe.lhs, gemm.lhs, lhs, fixed.input_scale)
    return multiply(gemm._replace(recipe=GemmRecipe()), lhs, tangent)


def _frozen_jvp(config: _Config, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs, fixed), (lhs_dot, rhs_dot, _) = primals, tangents
    terms = [
        _maybe_in_automatic_axes(config, along, tangent, other, fixed)
        for along, tangent, other in ((_along_lhs, lhs_dot, rhs), (_along_rhs, rhs_dot, lhs))
        if not isinstance(tangent, SymbolicZero)
    ]
    out = _frozen_dot_general(config, lhs, rhs, fixed)
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_frozen_dot_general.defjvp(_frozen_jvp, symbolic_zeros=True)


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
        precision,
        preferred_element_type,
    )
    return lax.transpose(out, plan.permutation)
