"""Base of Linen ops and NNX ops: the row of the op, the recipe in use, the state, and the errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import SWITCHED_OFF, state_leaf_names
from fp8flax._core.observe import in_op
from fp8flax._core.ops.calls import Called
from fp8flax._core.ops.contract import States
from fp8flax._core.ops.dot_general import FORMS
from fp8flax._core.ops.row import OpRow, Shape
from fp8flax._core.options import check_choice
from fp8flax._core.recipes import DelayedScaling, Recipe, check_recipe
from fp8flax._core.state.state import ScalingState, is_state_dtype


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

    Its direct subclass, one for Linen and one for NNX, has the field ``recipe``, and defines ``_value``,
    ``_place`` and ``_shape_advice``.
    """

    row: ClassVar[OpRow]
    """The entry of the op in the table of all ops."""
    default_recipe: ClassVar[Recipe] = DelayedScaling()
    """The recipe if neither the op nor ``autocast`` has one."""
    _shape_advice: ClassVar[str]
    """The advice in the error for state of a shape that does not fit the recipe: a sentence."""

    recipe: Recipe | None
    form: str = "direct"
    """The form of the op; a field of the ops whose row ``has_form``."""

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, str]:
        """Returns the value of one array of the state, and its name for errors."""
        raise NotImplementedError

    def _place(self) -> tuple[str, ...]:
        """Returns the path of the op in the model, under which ``statistics`` shows the op."""
        raise NotImplementedError

    def _check_options(self) -> None:
        """Raises an error if ``recipe`` or ``form`` is not valid."""
        if self.recipe is not None:
            check_recipe(self.recipe)
        check_choice("form", self.form, FORMS)

    def _recipe_in_use(self) -> Recipe | None:
        """Returns the recipe of a call that runs now; None if FP8 is switched off."""
        return recipe_in_use(self.recipe, self.default_recipe)

    def _multiplier(self) -> Callable[..., jax.Array]:
        """Returns ``_compute`` with the recipe that is in use in a call that runs now."""
        return partial(self._compute, self._recipe_in_use())

    def _compute(
        self,
        recipe: Recipe | None,
        lhs: Any,
        rhs: Any,
        *arguments: Any,
        frozen: tuple[States, Recipe] | None = None,
        **keywords: Any,
    ) -> jax.Array:
        """Returns the result of the op, which is not in FP8 if the recipe is None.

        If the model is frozen, ``frozen`` has the states, which do not change, and their recipe.
        """
        states, recipe = (None, recipe) if frozen is None else frozen
        if recipe is None:
            with jax.named_scope(SWITCHED_OFF):
                return self.row.plain(lhs, rhs, *arguments, **keywords)
        if states is None:
            states = self._states(recipe, jnp.shape(rhs))
        if self.row.has_form and frozen is None:
            keywords["form"] = self.form
        keywords |= {"states": states, "recipe": recipe, "is_frozen": frozen is not None}
        with in_op(self._place):
            return self.row.in_fp8(lhs, rhs, *arguments, **keywords)

    def _states(self, recipe: Recipe, kernel: Shape = ()) -> States:
        """Returns the states that a recipe needs, for a kernel of this shape."""
        values: dict[str, list[jax.Array]] = {}
        for leaf in self._state_leaves(recipe, kernel):
            values.setdefault(leaf.role, []).append(self._checked_value(leaf))
        return States(**{role: ScalingState(*both) for role, both in values.items()})

    def _checked_value(self, leaf: StateLeaf) -> jax.Array:
        """Returns the value of one array of the state; raises an error for a wrong dtype or shape."""
        value, where = self._value(leaf)
        if not is_state_dtype(value):
            raise TypeError(
                f"The scaling state {where} must be float32; got {value.dtype}. Cast the parameters alone, "
                "or cast this leaf back with .astype(jnp.float32)."
            )
        if value.shape != leaf.shape:
            raise ValueError(
                f"The scaling state {where} has shape {value.shape}, but the recipe needs {leaf.shape}. "
                f"{self._shape_advice}"
            )
        return value

    def _state_leaves(self, recipe: Recipe, kernel: Shape) -> list[StateLeaf]:
        """Returns the arrays of the state that a recipe needs, for a kernel of this shape."""
        leaves = []
        for role, quantizer in recipe.gemms.delayed.items():
            scale, history = state_leaf_names(role)
            stack = kernel[:1] if role == "kernel" and self.row.is_stack else ()
            leaves.append(StateLeaf(role, scale, (*stack, 1), 1.0))
            leaves.append(StateLeaf(role, history, (*stack, quantizer.amax_history_len), 0.0))
        return leaves
