"""Which tensors one GPU kernel quantizes for both of their GEMMs."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import casts
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.ops.dot_general import fp8_dot_general

WHOLE = [(1, 256, 384), (1, 384, 512), (1, 256, 512)]


@pytest.mark.parametrize(
    ("shape", "recipe", "expected"),
    [
        pytest.param(*((256, 384), fp8.Float8BlockScaling(), WHOLE), marks=pytest.mark.long),
        pytest.param(*((2, 128, 384), fp8.Float8BlockScaling(), WHOLE), marks=pytest.mark.long),
        ((200, 384), fp8.Float8BlockScaling(), [(1, 200, 384), (1, 384, 512), (1, 200, 512)]),
        ((256, 384), fp8.MXFP8BlockScaling(), []),
        ((256, 384), fp8.Float8CurrentScaling(), []),
    ],
)
def test_which_tensors_the_kernel_quantizes(shape, recipe, expected, monkeypatch):
    """All of them, where the GPU is of Hopper's kind: the input, the kernel, the gradient."""
    seen = []

    def recorded(x, *args, **kwargs):
        seen.append(x.shape)
        return block_quantize(x, *args, **kwargs)

    monkeypatch.setattr(casts, "block_quantize", recorded)
    dims = ((len(shape) - 1,), (0,)), ((), ())

    def step(x, w):
        out, vjp = jax.vjp(partial(fp8_dot_general, dimension_numbers=dims, recipe=recipe), x, w)
        return vjp(out)

    for capability in (None, 10.0, 9.0) if expected else (9.0,):
        assert not seen
        with compile_target(capability):
            jax.eval_shape(step, jnp.zeros(shape), jnp.zeros((384, 512)))
    assert sorted(set(seen)) == sorted(expected)
