"""The FP8 matmul of a mixture of experts: multiplies each row by the kernel of its expert."""

from __future__ import annotations

import dataclasses
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.amax import delayed_amax
from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.kernels.groups import ends_of_groups
from fp8flax._core.gemm.lowering import lowered
from fp8flax._core.gemm.request import (
    ExpertProducts,
    ExpertSums,
    Gemm,
    sum_dtype_of,
    transposed_kernels,
)
from fp8flax._core.gemm.units import warn_if_emulated
from fp8flax._core.plans.contraction import (
    Contraction,
    Extra,
    Operand,
    States,
    Use,
    check_operands,
    explicit_sharding,
)
from fp8flax._core.plans.dot_general import hashable_precision, with_precision
from fp8flax._core.plans.modes import contract
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.recipes import GemmRecipe, Recipe
from fp8flax._core.shapes import Float, Integer

_ON_EXPLICIT_AXES = (
    "The FP8 ragged dot does not run on explicit axes of a mesh. Call it inside jax.shard_map, where each "
    "device has its own rows and experts, or inside jax.sharding.auto_axes."
)

# Rows are multiplied in tiles. A tile is multiplied once by the kernel of each expert that has rows in it.
# Small tiles waste fewer rows. Large tiles read each kernel less often, and use more of a GPU. The tile
# size is a heuristic: half the average group size, rounded down to a power of two, within these bounds.
_SMALLEST_TILE, _LARGEST_TILE = 128, 512
_ROW_MULTIPLE = 16  # cublasLt requires it of the sizes of FP8 operands


