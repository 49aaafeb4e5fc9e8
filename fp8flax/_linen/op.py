"""The base class of the Linen ops: it declares their variables and finds the recipe in use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core import DenyList

from fp8flax._compat.flax_context import running_modules
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, ROLES, state_leaf_names
from fp8flax._core.op_base import MissingStateError, OpBase, StateLeaf
from fp8flax._core.ops.contract import States
from fp8flax._core.recipes import Recipe
from fp8flax._linen.conversion import conversion

SAME_STATE = ("Fp8DotGeneralOp", "Fp8DirectDotGeneralOp")
"""Names of ops, in Flax and in this package, that have the same state. Linen names a state by its op."""
USE_THAT_OP = "use fp8flax.{op}, or give it the name of the op in the variables."


def _checked_call(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns ``__call__`` of an op, with errors for an op that is in the wrong place."""

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        name, row = type(self).__name__, type(self).row
        if not args and not kwargs:
            cls_field = row.linen_field or "the field"
            raise TypeError(
                f"An instance of fp8flax.{name} was called without operands. A layer calls the class in "
                f"this way. Give the layer the class, {cls_field}=fp8flax.{name}, or with options "
                f"functools.partial(fp8flax.{name}, recipe=…)."
            )
        if self.scope is None:
            in_nnx = ""
            if row.linen_field is not None:
                in_nnx = f"In a layer of Flax NNX use {row.nnx_field}=fp8flax.nnx.{name}(). "
            raise TypeError(
                f"An instance of the Linen module fp8flax.{name} was called outside of a Linen module. "
                f"{in_nnx}Outside of any module, call its methods init and apply."
            )
        return call(self, *args, **kwargs)

    return checked


