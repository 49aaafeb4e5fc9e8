"""The FP8 matmul of a mixture of experts: each row with the kernel of the expert that it belongs to."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from fp8flax._core.names import DGRAD, FORWARD, KEPT_WIDE, OUTPUT_NAME, WGRAD
from fp8flax._dot_general import (
    DotStates,
    check_result_dtype,
    check_states,
    delayed_config,
    explicit_sharding,
    hashable_precision,
    keep,
    measuring,
    quantize_once,
    restore,
    with_precision,
)
from fp8flax._gemm import Gemm, multiply, warn_if_emulated
from fp8flax._max_dtype import is_max_dtype
from fp8flax._operands import Quantized, View, is_blockwise, straight_through, swaps_with
from fp8flax._qdq import (
    check_state,
    delayed_amax,
    delayed_next_state,
    delayed_scale,
    inf_to_nan,
    measured_next_state,
    report_measured,
)
from fp8flax._quantize import as_float_array
from fp8flax._recipes import CustomRecipe, Recipe
from fp8flax._state import ScalingState
from fp8flax._transforms import (
    manual_axes,
    refuse_unchecked_axes,
    reverse_mode_only,
    sum_to_axes,
    traced_once,
    vary_alike,
)

# A tile of rows is multiplied by one expert's kernel at a time, and once more for each further expert that
# owns some of its rows. Small tiles waste few rows; large ones read a kernel less often and fill more of
# a GPU. Half of a group's average is a heuristic, as are the bounds.
_SMALLEST_TILE, _LARGEST_TILE = 128, 512
_ROW_MULTIPLE = 16  # what cublasLt takes


def _tile_of(rows: int, groups: int) -> int:
    """Returns how many rows are multiplied at a time."""
    half = max(1, rows // (2 * groups))
    tile = min(max(1 << (half.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)
    return min(tile, max(_ROW_MULTIPLE, -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE))


class _Visit(NamedTuple):
    """One tile of rows that meets one expert's kernel; or arrays of them, one element per visit."""

    row: jax.Array
    """The tile's first row."""
    expert: jax.Array
    low: jax.Array
    """The first row of the tile, counted from its start, that belongs to the expert."""
    high: jax.Array
    """The row after the last one."""
    is_first: jax.Array
    """Whether it is the expert's first tile."""


