"""Equal layers are traced once."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8


@pytest.mark.newest
@pytest.mark.parametrize("by_hand", [True, False])
def test_layers_that_are_alike_are_traced_once(by_hand):
    """More layers add no functions to the lowered program: all but the first and the last are alike."""

    def functions(count):
        op = fp8.Fp8DotGeneralOp if by_hand else None
        model, x = (
            nn.Sequential([nn.Dense(16, dot_general_cls=op) for _ in range(count)]),
            jnp.ones((4, 16)),
        )
        model = model if by_hand else fp8.quantize_model(model, include=".*")
        variables = jax.eval_shape(model.init, jax.random.key(0), x)
        step = jax.jit(fp8.grad(lambda variables, x: jnp.sum(model.apply(variables, x))))
        text = step.lower(variables, x).as_text()
        return sorted(re.findall(r"func\.func private @(_forward|_contract_bwd)", text))

    assert functions(5) == functions(3) == 2 * ["_contract_bwd"] + 3 * ["_forward"]
