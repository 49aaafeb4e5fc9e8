"""FP8 for any JAX code: contractions whose scaling state is an argument, a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.ops.canonical import DimensionNumbers
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import MissingStateError, Op, OpBase, StateLeaf
from fp8flax._core.ops.ragged_dot import RaggedDot
from fp8flax._core.options import check_int
from fp8flax._core.recipes import Recipe
from fp8flax._core.shapes import Float, Integer
from fp8flax._core.state.tree import map_state
from fp8flax._core.types import OutSharding, PyTree
from fp8flax._train.check import checked_next_state

State: TypeAlias = Mapping[str, jax.Array]
"""The scaling state of one contraction: its arrays, by their names."""


class _Call(OpBase):
    """An op for one call, whose scaling state and random key are arguments."""

    def __init__(
        self,
        op_type: type[Op],
        *,
        recipe: Recipe | None,
        state: State | None = None,
        key: jax.Array | None = None,
    ) -> None:
        self.op_type, self.recipe, self.state, self.key = op_type, recipe, state, key
        self._check_options()

    def _place(self) -> tuple[str, ...]:
        return (self.op_type.name,)

    def _key(self) -> jax.Array | None:
        return self.key

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, str]:
        if not isinstance(self.state, Mapping | None):
            raise TypeError(f"state must be a dict of fp8flax.init_state; got {type(self.state).__name__}.")
        if self.state is None or self.state.get(leaf.name) is None:
            raise MissingStateError(
                f"The state of a contraction has no {leaf.name!r}, which its recipe needs; got "
                f"{None if self.state is None else sorted(self.state)}. Make a state for each layer by "
                "fp8flax.init_state, under the recipe of its calls, keep it beside the parameters, and "
                "pass it as state=. (Recipes without delayed scaling need no state.)"
            )
        return self.state[leaf.name], leaf.name


def init_state(recipe: Recipe | None = None, num_experts: int | None = None) -> dict[str, jax.Array]:
    """Returns the scaling state of one layer before its first step, to be kept beside its parameters.

    The state is a dict of float32 arrays: ``{input,kernel,output_grad}_scale`` of shape ``(1,)`` and
    ``{…}_amax_history`` of shape ``(amax_history_len,)``. It is empty for recipes without delayed scaling,
    and under ``autocast(enabled=False)``.

    Args:
        recipe: how tensors are scaled. None takes that of ``fp8flax.autocast``, or ``DelayedScaling()``.
        num_experts: for ``ragged_dot``, the leading dimension of the arrays of the kernels.

    Example:
        >>> import fp8flax as fp8
        >>> sorted(fp8.init_state(fp8.DelayedScaling(amax_history_len=16)))[:2]
        ['input_amax_history', 'input_scale']
        >>> fp8.init_state(fp8.Float8CurrentScaling())
        {}

    Source: the variables of ``flax.linen.fp8_ops``.
    """
    op = _Call(DotGeneral if num_experts is None else RaggedDot, recipe=recipe)
    in_use = op._recipe_in_use()
    kernel = () if num_experts is None else (check_int("num_experts", num_experts, 1),)
    leaves = [] if in_use is None else op._state_leaves(in_use, kernel)
    return {name: jnp.full(shape, fill, jnp.float32) for name, shape, fill in leaves}


def dot_general(
    lhs: Float[jax.Array, "*input"],
    rhs: Float[jax.Array, "*kernel"],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    state: State | None = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    out_sharding: OutSharding = None,
) -> Float[jax.Array, "*output"]:
    """Multiplies in FP8 as ``Fp8DotGeneralOp`` does; a pure function for code without Flax.

    The gradient with respect to ``state`` is the next state. Take it by ``fp8flax.value_and_grad``. The
    arguments that are not below are those of ``Fp8DotGeneralOp``.

    Args:
        state: the scaling state of this layer, from ``init_state``; None for recipes without state.
        recipe: as in ``init_state``.
        key: a random key for recipes with stochastic rounding (NVFP4), another one for each step and layer.

    Raises:
        MissingStateError: an array of the state is missing.
        TypeError: an operand is no wide float, or the state is not float32.
        ValueError: the history in the state has another length than the recipe says.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> layer = {"w": jnp.ones((4, 8)), "fp8": fp8.init_state()}
        >>> def loss(layer, x):
        ...     return jnp.sum(fp8.dot_general(x, layer["w"], (((1,), (0,)), ((), ())), state=layer["fp8"]))
        >>> fp8.grad(loss)(layer, jnp.full((2, 4), 3.0))["fp8"]["input_amax_history"][:2]
        Array([3., 0.], dtype=float32)

    Source: ``lax.dot_general``; Micikevicius et al., 2022, arXiv:2209.05433.
    """
    op, dims = _Call(DotGeneral, recipe=recipe, state=state, key=key), dimension_numbers
    return DotGeneral.__call__(
        op, lhs, rhs, dims, precision, preferred_element_type, out_sharding=out_sharding
    )


def einsum(
    eqn: str,
    lhs: Float[jax.Array, "*input"],
    rhs: Float[jax.Array, "*kernel"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    state: State | None = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    out_sharding: OutSharding = None,
) -> Float[jax.Array, "*output"]:
    """Computes an einsum of an input and a kernel in FP8, as ``Fp8Einsum`` does; see ``dot_general``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> x, w, state = jnp.ones((2, 3, 4)), jnp.ones((4, 2, 8)), fp8.init_state()
        >>> fp8.einsum("bsd,dhk->bshk", x, w, state=state).shape
        (2, 3, 2, 8)
    """
    op = _Call(Einsum, recipe=recipe, state=state, key=key)
    return Einsum.__call__(op, eqn, lhs, rhs, precision, preferred_element_type, out_sharding=out_sharding)


def ragged_dot(
    lhs: Float[jax.Array, "rows depth"],
    rhs: Float[jax.Array, "experts depth columns"],
    group_sizes: Integer[jax.Array, " experts"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    state: State | None = None,
    recipe: Recipe | None = None,
) -> Float[jax.Array, "rows columns"]:
    """Multiplies rows by the kernels of their experts, as ``Fp8RaggedDotOp`` does; see ``dot_general``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> x, kernels, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 8)), jnp.array([4, 2])
        >>> fp8.ragged_dot(x, kernels, sizes, state=fp8.init_state(num_experts=2)).shape
        (6, 8)
    """
    op = _Call(RaggedDot, recipe=recipe, state=state)
    return RaggedDot.__call__(op, lhs, rhs, group_sizes, precision, preferred_element_type)


def split_state(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the scaling state in a tree, and the rest, which an optimizer may see.

    Both have the structure of ``tree``, with None in the places of the other part. So any tree works, also
    modules of Equinox. Split variables, or their gradients.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> state, params = fp8.split_state({"w": jnp.ones(3), "fp8": fp8.init_state()})
        >>> state["w"], len(jax.tree.leaves(state)), len(jax.tree.leaves(params))
        (None, 6, 1)

    Source: ``equinox.partition``, ``haliax.quantization.partition_for_grad_overwrite``.
    """
    state = map_state(lambda leaf: leaf, lambda leaf: None, tree)
    return state, map_state(lambda leaf: None, lambda leaf: leaf, tree)


