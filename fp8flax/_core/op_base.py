"""Base of Linen ops and NNX ops: the row of the op, the recipe in use, the state, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.mode import in_op
from fp8flax._core.names import SWITCHED_OFF, state_leaf_names
from fp8flax._core.options import check_choice
from fp8flax._core.plans.calls import Called
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.modes import FORMS
from fp8flax._core.plans.ops import DOT_GENERAL, OpRow, Shape
from fp8flax._core.recipes import DelayedScaling, Recipe, check_recipe


class MissingStateError(ValueError):
    """Error of an FP8 layer that was applied with variables that hold no scaling state for it."""


class StateLeaf(NamedTuple):
    """One array of the scaling state of an op: a scale, or an amax history."""

    role: str
    name: str
    shape: Shape
    fill: float
    """The value of a new array: 1 for a scale, 0 for a history."""


class OpBase(Called):
    """Base class of Linen ops and NNX ops.

    It knows neither Linen nor NNX. A subclass has the fields ``recipe`` and ``form``, and keeps the state.
    """

    row: ClassVar[OpRow] = DOT_GENERAL
    default_recipe: ClassVar[Recipe] = DelayedScaling()
    """The recipe if neither the op nor ``autocast`` has one."""

    recipe: Recipe | None
    form: str

    def check_options(self) -> None:
        """Raises an error if ``recipe`` or ``form`` is not valid."""
        if self.recipe is not None:
            check_recipe(self.recipe)
        check_choice("form", self.form, FORMS)

    def recipe_in_use(self) -> Recipe | None:
        """Returns the recipe of a call that runs now; None if FP8 is switched off."""
        return recipe_in_use(self.recipe, self.default_recipe)

    def compute(
        self,
        recipe: Recipe | None,
        states: Callable[[Recipe], States],
        path: Callable[[], tuple[str, ...]],
        *args: Any,
        is_frozen: bool = False,
        **keywords: Any,
    ) -> jax.Array:
        """Returns the result of the op.

        Args:
            recipe: the recipe in use; None computes without FP8.
            states: returns the scaling states for a recipe. It is called only if the op runs in FP8.
            path: returns the path of the op in the model, which ``statistics`` shows.
            *args: the operands and arguments of the op.
            is_frozen: whether the states do not change.
            **keywords: further arguments of the op.
        """
        if recipe is None:
            with jax.named_scope(SWITCHED_OFF):
                return self.row.plain(*args, **keywords)
        now = states(recipe)
        with in_op(path):
            return self.row.in_fp8(
                *args, states=now, recipe=recipe, form=self.form, is_frozen=is_frozen, **keywords
            )

    def state_leaves(self, recipe: Recipe, kernel: Shape) -> list[StateLeaf]:
        """Returns the arrays of the state that a recipe needs, for a kernel of this shape.

        An op without ``stacked`` roles has the same state for all kernels.
        """
        leading, leaves = self.row.leading(kernel), []
        for role, quantizer in recipe.gemms.delayed.items():
            scale, history = state_leaf_names(role)
            before = leading.get(role, ())
            leaves.append(StateLeaf(role, scale, (*before, 1), 1.0))
            leaves.append(StateLeaf(role, history, (*before, quantizer.amax_history_len), 0.0))
        return leaves


def check_state_array(value: Any, shape: Shape, where: str, if_cast: str, if_shape: str) -> None:
    """Raises an error if an array of the state has the wrong dtype or shape.

    Args:
        value: the array.
        shape: the shape that the recipe needs.
        where: the name of the array in the variables.
        if_cast: what to do about the wrong dtype.
        if_shape: what to do about the wrong shape.
    """
    if value.dtype != jnp.float32 and not is_max_dtype(value):
        raise TypeError(
            f"The scaling state {where} must be float32; got {value.dtype}. {if_cast}, or cast this leaf "
            "back with .astype(jnp.float32)."
        )
    if value.shape != shape:
        raise ValueError(
            f"The scaling state {where} has shape {value.shape}, but the recipe needs {shape}. {if_shape}"
        )
