"""Runs serving models, whose ops multiply by stored kernels and with fixed scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8flax._core.names import PARAMS, state_leaf_names
from fp8flax._core.options import wrong_model
from fp8flax._core.plans.contraction import States
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._core.state.state import ScalingState
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import Call, as_jax
from fp8flax._model.rules import Rules
from fp8flax._model.state_places import merged, split
from fp8flax._serve.hidden_state import (
    CODES,
    INPUT_SCALE,
    KERNEL_SCALE,
    SERVED,
    ServedOp,
    as_caller_sees_init,
    as_method_sees,
)
from fp8flax._serve.stored_op import broadcastable, check_is_on, computed, constant


@dataclasses.dataclass(frozen=True)
class Serving:
    """The static description of a serving model (hashable). It makes the calls of the model."""

    ops: tuple[ServedOp, ...]

    def __call__(self, cls: Any, rules: Rules) -> Call:
        """Returns a new call of a model of this class."""
        return ServingCall(self, cls, rules)


def serving_ops(model: Any) -> tuple[ServedOp, ...]:
    """Returns the ops of a model that ``freeze`` returned; raises ``TypeError`` for other models."""
    serving: Serving | None = getattr(model, "_fp8_serving", None)
    if serving is None:
        raise wrong_model(model, "come from fp8flax.freeze", "flax.linen", "save_safetensors")
    return serving.ops


class ServingCall(Call):
    """A call of a serving model, which reads kernels and scales from the variables and changes none."""

    def __init__(self, serving: Serving, cls: Any, rules: Rules) -> None:
        super().__init__(cls, rules)
        self._ops = {op.path: op for op in serving.ops}

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the variables with codes for the ops, and wide parameters whose values are not used."""
        variables = jax.tree.map(as_jax, variables)
        variables = as_method_sees(variables, list(self._ops.values()), is_init=self.is_init)
        return merged(variables, SERVED)

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        variables = {PARAMS: split(variables).get(PARAMS, {})}
        if self.is_init:
            params = as_caller_sees_init(variables.get(PARAMS, {}), list(self._ops.values()))
            variables = {**variables, PARAMS: params}
        return variables

    def finish(self, model: Any, method: str) -> None:
        stored = {op.kernel[0] for op in self._ops.values() if op.kernel is not None}
        if read := sorted(stored & self.origins.used_otherwise):
            raise ValueError(
                f"{type(model).__name__}.{method} reads {', '.join(map('/'.join, read))} outside of an FP8 "
                "op. These parameters are stored in FP8, because this did not happen when the model was "
                "frozen. Freeze the model after a call of this method, or call the model that was frozen."
            )

    def on_op(
        self,
        op: Fp8Op,
        recipe: Recipe | None,
        compute: Any,
        lhs: Any,
        rhs: Any,
        *rest: Any,
        **keywords: Any,
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales."""
        if self.is_apart:
            return compute(lhs, rhs, *rest, **keywords)
        if self.is_init:
            return op.row.plain(lhs, rhs, *rest, **keywords)
        served = self._served(op, recipe)
        gemms, kernel = served.gemms, self._kernel(served, op, rhs)
        if kernel is not None and op.row.plan is not None:
            input_scale: Any = self.stored(op, INPUT_SCALE)
            return computed(op.row, gemms, *kernel, input_scale, lhs, rhs, *rest, **keywords)
        if kernel is not None:
            # An op without a plan multiplies by the dequantized kernel. If it quantizes this kernel again,
            # its fixed scale gives the same codes.
            codes, scale = map(constant, kernel)
            rhs = (codes.astype(scale.dtype) * broadcastable(scale, codes)).astype(rhs.dtype)
        if gemms.forward.lhs is None and (kernel is not None or gemms.forward.rhs is None):
            # Nothing is left to quantize.
            return op.row.plain(lhs, rhs, *rest, **keywords)
        return compute(lhs, rhs, *rest, frozen=(_fixed_states(self, op, gemms), gemms), **keywords)

    def _served(self, op: Fp8Op, recipe: Recipe | None) -> ServedOp:
        check_is_on(recipe)
        served = self._ops.get(op.path)
        if served is None:
            raise ValueError(
                f"The FP8 op at {'/'.join(op.path)} did not run when the model was frozen. Freeze the "
                "model with inputs that reach this op."
            )
        return served

    def _kernel(self, served: ServedOp, op: Fp8Op, rhs: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Returns the codes and the scales for the placeholder ``rhs``; None if the kernel stays wide."""
        if served.kernel is None:
            return None
        origin = self.origin_of(rhs)
        if origin is None or not origin.is_whole_parameter or origin.sources[0].path != served.kernel[0]:
            raise ValueError(
                f"The kernel of the FP8 op at {'/'.join(op.path)} comes from other parameters than when "
                "the model was frozen. Freeze it with inputs like those that it serves."
            )
        codes, scale = self.stored(op, CODES), self.stored(op, KERNEL_SCALE)
        assert codes is not None
        assert scale is not None
        return origin.rebuild(codes, casts=False), scale


def _fixed_states(call: ServingCall, op: Fp8Op, gemms: CustomRecipe) -> States:
    """Returns states with the fixed scales and histories of zeros, so that the scales do not change."""
    states = {}
    for role in gemms.delayed:
        name, _ = state_leaf_names(role)
        scale = call.stored(op, name)
        scale = constant(jnp.ones((1,)) if scale is None else scale)
        states[role] = ScalingState(scale, jnp.zeros((*scale.shape[:-1], 1)))
    return States(**states)
