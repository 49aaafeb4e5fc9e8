"""The ways in which NVIDIA GPUs multiply, run on the CPU: our kernels interpreted, others written out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._audit import compiling
from fp8flax._core.gemm import casts, gemm
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.ops.dot_general import fp8_dot_general
from tests.cases import (
    CONTRACTIONS,
    MATMUL,
    block_gemm_in_jax,
    cells,
    data,
    error_of_product,
)
from tests.gpus import run_branch_for_gpus

BLOCKS = {
    "MX, hybrid, floor": fp8.MXFP8BlockScaling(fp8_format=fp8.Format.HYBRID, scale_rounding="floor"),
    "128 blocks": fp8.Float8BlockScaling(),
    "128 blocks, float32": fp8.Float8BlockScaling(use_f32_scales=True, fp8_format=fp8.Format.HYBRID),
}


def make_vjp(recipe, dims):
    @jax.jit
    def run(lhs, rhs, g):
        out, vjp = jax.vjp(lambda a, b: fp8_dot_general(a, b, dims, recipe=recipe), lhs, rhs)
        return out, *vjp(g.astype(out.dtype))

    return run


# Each recipe for both GPUs and in both contractions, each contraction for both GPUs.
LOWERED = {
    9.0: [
        ("MX, hybrid, floor", "two batches, moved"),
        ("128 blocks", "wide"),
        ("128 blocks, float32", "two batches, moved"),
    ],
    10.0: [
        ("MX, hybrid, floor", "wide"),
        ("128 blocks", "two batches, moved"),
        ("128 blocks, float32", "wide"),
    ],
}


@pytest.mark.parametrize(
    ("name", "contraction", "capability"),
    cells(
        [(*case, capability) for capability in LOWERED for case in LOWERED[capability]],
        repeated=[
            ("128 blocks, float32", "two batches, moved", 9.0),
            ("MX, hybrid, floor", "wide", 10.0),
            ("128 blocks, float32", "wide", 10.0),
        ],
    ),
)
def test_the_lowering_for_gpus_has_the_same_values(name, contraction, capability, monkeypatch):
    """The branch for NVIDIA GPUs, run here: our kernel interpreted, the block-scaled GEMM written out."""
    wide = ((150, 300), (300, 140), MATMUL)
    lhs_shape, rhs_shape, dims = wide if contraction == "wide" else CONTRACTIONS[contraction]
    lhs, rhs, g = data(0, lhs_shape, rhs_shape, dims, jnp.float32)
    expected = make_vjp(BLOCKS[name], dims)(lhs, rhs, g)
    calls = []

    def scaled_matmul(lhs, rhs, lhs_scale, rhs_scale, preferred_element_type):
        calls.append("cuDNN")
        lhs, rhs = (
            x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, axis=2)
            for x, s in ((lhs, lhs_scale), (rhs, rhs_scale))
        )
        return jnp.einsum("bmk,bnk->bmn", lhs, rhs).astype(preferred_element_type)

    def interpreted(*args, **kwargs):
        calls.append("Pallas")
        return block_gemm_in_jax(*args, **kwargs)

    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(casts, "block_quantize", partial(block_quantize, interpret=True))
    monkeypatch.setattr(gemm, "hopper_block_gemm", interpreted)
    run_branch_for_gpus(monkeypatch)
    with compile_target(capability):
        actual = make_vjp(BLOCKS[name], dims)(lhs, rhs, g)
    on_blackwell = {"128 blocks, float32": None}.get(name, "cuDNN")
    on_hopper = {"MX, hybrid, floor": None}.get(name, "Pallas")
    backend = on_blackwell if capability == 10 else on_hopper
    # Ways that also run on a mesh are traced once more.
    assert set(calls) == {backend} - {None}
    assert len(calls) in ((0,) if backend is None else range(3, 7))
    for ours, wanted, factors in zip(actual, expected, ((lhs, rhs), (g, rhs), (lhs, g))):
        assert error_of_product(ours, wanted, *factors) <= 1e-6


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_block_scaled_gemms_under_vmap(axes, monkeypatch):
    """The kernels take a batch as more matrices, or more rows of one of the operands; never a loop."""
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=shape if axis is None else (3, *shape)), jnp.float32)
        for axis, shape in zip(axes, ((5, 130), (130, 7)))
    ]
    run = make_vjp(BLOCKS["128 blocks"], MATMUL)
    each = [[x if axis is None else x[i] for x, axis in zip(operands, axes)] for i in range(3)]
    expected = [run(*pair, jnp.ones((5, 7))) for pair in each]
    monkeypatch.setattr(casts, "block_quantize", partial(block_quantize, interpret=True))
    monkeypatch.setattr(gemm, "hopper_block_gemm", block_gemm_in_jax)
    run_branch_for_gpus(monkeypatch)
    with compile_target(9.0):
        run = make_vjp(BLOCKS["128 blocks"], MATMUL)
        actual = jax.vmap(run, (*axes, None))(*operands, jnp.ones((5, 7)))
    for i, one in enumerate(expected):
        for ours, wanted in zip(actual, one):
            np.testing.assert_allclose(ours[i], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("M", "K", "N"), [(4, 8, 2), (2, 24, 2), (6, 16, 14)])
def test_codes_are_never_multiplied_in_float16(M, K, N):
    """XLA multiplies tiny matrices one element at a time, in float16: 448 * 448 overflows to inf."""
    step = make_vjp(fp8.Float8CurrentScaling(), MATMUL)
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (M, N))]
    program = compiling.compile_for(compiling.find_target("h200"), step, specs)
    assert "= f16[" not in program.as_text()