class _Config(NamedTuple):
    """What the FP8 matmul must know statically (hashable)."""

    recipe: CustomRecipe
    rows: int
    groups: int
    depth: int
    """Columns of the input, which are rows of each kernel."""
    columns: int
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    lhs_axes: frozenset[str]
    """The manual axes of ``shard_map`` over which the input varies."""
    rhs_axes: frozenset[str]
    precision: Any
    """Of the GEMMs that do not run in FP8."""
    dequantized: bool
    """Whether all GEMMs run in the operands' wide dtypes, as a reference."""

    @property
    def tile(self) -> int:
        """Rows that are multiplied at a time."""
        return _tile_of(self.rows, self.groups)

    @property
    def padded_rows(self) -> int:
        """Rows of whole tiles, of at least one."""
        return max(1, -(-self.rows // self.tile)) * self.tile

    @property
    def num_visits(self) -> int:
        """The most tiles, each counted once per expert in it, that there can be."""
        return self.padded_rows // self.tile + self.groups - 1

    def _gemm(self, name: str, lhs: View, rhs: View, dtypes: tuple[np.dtype, np.dtype, np.dtype]) -> Gemm:
        return Gemm(
            recipe=getattr(self.recipe, name),
            dimension_numbers=((lhs.contract, rhs.contract), ((), ())),
            lhs=lhs,
            rhs=rhs,
            lhs_dtype=dtypes[0],
            rhs_dtype=dtypes[1],
            out_dtype=dtypes[2],
            precision=self.precision,
            dequantized=self.dequantized,
        )

    @property
    def forward(self) -> Gemm:
        """The forward GEMM of one visit; the kernel transposed, as FP8 units read it."""
        return self._gemm(
            "forward",
            View((self.tile, self.depth), (1,), ()),
            View((self.columns, self.depth), (1,), ()),
            (self.lhs_dtype, self.rhs_dtype, self.out_dtype),
        )

    @property
    def dgrad(self) -> Gemm:
        """The GEMM of the input's cotangent in one visit."""
        return self._gemm(
            "dgrad",
            View((self.tile, self.columns), (1,), ()),
            View((self.depth, self.columns), (1,), ()),
            (self.out_dtype, self.rhs_dtype, self.lhs_dtype),
        )

    @property
    def wgrad(self) -> Gemm:
        """The GEMM of one kernel's cotangent in one visit, to be added to that of its other visits."""
        wide = np.dtype(np.float64 if self.rhs_dtype == np.float64 else np.float32)
        return self._gemm(
            "wgrad",
            View((self.tile, self.depth), (0,), ()),
            View((self.tile, self.columns), (0,), ()),
            (self.lhs_dtype, self.out_dtype, wide),
        )


def _visits(config: _Config, group_sizes: jax.Array) -> _Visit:
    """Returns the visits in the order of the rows; those that are too many repeat the last, without rows.

    An expert with rows ``start`` to ``end - 1`` visits tiles ``start // tile`` to ``(end - 1) // tile``.
    """
    tile = np.int32(config.tile)
    ends = jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32), dtype=jnp.int32), np.int32(config.rows))
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    counts = jnp.where(ends > starts, (ends - 1) // tile - starts // tile + 1, 0)
    after = jnp.cumsum(counts, dtype=jnp.int32)
    index = lax.iota(np.int32, config.num_visits)
    visit = jnp.maximum(jnp.minimum(index, after[-1] - 1), 0)
    expert = jnp.sum(visit[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, np.int32(config.groups - 1))
    nth = visit - (after - counts)[expert]
    is_used = index < after[-1]
    row = jnp.where(is_used, (starts[expert] // tile + nth) * tile, 0)
    return _Visit(
        row=row,
        expert=expert,
        low=jnp.maximum(starts[expert] - row, 0),
        high=jnp.where(is_used, jnp.minimum(ends[expert] - row, tile), 0),
        is_first=is_used & (nth == 0),
    )


def _mine(config: _Config, visit: _Visit) -> jax.Array:
    """Tells for each row of a visit's tile whether it belongs to the expert, ``(tile, 1)``."""
    row = lax.broadcasted_iota(np.int32, (config.tile, 1), 0)
    return (row >= visit.low) & (row < visit.high)


def _grouped_rows(config: _Config, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns a tensor with whole tiles of rows, zeros for the rows that belong to no expert."""
    padding = ((0, config.padded_rows - config.rows, 0), (0, 0, 0))
    x = jnp.where(_is_grouped(config, group_sizes), x, np.zeros((), x.dtype))
    return lax.pad(x, np.zeros((), x.dtype), padding)


def _is_grouped(config: _Config, group_sizes: jax.Array) -> jax.Array:
    """Tells for each row whether it belongs to any expert, ``(rows, 1)``."""
    return lax.broadcasted_iota(np.int32, (config.rows, 1), 0) < _num_grouped(group_sizes)


def _num_grouped(group_sizes: jax.Array) -> jax.Array:
    return jnp.sum(group_sizes.astype(jnp.int32), dtype=jnp.int32)


def _grouped_amax(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Returns the ``delayed_amax`` of ``_grouped_rows``, that of an empty tensor where there are none."""
    return jnp.where(_num_grouped(group_sizes) > 0, delayed_amax(x), np.array(-np.inf, x.dtype))


def _tile_rows(config: _Config, operand: Any, row: jax.Array) -> Any:
    """Returns the tile of an operand that starts at ``row``; a scale that all rows share stays whole."""

    def cut(x: jax.Array) -> jax.Array:
        has_rows = x.ndim == 2 and x.shape[0] == config.padded_rows
        return lax.dynamic_slice_in_dim(x, row, config.tile) if has_rows else x

    return jax.tree.map(cut, operand)


# Compiled as one where it is called un-jitted, or each call would compile its loop anew; part of the
# program around it elsewhere.
@partial(jax.jit, static_argnums=(0, 1, 4), inline=True)
def _multiply_rows(
    config: _Config, gemm: Gemm, lhs: Any, kernels: Any, columns: int, visits: _Visit
) -> jax.Array:
    """Returns each row times its expert's kernel, ``(padded rows, columns)``; zeros for all other rows."""

    def step(out: jax.Array, visit: _Visit) -> tuple[jax.Array, None]:
        kernel = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, visit.expert, keepdims=False), kernels)
        product = multiply(gemm, _tile_rows(config, lhs, visit.row), kernel)
        before = lax.dynamic_slice_in_dim(out, visit.row, config.tile)
        rows = jnp.where(_mine(config, visit), product, before)
        return lax.dynamic_update_slice_in_dim(out, rows, visit.row, 0), None

    zeros = jnp.zeros((config.padded_rows, columns), gemm.out_dtype)
    return lax.scan(step, _varying_as((lhs, kernels, visits), zeros)[0], visits)[0]


@partial(jax.jit, static_argnums=0, inline=True)
def _multiply_groups(config: _Config, lhs: Any, rhs: Any, visits: _Visit) -> jax.Array:
    """Returns the sum of outer products over the rows of each expert, ``(experts, depth, columns)``."""

    def step(carry: tuple[jax.Array, jax.Array], visit: _Visit) -> tuple[Any, None]:
        total, out = carry
        mine = _mine(config, visit)
        # Both, or the NaN of another expert's row would meet a zero.
        of_visit = (_only(mine, _tile_rows(config, operand, visit.row)) for operand in (lhs, rhs))
        total = jnp.where(visit.is_first, jnp.zeros_like(total), total) + multiply(config.wgrad, *of_visit)
        # Experts follow each other: the last visit of one leaves its whole sum.
        return (total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), visit.expert, 0)), None

    shape = (config.depth, config.columns)
    start = _varying_as(
        (lhs, rhs, visits),
        jnp.zeros(shape, config.wgrad.out_dtype),
        jnp.zeros((config.groups, *shape), config.rhs_dtype),
    )
    return lax.scan(step, (start[0], start[1]), visits)[0][1]


def _only(mine: jax.Array, operand: Any) -> Any:
    """Returns a tile with zeros for the rows of other experts."""
    x = operand.codes if isinstance(operand, Quantized) else operand
    x = jnp.where(mine, x, np.zeros((), x.dtype))
    return operand._replace(codes=x) if isinstance(operand, Quantized) else x


def _varying_as(tree: Any, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, varying over the manual axes that anything in the tree varies over."""
    return vary_alike(*arrays, *jax.tree.leaves(tree))[: len(arrays)]


def _quantize_for_both(config: _Config, role: str, x: jax.Array, scale: jax.Array | None) -> list[Any]:
    """Returns a tensor as the first and as the second GEMM that it enters takes it; kernels one by one."""
    recipe = config.recipe
    uses = {
        "input": ((recipe.forward.lhs, 1), (recipe.wgrad.lhs, 0)),
        "kernel": ((recipe.forward.rhs, 0), (recipe.dgrad.rhs, 1)),
        "output_grad": ((recipe.dgrad.lhs, 1), (recipe.wgrad.rhs, 0)),
    }[role]
    shape = x.shape[-2:]

    def quantized(quantizer: Any, axis: int) -> Any:
        quantize = partial(quantize_once, quantizer, View(shape, (axis,), ()))
        if role == "kernel":
            quantize = jax.vmap(quantize, in_axes=(0, None if scale is None else 0))
        return quantize(x, scale)

    first = quantized(*uses[0])
    return [first, first if _is_shared(*(q for q, _ in uses)) else quantized(*uses[1])]


def _is_shared(first: Any, second: Any) -> bool:
    """Tells whether a tensor's codes for one GEMM serve the other."""
    return swaps_with(first, second, View((), (), ()))  # looked at for blocks only


def _transposed(kernels: Any) -> Any:
    """Returns all kernels, and their scales per row or column, transposed."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x, kernels)


def scales_of(config: _Config, states: DotStates) -> dict[str, jax.Array]:
    """Returns the scale of each role with delayed scaling: a scalar, for kernels one per expert."""
    scales = {}
    for role, quantizer in config.recipe.delayed.items():
        compute = partial(delayed_scale, delayed_config(quantizer))
        is_kernel = role == "kernel"
        scale = (jax.vmap(compute) if is_kernel else compute)(getattr(states, role))
        scales[role] = scale.reshape((config.groups,) if is_kernel else ())
    return scales


class _Residuals(NamedTuple):
    """What the backward pass needs: operands in FP8, scales, and the states, which are arguments."""

    lhs: Any
    """The input, of whole tiles, as wgrad takes it; its codes as uint8, as in ``_dot_general``."""
    rhs: Any
    """The kernels as dgrad takes them."""
    group_sizes: jax.Array
    scales: dict[str, jax.Array]
    amaxes: dict[str, jax.Array]
    """The amax of the input and of each kernel, where they have delayed scaling."""
    states: DotStates


# Derivation. Row m of the result is x[m] . w[e] with its expert e. With straight-through quantization
# dx[m] = q(g[m]) . q(w[e]).T, and dw[e] is the sum of the outer products q(x[m]) q(g[m]) over the rows of
# e. Scales multiply the product of each visit, which has one expert's only. The cotangents of the scaling
# states are their next values (see _qdq).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def _ragged_dot(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, states: DotStates
) -> jax.Array:
    return _fwd(config, lhs, rhs, group_sizes, states)[0]


@traced_once
def _fwd(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, states: DotStates
) -> tuple[jax.Array, _Residuals]:
    scales = jax.tree.map(partial(checkpoint_name, name="fp8_scaling"), scales_of(config, states))
    lhs = _grouped_rows(config, lhs, group_sizes)
    amaxes = {}
    if "input" in scales:
        amaxes["input"] = _grouped_amax(lhs, group_sizes)
    if "kernel" in scales:
        amaxes["kernel"] = jax.vmap(delayed_amax)(rhs)
    amaxes = jax.tree.map(partial(checkpoint_name, name="fp8_scaling"), amaxes)
    recipe = config.recipe
    lhs_first, lhs_second = _quantize_for_both(config, "input", lhs, scales.get("input"))
    rhs_first, rhs_second = _quantize_for_both(config, "kernel", rhs, scales.get("kernel"))
    lhs_kept = keep(lhs_second, "fp8_input", recipe.wgrad.lhs, config.wgrad.lhs, scales.get("input"))
    rhs_kept = keep(rhs_second, "fp8_kernel", recipe.dgrad.rhs, config.dgrad.rhs, scales.get("kernel"))
    # From the residuals where that is the same: what is computed again starts from what a policy kept.
    if _is_shared(recipe.forward.lhs, recipe.wgrad.lhs):
        lhs_first = restore(lhs_kept, recipe.wgrad.lhs, config.wgrad.lhs)
    if _is_shared(recipe.forward.rhs, recipe.dgrad.rhs):
        rhs_first = restore(rhs_kept, recipe.dgrad.rhs, config.dgrad.rhs)
    with jax.named_scope(FORWARD):
        visits = _visits(config, group_sizes)
        # Transposed once for all visits.
        kernels = _transposed(rhs_first)
        out = _multiply_rows(config, config.forward, lhs_first, kernels, config.columns, visits)
    out = checkpoint_name(out[: config.rows], OUTPUT_NAME)
    return out, _Residuals(lhs_kept, rhs_kept, group_sizes, scales, amaxes, states)


@traced_once
def _bwd(
    config: _Config, residuals: _Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, None, DotStates]:
    lhs_kept, rhs_kept, group_sizes, scales, kept_amaxes, states = residuals
    g = _grouped_rows(config, inf_to_nan(g), group_sizes)
    recipe, visits = config.recipe, _visits(config, group_sizes)
    g_first, g_second = _quantize_for_both(config, "output_grad", g, scales.get("output_grad"))
    with jax.named_scope(DGRAD):
        kernels = restore(rhs_kept, recipe.dgrad.rhs, config.dgrad.rhs)
        lhs_grad = _multiply_rows(config, config.dgrad, g_first, kernels, config.depth, visits)
        lhs_grad = lhs_grad[: config.rows]
    with jax.named_scope(WGRAD):
        lhs = restore(lhs_kept, recipe.wgrad.lhs, config.wgrad.lhs)
        rhs_grad = _multiply_groups(config, lhs, g_second, visits)
    amaxes = {**kept_amaxes, "output_grad": _grouped_amax(g, group_sizes)}
    new = {role: _next_state(role, amaxes[role], scales[role], getattr(states, role)) for role in scales}
    # Inside shard_map an operand that is the same everywhere gets the sum of all cotangents.
    lhs_grad, rhs_grad = sum_to_axes(lhs_grad, config.lhs_axes), sum_to_axes(rhs_grad, config.rhs_axes)
    return lhs_grad, rhs_grad, None, DotStates(**new)


def _next_state(role: str, amax: jax.Array, scale: jax.Array, state: ScalingState) -> ScalingState:
    next_state = jax.vmap(delayed_next_state) if role == "kernel" else delayed_next_state
    return next_state(amax, scale, state)


_ragged_dot.defvjp(_fwd, _bwd)


# Derivation. As for _measured_dot_general in _dot_general.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _measured_ragged_dot(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, states: DotStates
) -> jax.Array:
    del states
    return _wide_ragged_dot(config, group_sizes, lhs, rhs)


def _wide_ragged_dot(config: _Config, group_sizes: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.ragged_dot(lhs, rhs, group_sizes, config.precision, config.out_dtype)


def _measured_fwd(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, states: DotStates
) -> tuple[jax.Array, Any]:
    return _wide_ragged_dot(config, group_sizes, lhs, rhs), (lhs, rhs, group_sizes, states)


def _measured_bwd(
    config: _Config, residuals: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array, None, DotStates]:
    lhs, rhs, group_sizes, states = residuals
    _, transpose = jax.vjp(partial(_wide_ragged_dot, config, group_sizes), lhs, rhs)
    new = {}
    for role, quantizer in config.recipe.delayed.items():
        measure = partial(measured_next_state, delayed_config(quantizer))
        state = getattr(states, role)
        if role == "kernel":
            new[role] = jax.vmap(measure)(rhs, state)
        else:
            x = _grouped_rows(config, lhs if role == "input" else g, group_sizes)
            new[role] = measure(x, state)
    return *transpose(g), None, DotStates(**new)


_measured_ragged_dot.defvjp(_measured_fwd, _measured_bwd)


def _report(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, states: DotStates
) -> None:
    for role, quantizer in config.recipe.delayed.items():
        report = partial(report_measured, measuring.value, delayed_config(quantizer))
        state = getattr(states, role)
        if role == "kernel":
            jax.vmap(report)(rhs, state)
        elif role == "input":
            report(_grouped_rows(config, lhs, group_sizes), state)


# Derivation. As for _frozen_dot_general in _dot_general.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _frozen_ragged_dot(
    config: _Config, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, scales: dict[str, jax.Array]
) -> jax.Array:
    lhs = _grouped_rows(config, lhs, group_sizes)
    (q_lhs, _), (q_rhs, _) = (
        _quantize_for_both(config, role, x, scales.get(role))
        for role, x in (("input", lhs), ("kernel", rhs))
    )
    with jax.named_scope(FORWARD):
        visits = _visits(config, group_sizes)
        out = _multiply_rows(config, config.forward, q_lhs, _transposed(q_rhs), config.columns, visits)
    return out[: config.rows]


def _frozen_jvp(config: _Config, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    lhs, rhs, group_sizes, scales = primals
    lhs_dot, rhs_dot, *_ = tangents
    forward, terms = config.recipe.forward, []
    if not isinstance(lhs_dot, SymbolicZero):
        kernel = partial(straight_through, forward.rhs, View(rhs.shape[1:], (0,), ()))
        kernels = jax.vmap(kernel, in_axes=(0, 0 if "kernel" in scales else None))(
            rhs, scales.get("kernel")
        )
        terms.append(_wide_ragged_dot(config, group_sizes, lhs_dot, kernels))
    if not isinstance(rhs_dot, SymbolicZero):
        rows = jnp.where(_is_grouped(config, group_sizes), lhs, np.zeros((), lhs.dtype))
        rows = straight_through(forward.lhs, View(lhs.shape, (1,), ()), rows, scales.get("input"))
        terms.append(_wide_ragged_dot(config, group_sizes, rows, rhs_dot))
    out = _frozen_ragged_dot(*(config, lhs, rhs, group_sizes, scales))
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_frozen_ragged_dot.defjvp(_frozen_jvp, symbolic_zeros=True)


def _checked_states(states: DotStates, gemms: CustomRecipe, groups: int) -> DotStates:
    """Returns the states that the recipe needs, or raises where their shapes or dtypes do not fit."""
    kernel = states.kernel
    if "kernel" not in gemms.delayed:
        return check_states(states, gemms)
    assert kernel is not None
    for name, value in zip(kernel._fields, kernel):
        if jnp.ndim(value) != 2 or jnp.shape(value)[0] != groups:
            raise ValueError(
                f"The {name} of the kernels must have one row per expert, of which there are {groups}; got "
                f"shape {jnp.shape(value)}. Its shape is ({groups}, 1) for scales and "
                f"({groups}, amax_history_len) for amax histories."
            )
    if any(map(is_max_dtype, kernel)):
        refuse_unchecked_axes()
    others = {role: check_state(*getattr(states, role)) for role in gemms.delayed if role != "kernel"}
    return DotStates(**others, kernel=jax.vmap(check_state)(*kernel))


def _check_operands(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1] or rhs.shape[0] == 0:
        raise ValueError(
            "The FP8 ragged dot takes lhs of shape (rows, K) and rhs of shape (experts, K, N), with one "
            f"expert or more; got {lhs.shape} and {rhs.shape}. Flatten the dimensions of the tokens, sort "
            "the rows by expert, and stack the kernels."
        )
    if group_sizes.shape != rhs.shape[:1]:
        raise ValueError(
            f"group_sizes must have shape ({rhs.shape[0]},), a number of rows for each expert of rhs "
            f"{rhs.shape}; got {group_sizes.shape}."
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"group_sizes must be integers; got {group_sizes.dtype}. Count the rows of each expert, for "
            "instance with jnp.bincount(experts, length=num_experts)."
        )
    if explicit_sharding(lhs) is not None or explicit_sharding(rhs) is not None:
        raise NotImplementedError(
            "The FP8 ragged dot does not run on explicit axes of a mesh, nor does lax.ragged_dot without "
            "being told the sharding of its result. Call it inside jax.shard_map, where each device has "
            "rows and experts of its own, or inside jax.sharding.auto_axes."
        )


def fp8_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    states: DotStates,
    recipe: Recipe,
    form: str = "direct",
    is_frozen: bool = False,
) -> jax.Array:
    """Multiplies in FP8 the rows of each group with that group's matrix, and the cotangent on the way back.

    ``out[m] = lhs[m] . rhs[e]`` where ``e`` is the expert of row ``m``: the first ``group_sizes[0]`` rows
    are those of expert 0, and so on. Rows beyond ``sum(group_sizes)`` give zeros and have no gradient,
    whatever they hold; they are zeros to every scale and amax, too, so what fills up a buffer cannot spoil
    a step. Input and output gradient have one scale (or one per slice along the contraction), and each
    expert's kernel its own.

    The rows are multiplied in tiles, one after the other, by the matrix of each expert that owns some of
    their rows: at most ``rows / tile + experts - 1`` products. (XLA for GPUs turns ``lax.ragged_dot`` into
    the product with *all* experts' matrices, masked.)

    Args:
        lhs: the input, ``(M, K)``, rows sorted by expert; a wide float.
        rhs: the kernels, ``(experts, K, N)``, a wide float.
        group_sizes: rows of each expert, ``(experts,)``, integers.
        precision: None for the recipe's accumulation; ``DEFAULT`` for fast and ``HIGH`` or ``HIGHEST``
            for exact accumulation in all three GEMMs. A GEMM that stays wide gets it as it is.
        preferred_element_type: dtype of the result; None for what ``lax.ragged_dot`` gives.
        states: scaling states of the roles that have delayed scaling, the kernels' of shapes
            ``(experts, 1)`` and ``(experts, amax_history_len)``; their "gradients" are their next values.
        recipe: how the tensors are scaled: with scales per tensor or slice, not per block.
        form: ``"direct"`` puts FP8 operands into the GEMMs; ``"qdq"`` quantizes and dequantizes around
            GEMMs in the dtype of the operands.
        is_frozen: as of ``fp8_dot_general``.

    Returns:
        ``(M, N)``.

    Raises:
        TypeError: an operand is not a wide float, ``group_sizes`` are not integers, or
            ``preferred_element_type`` or ``precision`` is none of the above.
        ValueError: the shapes do not fit, or the recipe scales per block.
        NotImplementedError: an operand lies on explicit axes of a mesh.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> x, kernels = jnp.ones((4, 2)), jnp.stack([jnp.ones((2, 1)), 3 * jnp.ones((2, 1))])
        >>> recipe = fp8.Float8CurrentScaling(use_power_2_scales=True)
        >>> fp8_ragged_dot(x, kernels, jnp.array([1, 2]), states=DotStates(), recipe=recipe).ravel()
        Array([2., 6., 6., 0.], dtype=float32)

    Source: ``jax.lax.ragged_dot``; the tiles are those of Gale et al., "MegaBlocks", 2022,
    arXiv:2211.15841.
    """
    lhs, rhs, group_sizes = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs"), jnp.asarray(group_sizes)
    _check_operands(lhs, rhs, group_sizes)
    check_result_dtype(preferred_element_type)
    gemms = recipe.gemms
    uses = [q for g in (gemms.forward, gemms.dgrad, gemms.wgrad) for q in (g.lhs, g.rhs)]
    if any(map(is_blockwise, uses)):
        raise ValueError(
            f"The FP8 ragged dot does not multiply with scales per block, as in {recipe!r}: a block would "
            "hold rows of several experts. Use DelayedScaling() or Float8CurrentScaling(), the latter with "
            "granularity='axiswise' for finer scales."
        )
    if not any(uses):
        with jax.named_scope(KEPT_WIDE):
            return lax.ragged_dot(lhs, rhs, group_sizes, precision, preferred_element_type)
    if not is_frozen and not callable(measuring.value):
        lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    out = jax.eval_shape(
        partial(lax.ragged_dot, preferred_element_type=preferred_element_type), lhs, rhs, group_sizes
    )
    config = _Config(
        gemms if measuring.value else with_precision(gemms, precision),
        lhs.shape[0],
        rhs.shape[0],
        rhs.shape[1],
        rhs.shape[2],
        lhs.dtype,
        rhs.dtype,
        out.dtype,
        manual_axes(lhs),
        manual_axes(rhs),
        hashable_precision(precision),
        form == "qdq",
    )
    states = _checked_states(states, gemms, config.groups)
    if is_frozen:
        warn_if_emulated(gemms.forward)
        return _frozen_ragged_dot(config, lhs, rhs, group_sizes, scales_of(config, states))
    if callable(measuring.value):
        _report(config, lhs, rhs, group_sizes, states)
        return _wide_ragged_dot(config, group_sizes, lhs, rhs)
    if measuring.value:
        return _measured_ragged_dot(config, lhs, rhs, group_sizes, states)
    warn_if_emulated(gemms.forward, gemms.dgrad, gemms.wgrad)
    return _ragged_dot(config, lhs, rhs, group_sizes, states)
