"""What all Linen ops share: their variables, and the recipe in use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import DenyList

from fp8flax._compat.flax_context import running_modules
from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.mode import in_op
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, ROLES, SWITCHED_OFF, state_leaf_names
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.dot_general import fp8_dot_general
from fp8flax._core.plans.modes import FORMS
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.recipes import DelayedScaling, Recipe, check_recipe
from fp8flax._core.state.state import ScalingState
from fp8flax._linen.conversion import conversion

SAME_STATE = ("Fp8DotGeneralOp", "Fp8DirectDotGeneralOp")
"""Names of ops, Flax's and ours, that have the same state. Linen names the state by them."""
USE_THAT_OP = "use fp8flax.{op}, or give it the name of the op in the variables."


class MissingStateError(ValueError):
    """Error of an FP8 layer that was applied with variables that hold no scaling state for it."""


def _checked_call(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns ``__call__`` of an op with an error that explains an op in the wrong place."""

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        name, field = type(self).__name__, type(self).field
        if not args and not kwargs:
            cls_field = f"{field}_cls" if field else "the field"
            raise TypeError(
                f"An instance of fp8flax.{name} was called without operands. A layer calls the class in "
                f"this way. Give the layer the class, {cls_field}=fp8flax.{name}, or with options "
                f"functools.partial(fp8flax.{name}, recipe=…)."
            )
        if self.scope is None:
            in_nnx = f"In a layer of Flax NNX use {field}=fp8flax.nnx.{name}(). " if field else ""
            raise TypeError(
                f"An instance of the Linen module fp8flax.{name} was called outside of a Linen module. "
                f"{in_nnx}Outside of any module, call its methods init and apply."
            )
        return call(self, *args, **kwargs)

    return checked


class Fp8Op(nn.Module):
    """Declares the scaling state of one matmul, if its recipe has any, and multiplies."""

    recipe: Recipe | None = None
    form: str = "direct"

    # What it computes, without FP8 and with it; the field of Flax's layers for such a function.
    plain: ClassVar[Callable[..., jax.Array]] = staticmethod(jax.lax.dot_general)
    in_fp8: ClassVar[Callable[..., jax.Array]] = staticmethod(fp8_dot_general)
    field: ClassVar[str | None] = None

    def __new__(cls, *fields: Any, **more_fields: Any) -> Self:
        """Refuses operands, which an instance takes: a layer has the class in the wrong field."""
        if any(isinstance(field, jax.Array | np.ndarray) for field in fields):
            name = cls.__name__
            fix = f"A layer takes the class as {cls.field}_cls=, not as {cls.field}=. " if cls.field else ""
            raise TypeError(
                f"The class fp8flax.{name} was called with arrays, as its instances are. {fix}Where a "
                f"function is expected, give an instance: {name}()."
            )
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _checked_call(cls.__call__)  # type: ignore[method-assign]

    def _default_recipe(self) -> Recipe:
        return DelayedScaling()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe is not None:
            check_recipe(self.recipe)
        if self.form not in FORMS:
            raise ValueError(f"form must be one of {FORMS}; got {self.form!r}.")

    def _multiplier(self, **stacked: tuple[int, ...]) -> Callable[..., jax.Array]:
        """Returns what the op computes by the recipe in use, with the state that it needs.

        At each call: an op may be called twice, under different ambient recipes.

        Args:
            **stacked: leading dimensions of the state of the roles that have any.
        """
        recipe = recipe_in_use(self.recipe, self._default_recipe())

        def compute(*args: Any, fixed: tuple[States, Recipe] | None = None, **told: Any) -> jax.Array:
            if recipe is None:  # FP8 is off here
                with jax.named_scope(SWITCHED_OFF):
                    return self.plain(*args, **told)
            states, used = (self._states(recipe, **stacked), recipe) if fixed is None else fixed
            with in_op(lambda: self.path or (type(self).__name__,)):
                return self.in_fp8(
                    *args, states=states, recipe=used, form=self.form, is_frozen=fixed is not None, **told
                )

        on_op = conversion().on_op
        return compute if on_op is None else partial(on_op, self, recipe, compute)

    def _states(self, recipe: Recipe, **stacked: tuple[int, ...]) -> States:
        """Declares the state that a recipe needs, with leading dimensions for the roles that have any."""
        delayed = recipe.gemms.delayed
        if delayed and not self.is_initializing() and self._is_named_mutable():
            # From one place, so that Python's default filter shows it once.
            warnings.warn(
                f"mutable names {OVERWRITE_WITH_GRADIENT!r}, but apply returns the old state there. The "
                "next state is the gradient with respect to the old one: take it from "
                "fp8flax.value_and_grad, as fp8flax.TrainState does, and leave the collection out of "
                "mutable.",
                stacklevel=1,
            )
        states = {r: self._declare(r, delayed[r], stacked.get(r, ())) for r in ROLES if r in delayed}
        return States(**states)

    def _is_named_mutable(self) -> bool:
        """Tells whether ``apply`` was asked by name to return the state, and was given one."""
        name, _ = state_leaf_names(ROLES[0])
        if not self.is_mutable_collection(OVERWRITE_WITH_GRADIENT) or not self.has_variable(
            OVERWRITE_WITH_GRADIENT, name
        ):
            return False
        filters = [m.scope.root.mutable for m in running_modules() if m.scope is not None]
        if not filters:  # a version of Flax that does not tell
            return False
        # A set is what lifted transformations, such as nn.scan, leave of what apply was given.
        given = next((f for f in reversed(filters) if not isinstance(f, set)), OVERWRITE_WITH_GRADIENT)
        return not isinstance(given, bool | DenyList)

    def _declare(self, role: str, quantizer: DelayedQuantizer, stacked: tuple[int, ...]) -> ScalingState:
        length, collection = quantizer.amax_history_len, OVERWRITE_WITH_GRADIENT
        scale_name, history_name = state_leaf_names(role)
        values = []
        for name, shape, init in (
            (scale_name, (*stacked, 1), jnp.ones),
            (history_name, (*stacked, length), jnp.zeros),
        ):
            where = "/".join((*self.path, name))
            if not (self.has_variable(collection, name) or self.is_mutable_collection(collection)):
                if self.is_initializing():
                    raise MissingStateError(
                        f"The FP8 layer {'/'.join(self.path[:-1]) or type(self).__name__!r} cannot make "
                        f"its scaling state {collection}/{where}: init may not make this collection here. "
                        "Name the collection in nn.scan and nn.vmap around the layer, as for the "
                        f"parameters: variable_axes={{'params': 0, {collection!r}: 0}}. Name it also in "
                        "variables= of nn.remat and in mutable= of init, if you give them. (Recipes "
                        "without delayed scaling, such as Float8CurrentScaling, need no state.)"
                    )
                raise MissingStateError(
                    f"The FP8 layer {'/'.join(self.path[:-1]) or type(self).__name__!r} has no scaling "
                    f"state: {OVERWRITE_WITH_GRADIENT}/{where} is missing from the variables. Variables "
                    "of a model without FP8 get their state from fp8flax.add_fp8_state(variables, model, "
                    f"*inputs); variables of this model must be passed whole, with their "
                    f"{OVERWRITE_WITH_GRADIENT!r} collection. {self._found_beside(name)}(Recipes without "
                    "delayed scaling, such as Float8CurrentScaling, need no state.)"
                )
            value = self.variable(collection, name, init, shape, jnp.float32).value
            if value.dtype != jnp.float32 and not is_max_dtype(value):
                raise TypeError(
                    f"The scaling state {OVERWRITE_WITH_GRADIENT}/{where} must be float32; got "
                    f"{value.dtype}. Cast variables['params'] alone, or cast this leaf back with "
                    ".astype(jnp.float32)."
                )
            if value.shape != shape:
                raise ValueError(
                    f"The scaling state {OVERWRITE_WITH_GRADIENT}/{where} has shape {value.shape}, but the "
                    f"recipe needs {shape}. Set amax_history_len to the length in the variables, or change "
                    "the variables with fp8flax.add_fp8_state."
                )
            values.append(value)
        return ScalingState(*values)

    def _found_beside(self, leaf: str) -> str:
        """Returns a sentence about state of the layer that has the name of another op, or nothing."""
        layer: Any = self.scope.parent if self.scope is not None else None
        beside = {} if layer is None else layer.variables().get(OVERWRITE_WITH_GRADIENT, {})
        for name in sorted(beside):
            op, _, _ = name.rpartition("_")
            if name != self.name and op in SAME_STATE and leaf in beside[name]:
                return f"There is that of {name}: {USE_THAT_OP.format(op=op)} "
        return ""
