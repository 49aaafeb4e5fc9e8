"""The base class of the Linen ops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8flax._compat.flax_internals import call_of, running_modules
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, RNG
from fp8flax._core.ops.op import MissingStateError, Op, OpBase, StateLeaf
from fp8flax._core.recipes import Recipe


def called(op: type[Op]) -> Callable[..., jax.Array]:
    """Returns the ``__call__`` of a Linen op, which refuses an instance in the place of the class."""

    @nn.compact
    @functools.wraps(op.__call__)
    def call(self: Fp8Op, *args: Any, **kwargs: Any) -> jax.Array:
        if not (args or kwargs):
            name = type(self).__name__
            raise TypeError(
                f"An instance of {name} was called without operands, as a layer calls a class. Give the "
                f"layer the class: dot_general_cls={name}, or functools.partial({name}, recipe=…)."
            )
        return op.__call__(self, *args, **kwargs)

    return call


class Fp8Op(OpBase, nn.Module):
    """Base class of the Linen ops: declares the scaling state of one contraction, and computes it."""

    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_options()

    @property
    def _is_off(self) -> bool:
        call = call_of(self.scope)
        return super()._is_off and not (call and call.on_op)

    @property
    def _run(self) -> Callable[..., jax.Array]:
        call, compute = call_of(self.scope), super()._run
        on_op = call.on_op if call else None
        return compute if on_op is None else partial(on_op, self, self._recipe_in_use(), compute)

    @nn.nowrap
    def _place(self) -> tuple[str, ...]:
        return self.path or (type(self).__name__,)

    @nn.nowrap
    def _key(self) -> jax.Array | None:
        return self.make_rng(RNG) if self.has_rng(RNG) else None

    @nn.nowrap
    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, str]:
        """Declares one variable of the state, and returns its value and its path."""
        name, collection = leaf.name, OVERWRITE_WITH_GRADIENT
        where = f"{collection}/{'/'.join((*self.path, name))}"
        layer = "/".join(self.path[:-1]) or type(self).__name__
        call, is_there = call_of(self.scope), self.has_variable(collection, name)
        # Other values of mutable that include the state, such as True, include the parameters, too.
        is_mutable = self.is_mutable_collection(collection)
        is_named = is_mutable and not (self.is_initializing() or self.is_mutable_collection(PARAMS))
        if is_named and (call or is_there):
            # stacklevel=1 makes this line the place of the warning, so that Python shows it only once.
            warnings.warn(
                f"mutable includes {collection!r}, but apply returns the old state there. The next state "
                "is the gradient with respect to the old one: take it from fp8flax.value_and_grad, as "
                "fp8flax.TrainState does, and leave the collection out of mutable.",
                stacklevel=1,
            )
        if call and (value := call.state_of(self, name, leaf)) is not None:
            return value, where
        if self._is_normalized(name):
            raise ValueError(
                f"The FP8 layer {layer!r} is inside of nn.WeightNorm, which would normalize its scaling "
                f"state {where} as it does the kernel. Remove the op from the layer and convert the whole "
                "model with fp8flax.quantize_model. Or name the layer in the filter of nn.WeightNorm: "
                "variable_filter={'<layer>/kernel'}."
            )
        if not (is_there or (is_mutable and self.is_initializing())):
            raise MissingStateError(
                f"The FP8 layer {layer!r} has no scaling state: {where} is missing, and only init makes "
                f"it. Pass the variables whole, with their {collection!r} collection. A model without "
                "FP8 gets it from fp8flax.add_fp8_state(variables, model, *inputs). For init, name the "
                "collection in nn.scan and nn.vmap around the layer, as for the parameters: "
                f"variable_axes={{'params': 0, {collection!r}: 0}}. Name it also in variables= of nn.remat "
                "and in mutable= of init, if you give them. (Recipes without delayed scaling, such as "
                "Float8CurrentScaling, need no state.)"
            )
        return self.variable(collection, name, jnp.full, leaf.shape, leaf.fill, jnp.float32).value, where

    @nn.nowrap
    def _is_normalized(self, leaf: str) -> bool:
        """Returns whether an ``nn.WeightNorm`` around the op would normalize this variable."""
        for norm in running_modules():
            if isinstance(norm, nn.WeightNorm):
                layer = norm.layer_instance
                path = "/".join((str(layer.name), *self.path[len(layer.path) :], leaf))
                if not norm.variable_filter or any(name in path for name in norm.variable_filter):
                    return True
        return False