def merge_state(state: PyTree, rest: PyTree, *, before: PyTree = None) -> PyTree:
    """Returns the tree that ``split_state`` took apart.

    Args:
        state: the scaling state, or the next one: the first part of the gradients.
        rest: all other leaves, such as the parameters after a step of the optimizer.
        before: the state before the step. If no step can make ``state`` of it, because it was scaled,
            clipped, averaged or added up, it is an error; under ``jax.jit`` the scales become NaN, so the
            next loss is NaN, and ``check_state`` names the layer.

    Raises:
        ValueError: both parts have a leaf in one place; the trees have different structures; or no step can
            make ``state`` of ``before``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> tree = {"w": jnp.ones(3), "fp8": fp8.init_state()}
        >>> state, params = fp8.split_state(tree)
        >>> fp8.merge_state(state, params)["w"]
        Array([1., 1., 1.], dtype=float32)

    Source: ``equinox.combine``, ``haliax.quantization.apply_updates``.
    """
    if before is not None:
        state = checked_next_state(before, state)

    def one_of(x: object, y: object) -> object:
        if x is not None and y is not None:
            raise ValueError(
                "Both arguments of merge_state have a leaf in one place. Pass the two parts of "
                "fp8flax.split_state, the state first, and not whole gradients or variables."
            )
        return y if x is None else x

    return jax.tree.map(one_of, state, rest, is_leaf=lambda x: x is None)