class Fp8Op(OpBase, nn.Module):
    """Base class of the Linen ops: declares the scaling state of one contraction, and computes it."""

    _dtype_advice = "Cast variables['params'] alone"
    _shape_advice = (
        "Set amax_history_len to the length in the variables, or change the variables with "
        "fp8flax.add_fp8_state."
    )

    recipe: Recipe | None = None

    def __new__(cls, *fields: Any, **more_fields: Any) -> Self:
        """Raises ``TypeError`` for operands, which only instances take: the class is in the wrong field."""
        if any(isinstance(field, jax.Array | np.ndarray) for field in fields):
            name, field, fix = cls.__name__, cls.row.linen_field, ""
            if field is not None:
                fix = f"A layer takes the class as {field}=, not as {field.removesuffix('_cls')}=. "
            raise TypeError(
                f"The class fp8flax.{name} was called with arrays, as its instances are. {fix}Where a "
                f"function is expected, give an instance: {name}()."
            )
        return super().__new__(cls)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Linen wraps only methods that the class itself defines, so the class gets the one of its row.
        if "row" in vars(cls):
            cls.__call__ = nn.compact(cls.row.call.__call__)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)
        if "__call__" in vars(cls):
            cls.__call__ = _checked_call(cls.__call__)  # type: ignore[method-assign]
            cls.__call__.__qualname__ = f"{cls.__qualname__}.__call__"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_options()

    def _multiplier(self) -> Callable[..., jax.Array]:
        on_op = conversion().on_op
        compute = super()._multiplier()
        return compute if on_op is None else partial(on_op, self, self._recipe_in_use(), compute)

    def _place(self) -> tuple[str, ...]:
        return self.path or (type(self).__name__,)

    def _states(self, recipe: Recipe, kernel: tuple[int, ...] = ()) -> States:
        """Declares and returns the states that a recipe needs, for a kernel of this shape."""
        is_named_mutable = not self.is_initializing() and self._is_named_mutable()
        if is_named_mutable and self._state_leaves(recipe, kernel):
            # stacklevel=1 makes this line the place of the warning, so that Python shows it only once.
            warnings.warn(
                f"mutable names {OVERWRITE_WITH_GRADIENT!r}, but apply returns the old state there. The "
                "next state is the gradient with respect to the old one: take it from "
                "fp8flax.value_and_grad, as fp8flax.TrainState does, and leave the collection out of "
                "mutable.",
                stacklevel=1,
            )
        return super()._states(recipe, kernel)

    def _is_named_mutable(self) -> bool:
        """Returns whether ``mutable`` of ``apply`` names the state, and the variables hold a state."""
        name, _ = state_leaf_names(ROLES[0])
        has_state = conversion().state_of is not None or self.has_variable(OVERWRITE_WITH_GRADIENT, name)
        if not (has_state and self.is_mutable_collection(OVERWRITE_WITH_GRADIENT)):
            return False
        filters = [m.scope.root.mutable for m in running_modules() if m.scope is not None]
        # Lifted transformations, such as nn.scan, replace the argument of apply by a set.
        given = next((f for f in reversed(filters) if not isinstance(f, set)), OVERWRITE_WITH_GRADIENT)
        return not isinstance(given, bool | DenyList)

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, str]:
        """Declares one variable of the state, and returns its value and its path."""
        name, collection = leaf.name, OVERWRITE_WITH_GRADIENT
        where = f"{collection}/{'/'.join((*self.path, name))}"
        layer = "/".join(self.path[:-1]) or type(self).__name__
        state_of = conversion().state_of
        if state_of is not None and (value := state_of(self, leaf)) is not None:
            return value, where
        if (norm := self._normalized_by(name)) is not None:
            raise ValueError(
                f"The FP8 layer {layer!r} is inside of nn.WeightNorm, which would normalize its scaling "
                f"state {where} as it does the kernel. Remove the op from the layer and convert the whole "
                "model with fp8flax.quantize_model, which does not let nn.WeightNorm change the state. Or "
                f"give nn.WeightNorm the full name of the kernel: variable_filter={{'{norm}/kernel'}}."
            )
        if not (self.has_variable(collection, name) or self.is_mutable_collection(collection)):
            if self.is_initializing():
                raise MissingStateError(
                    f"The FP8 layer {layer!r} cannot make its scaling state {where}: init may not make "
                    "this collection here. Name the collection in nn.scan and nn.vmap around the layer, as "
                    f"for the parameters: variable_axes={{'params': 0, {collection!r}: 0}}. Name it also "
                    "in variables= of nn.remat and in mutable= of init, if you give them. (Recipes "
                    "without delayed scaling, such as Float8CurrentScaling, need no state.)"
                )
            raise MissingStateError(
                f"The FP8 layer {layer!r} has no scaling state: {where} is missing from the variables. "
                "Variables of a model without FP8 get their state from fp8flax.add_fp8_state(variables, "
                "model, *inputs); variables of this model must be passed whole, with their "
                f"{collection!r} collection. {self._found_beside(name)}(Recipes without delayed scaling, "
                "such as Float8CurrentScaling, need no state.)"
            )
        return self.variable(collection, name, jnp.full, leaf.shape, leaf.fill, jnp.float32).value, where

    def _normalized_by(self, leaf: str) -> str | None:
        """Returns the name of the layer whose ``nn.WeightNorm`` would normalize this variable, or None."""
        for norm in running_modules():
            if isinstance(norm, nn.WeightNorm):
                layer = norm.layer_instance
                path = "/".join((str(layer.name), *self.path[len(layer.path) :], leaf))
                if not norm.variable_filter or any(name in path for name in norm.variable_filter):
                    return str(layer.name)
        return None

    def _found_beside(self, leaf: str) -> str:
        """Returns a sentence about state under the name of another op; empty if there is no such state."""
        layer: Any = self.scope.parent if self.scope is not None else None
        beside = {} if layer is None else layer.variables().get(OVERWRITE_WITH_GRADIENT, {})
        for name in sorted(beside):
            op, _, _ = name.rpartition("_")
            if name != self.name and op in SAME_STATE and leaf in beside[name]:
                return f"They hold the state of {name}: {USE_THAT_OP.format(op=op)} "
        return ""