def _tile_of(rows: int, experts: int) -> int:
    """Returns the number of rows in a tile, for ``rows`` rows of ``experts`` experts."""
    half = max(1, rows // (2 * experts))
    tile = min(max(1 << (half.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)
    return min(tile, max(_ROW_MULTIPLE, -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE))


class _Visit(NamedTuple):
    """A visit: one tile of rows is multiplied by the kernel of one expert that has rows in it.

    Each field is a scalar. For a list of visits, each field is an array with an element per visit.
    """

    row: jax.Array
    """The first row of the tile."""
    expert: jax.Array
    """The index of the expert."""
    low: jax.Array
    """The expert's first row in the tile, counted from the start of the tile."""
    high: jax.Array
    """The row after the expert's last row in the tile, counted from the start of the tile."""
    is_first: jax.Array
    """Whether the tile is the expert's first one."""


class _Gemms(NamedTuple):
    """The GEMMs of one visit: one tile of rows, and one expert."""

    forward: Gemm
    """The kernel is transposed, ``(columns, depth)``, because FP8 units sum over the last axis."""
    dgrad: Gemm
    wgrad: Gemm
    """The contribution of one tile to the gradient of the expert's kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedPlan(Contraction):
    """The three products of ``lax.ragged_dot``, computed tile by tile of rows.

    The shapes are ``(rows, depth)`` for the input x, ``(experts, depth, columns)`` for the kernels w, and
    ``(rows, columns)`` for the result. Row m of the result is x[m] . w[e], where e is the expert of row m.
    So dx[m] = q(g[m]) . q(w[e]).T, and dw[e] is the sum of the outer products q(x[m]) q(g[m]) over the rows
    of expert e. Each visit has one expert, so the scale of its kernel multiplies the product of the visit.
    """

    stacked: ClassVar[tuple[str, ...]] = ("kernel",)

    @property
    def rows(self) -> int:
        """The number of rows of the input."""
        return self.lhs.shape[0]

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.rhs.shape[0]

    @property
    def depth(self) -> int:
        """The number of columns of the input, which is the number of rows of each kernel."""
        return self.rhs.shape[1]

    @property
    def columns(self) -> int:
        """The number of columns of each kernel and of the result."""
        return self.rhs.shape[2]

    @property
    def tile(self) -> int:
        """The number of rows in a tile."""
        return _tile_of(self.rows, self.experts)

    @property
    def padded_rows(self) -> int:
        """The number of rows, rounded up to whole tiles; at least one tile."""
        return max(1, -(-self.rows // self.tile)) * self.tile

    @property
    def num_visits(self) -> int:
        """The largest possible number of visits; a tile has one for each expert with rows in it."""
        return self.padded_rows // self.tile + self.experts - 1

    @cached_property
    def gemms(self) -> _Gemms:
        """The GEMMs of forward, dgrad and wgrad for one visit."""
        x = self.lhs._replace(shape=(self.tile, self.depth))
        w = self.rhs._replace(shape=(self.depth, self.columns))
        y = Operand((self.tile, self.columns), self.out_dtype, None, frozenset())
        return _Gemms(
            self._gemm("forward", 1, x, w._replace(shape=(self.columns, self.depth)), y.dtype),
            self._gemm("dgrad", 1, y, w, x.dtype),
            self._gemm("wgrad", 0, x, y, sum_dtype_of(w.dtype)),
        )

    def _gemm(self, name: str, contract: int, lhs: Operand, rhs: Operand, out_dtype: np.dtype) -> Gemm:
        """Returns the GEMM of a visit that contracts dimension ``contract`` of both operands."""
        return self.gemm(name, (((contract,), (contract,)), ((), ())), lhs, rhs, out_dtype)

    @cached_property
    def views(self) -> dict[str, tuple[View, View]]:
        """For each role, the views of its tensor: of all padded rows, or of one expert's kernel."""
        x, w, g = (
            (View(shape, (1,), ()), View(shape, (0,), ()))
            for shape in (
                (self.padded_rows, self.depth),
                (self.depth, self.columns),
                (self.padded_rows, self.columns),
            )
        )
        return {"input": x, "kernel": w[::-1], "output_grad": g}

    def prepared(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns input or output gradient with rows of no expert set to zero, padded to whole tiles."""
        if role == "kernel":
            return x
        (group_sizes,) = extra
        x = jnp.where(self._has_expert(self.rows, group_sizes), x, np.zeros((), x.dtype))
        return lax.pad(x, np.zeros((), x.dtype), ((0, self.padded_rows - self.rows, 0), (0, 0, 0)))

    def amax(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns the ``delayed_amax`` of the rows that belong to experts; -inf if there are none."""
        if role == "kernel":
            return super().amax(role, x, extra)
        (group_sizes,) = extra
        return delayed_amax(x, self._has_expert(x.shape[0], group_sizes))

    def _has_expert(self, rows: int, group_sizes: jax.Array) -> jax.Array:
        """Returns a mask ``(rows, 1)`` of the rows that belong to an expert."""
        return lax.broadcasted_iota(np.int32, (rows, 1), 0) < ends_of_groups(group_sizes, self.rows)[-1]

    def product(self, lhs: Any, rhs: Any, extra: Extra) -> jax.Array:
        return self._products("forward", lhs, rhs, extra)

    def dgrad(self, g: Any, rhs: Any, extra: Extra) -> jax.Array:
        return self._products("dgrad", g, rhs, extra)

    def _products(self, name: str, lhs: Any, kernels: Any, extra: Extra) -> jax.Array:
        """Returns each row of ``lhs`` times the kernel of its expert; zeros for rows of no expert.

        It computes forward (``lhs`` is the input) and dgrad (``lhs`` is the output gradient).
        """
        (group_sizes,), gemm = extra, getattr(self.gemms, name)
        request = ExpertProducts(
            (self.padded_rows, gemm.rhs.shape[0]),
            gemm.out_dtype,
            partial(_products_in_tiles, self, name),
            # The forward GEMM takes transposed kernels. They are transposed once, not at each visit.
            transposes_kernels=name == "forward",
        )
        return lowered(request, lhs, kernels, group_sizes)[: self.rows]

    def wgrad(self, lhs: Any, g: Any, extra: Extra) -> jax.Array:
        (group_sizes,) = extra
        request = ExpertSums(
            (self.experts, self.depth, self.columns),
            self.rhs.dtype,
            partial(_sums_in_tiles, self),
        )
        return lowered(request, lhs, g, group_sizes)

    def uses_of(self, name: str) -> tuple[Use, Use]:
        """Returns how both operands of a product enter it: ``"forward"``, ``"dgrad"`` or ``"wgrad"``."""
        x, w, g = map(self.uses, ("input", "kernel", "output_grad"))
        return {
            "forward": (x.first, w.first),
            "dgrad": (g.first, w.second),
            "wgrad": (x.second, g.second),
        }[name]

    def of_part(self, name: str, lhs: QTensor, rhs: QTensor) -> RaggedPlan:
        """Returns the plan for one device's part of a product.

        Its sizes are those of the codes of both operands, which are padded to whole blocks.
        """
        dims = {
            "input": ("rows", "depth"),
            "kernel": ("depth", "columns"),
            "output_grad": ("rows", "columns"),
        }
        sizes: dict[str, int] = {}
        for use, operand in zip(self.uses_of(name), (lhs, rhs)):
            shape = operand.codes.shape[-2:]
            # Codes with scales per block have the contraction last, whichever axis of the tensor it is.
            is_transposed = _is_per_block(operand) and use.view.contract == (0,)
            sizes |= zip(dims[use.role], shape[::-1] if is_transposed else shape)
        depth = sizes.get("depth", self.depth)
        kernels = self.experts, depth, sizes.get("columns", self.columns)
        return dataclasses.replace(
            self,
            lhs=self.lhs._replace(shape=(sizes.get("rows", self.rows), depth)),
            rhs=self.rhs._replace(shape=kernels),
        )

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        (group_sizes,) = extra
        out = lax.ragged_dot(lhs, rhs, group_sizes, self.precision, self.out_dtype)
        return out[: self.rows]  # a ``prepared`` input has more rows

    def warn(self, *recipes: GemmRecipe) -> None:
        warn_if_emulated(*recipes, is_ragged=True)


def _is_per_block(operand: Any) -> bool:
    """Returns whether an operand is quantized with scales that change along the contraction."""
    return isinstance(operand, QTensor) and operand.quantizer.scales_along_contraction


def _products_in_tiles(
    plan: RaggedPlan, name: str, lhs: Any, kernels: Any, group_sizes: jax.Array, *, is_part: bool = False
) -> jax.Array:
    """Returns each row times the kernel of its expert, in plain JAX; see ``ExpertProducts.reference``.

    Args:
        plan: the plan of the ragged dot.
        name: ``"forward"`` or ``"dgrad"``.
        lhs: the rows, padded to whole tiles of the plan.
        kernels: the kernels of all experts.
        group_sizes: number of rows of each expert.
        is_part: whether the operands are those of one device of a mesh. The number of rows is then any.
    """
    plan = plan.of_part(name, lhs, kernels) if is_part else plan
    gemm, (lhs_use, kernel_use) = getattr(plan.gemms, name), plan.uses_of(name)
    lhs = _in_whole_tiles(plan, lhs_use, lhs, is_part)
    kernels = _dequantized_blocks(plan, kernel_use, kernels)
    if name == "forward":
        kernels = transposed_kernels(kernels)
    out = _scan_products(plan, gemm, lhs, kernels, _visits(plan, group_sizes))
    return out[: plan.rows] if is_part else out


def _sums_in_tiles(
    plan: RaggedPlan, lhs: Any, g: Any, group_sizes: jax.Array, *, is_part: bool = False
) -> jax.Array:
    """Returns the sums of the outer products of each expert's rows; see ``_products_in_tiles``."""
    plan = plan.of_part("wgrad", lhs, g) if is_part else plan
    lhs, g = (_in_whole_tiles(plan, *one, is_part) for one in zip(plan.uses_of("wgrad"), (lhs, g)))
    return _scan_sums(plan, lhs, g, _visits(plan, group_sizes))


def _in_whole_tiles(plan: RaggedPlan, use: Use, operand: Any, is_part: bool) -> Any:
    """Returns an operand that can be cut into tiles of rows; a part is filled up to whole tiles."""
    if not is_part:
        return _dequantized_blocks(plan, use, operand)
    rows, more = plan.rows, plan.padded_rows - plan.rows
    view = use.view._replace(shape=(rows, use.view.shape[1]))
    operand = _dequantized_blocks(plan, use._replace(view=view), operand)

    def filled(x: jax.Array) -> jax.Array:
        return lax.pad(x, np.zeros((), x.dtype), ((0, more, 0), (0, 0, 0)))

    if not isinstance(operand, QTensor):
        return filled(operand)
    scale = filled(operand.scale) if _is_per_row(operand.scale, rows) else operand.scale
    return dataclasses.replace(operand, codes=filled(operand.codes), scale=scale)


def _is_per_row(x: jax.Array, rows: int) -> bool:
    """Returns whether codes or scales have an entry for each row; the other scales hold for all rows."""
    return x.ndim == 2 and x.shape[0] == rows > 1


def _dequantized_blocks(plan: RaggedPlan, use: Use, operand: Any) -> Any:
    """Returns the values of an operand with scales per block; returns another operand unchanged."""
    if not _is_per_block(operand):
        return operand
    dtypes = {"input": plan.lhs.dtype, "kernel": plan.rhs.dtype, "output_grad": plan.out_dtype}
    dtype = dtypes[use.role]
    return plan.each(use.role, lambda q: q.dequantize(use.view, dtype), operand)


def _visits(plan: RaggedPlan, group_sizes: jax.Array) -> _Visit:
    """Returns ``num_visits`` visits, in the order of the rows.

    An expert with rows ``start`` to ``end - 1`` visits tiles ``start // tile`` to ``(end - 1) // tile``. If
    there are fewer visits than ``num_visits``, the rest have the expert of the last visit, and no rows.
    """
    tile = np.int32(plan.tile)
    ends = ends_of_groups(group_sizes, plan.rows)
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    counts = jnp.where(ends > starts, (ends - 1) // tile - starts // tile + 1, 0)
    after = jnp.cumsum(counts, dtype=jnp.int32)
    index = lax.iota(np.int32, plan.num_visits)
    visit = jnp.maximum(jnp.minimum(index, after[-1] - 1), 0)
    expert = jnp.sum(visit[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, np.int32(plan.experts - 1))  # without any rows, no expert is found
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


def _rows_of_expert(plan: RaggedPlan, visit: _Visit) -> jax.Array:
    """Returns a mask ``(tile, 1)`` of the rows of a visit's tile that belong to the visit's expert."""
    row = lax.broadcasted_iota(np.int32, (plan.tile, 1), 0)
    return (row >= visit.low) & (row < visit.high)


def _tile_rows(plan: RaggedPlan, operand: Any, row: jax.Array) -> Any:
    """Returns the tile of an operand that starts at ``row``; a scale that all rows share is not cut."""

    def cut(x: jax.Array) -> jax.Array:
        is_per_row = _is_per_row(x, plan.padded_rows)
        return lax.dynamic_slice_in_dim(x, row, plan.tile) if is_per_row else x

    return jax.tree.map(cut, operand)


# Jitted, because otherwise each call outside of jit would compile the loop again. Inside of jit,
# ``inline=True`` makes it a part of the surrounding program.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _scan_products(plan: RaggedPlan, gemm: Gemm, lhs: Any, kernels: Any, visits: _Visit) -> jax.Array:
    """Returns each row times the kernel of its expert, ``(padded rows, columns)``; other rows are zeros."""

    def step(out: jax.Array, visit: _Visit) -> tuple[jax.Array, None]:
        kernel = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, visit.expert, keepdims=False), kernels)
        product = lowered(gemm, _tile_rows(plan, lhs, visit.row), kernel)
        before = lax.dynamic_slice_in_dim(out, visit.row, plan.tile)
        rows = jnp.where(_rows_of_expert(plan, visit), product, before)
        return lax.dynamic_update_slice_in_dim(out, rows, visit.row, 0), None

    zeros = jnp.zeros((plan.padded_rows, gemm.rhs.shape[0]), gemm.out_dtype)
    return lax.scan(step, _varying_as((lhs, kernels, visits), zeros)[0], visits)[0]


@partial(jax.jit, static_argnums=0, inline=True)
def _scan_sums(plan: RaggedPlan, lhs: Any, rhs: Any, visits: _Visit) -> jax.Array:
    """Returns for each expert the sum of outer products over its rows, ``(experts, depth, columns)``."""

    def step(carry: tuple[jax.Array, jax.Array], visit: _Visit) -> tuple[Any, None]:
        total, out = carry
        is_of_expert = _rows_of_expert(plan, visit)
        # Rows of other experts are set to zero in both operands: zero times a NaN would be NaN.
        of_visit = (
            _with_zeros(is_of_expert, _tile_rows(plan, operand, visit.row)) for operand in (lhs, rhs)
        )
        product = lowered(plan.gemms.wgrad, *of_visit)
        total = jnp.where(visit.is_first, jnp.zeros_like(total), total) + product
        # All visits of an expert follow each other, so its last visit writes its whole sum.
        return (total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), visit.expert, 0)), None

    shape = (plan.depth, plan.columns)
    total, out = _varying_as(
        (lhs, rhs, visits),
        jnp.zeros(shape, plan.gemms.wgrad.out_dtype),
        jnp.zeros((plan.experts, *shape), plan.rhs.dtype),
    )
    return lax.scan(step, (total, out), visits)[0][1]


def _with_zeros(keep: jax.Array, operand: Any) -> Any:
    """Returns a tile of an operand with zeros in the rows that ``keep`` excludes."""
    x = operand.codes if isinstance(operand, QTensor) else operand
    x = jnp.where(keep, x, np.zeros((), x.dtype))
    return dataclasses.replace(operand, codes=x) if isinstance(operand, QTensor) else x


def _varying_as(tree: Any, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, varying over all manual axes that a leaf of the tree varies over."""
    return vary_alike(*arrays, *jax.tree.leaves(tree))[: len(arrays)]


def _check_shapes(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    """Raises an error if the shapes, the dtype of ``group_sizes`` or the shardings are not supported."""
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
        raise NotImplementedError(_ON_EXPLICIT_AXES)


def fp8_ragged_dot(
    lhs: Float[jax.Array, "rows depth"],
    rhs: Float[jax.Array, "experts depth columns"],
    group_sizes: Integer[jax.Array, " experts"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    states: States,
    recipe: Recipe,
    is_frozen: bool = False,
) -> Float[jax.Array, "rows columns"]:
    """Multiplies in FP8 each row by the kernel of its expert, and the cotangents in the backward pass.

    ``out[m] = lhs[m] . rhs[e]`` where ``e`` is the expert of row ``m``: the first ``group_sizes[0]`` rows
    belong to expert 0, and so on. Rows beyond ``sum(group_sizes)`` belong to no expert. Their results are
    zeros, and they have no gradient. They do not affect any scale or amax, whatever values they hold. Input
    and output gradient have one scale (or one per slice along the contraction). Each expert's kernel has
    its own scales.

    On Hopper one GPU kernel multiplies all rows of a device. On other devices the rows are multiplied in
    tiles, one after the other. A tile is multiplied by the kernel of each expert that has rows in it: at
    most ``rows / tile + experts - 1`` products in all. (XLA for GPUs computes ``lax.ragged_dot`` as a
    masked product with the kernels of *all* experts.)

    Args:
        lhs: the input, ``(M, K)``, rows sorted by expert; a wide float.
        rhs: the kernels, ``(experts, K, N)``, a wide float.
        group_sizes: number of rows of each expert, ``(experts,)``, integers.
        precision: None for the recipe's accumulation; ``DEFAULT`` for fast and ``HIGH`` or ``HIGHEST``
            for exact accumulation in all three GEMMs. A GEMM of wide operands gets ``precision`` itself.
        preferred_element_type: dtype of the result; None for what ``lax.ragged_dot`` gives.
        states: scaling states of the roles that have delayed scaling; their "gradients" are their next
            values. The state of the kernels has shapes ``(experts, 1)`` and ``(experts,
            amax_history_len)``.
        recipe: how the tensors are scaled. In wgrad, a block of 128 rows with one scale may hold rows of
            several experts. Scales per block are multiplied into the values, in the dtype of the operands,
            if the block size is not 128 or the device is not a Hopper GPU.
        is_frozen: see ``fp8_dot_general``.

    Returns:
        The result, ``(M, N)``.

    Raises:
        TypeError: an operand is not a wide float, ``group_sizes`` are not integers, or
            ``preferred_element_type`` or ``precision`` is none of the above.
        ValueError: the shapes do not fit.
        NotImplementedError: an operand is sharded over explicit axes of a mesh.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> x, kernels = jnp.ones((4, 2)), jnp.stack([jnp.ones((2, 1)), 3 * jnp.ones((2, 1))])
        >>> recipe = fp8.Float8CurrentScaling(use_power_2_scales=True)
        >>> fp8_ragged_dot(x, kernels, jnp.array([1, 2]), states=States(), recipe=recipe).ravel()
        Array([2., 6., 6., 0.], dtype=float32)

    Source: ``jax.lax.ragged_dot``; the tiles are those of Gale et al., "MegaBlocks", 2022,
    arXiv:2211.15841.
    """
    lhs, rhs = check_operands(lhs, rhs, preferred_element_type)
    group_sizes = jnp.asarray(group_sizes)
    _check_shapes(lhs, rhs, group_sizes)
    out = jax.eval_shape(
        partial(lax.ragged_dot, preferred_element_type=preferred_element_type), lhs, rhs, group_sizes
    )
    plan = RaggedPlan(
        recipe=with_precision(recipe.gemms, precision),
        lhs=Operand.of(lhs),
        rhs=Operand.of(rhs),
        out_dtype=out.dtype,
        precision=hashable_precision(precision),
    )
    return contract(plan, lhs, rhs, group_sizes, states=states, is_frozen=is_frozen)
