"""The GPU that a program is compiled for."""

import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._audit.compiling import find_target, lower_for
from fp8flax._core.gemm.gpus import (
    GPUS,
    compile_target,
    compute_capability,
    compute_capability_of,
    has_fp8_units,
    is_hopper,
)
from tests.cases import dense_step, struct


def device(platform, capability):
    attributes = {} if capability is None else {"compute_capability": capability}
    return types.SimpleNamespace(platform=platform, **attributes)


@pytest.mark.parametrize(
    ("platform", "capability", "number", "has_units"),
    [
        ("cpu", None, 0, False),
        ("gpu", "8.0", 8.0, False),
        ("gpu", "8.9", 8.9, True),
        ("cuda", "10.0", 10.0, True),
        ("gpu", "gfx942", 0, True),
        ("rocm", None, 0, True),
        ("tpu", None, 0, True),
    ],
)
def test_the_capability_of_a_device(platform, capability, number, has_units):
    assert compute_capability_of(device(platform, capability)) == number
    assert has_fp8_units(device(platform, capability)) == has_units


def test_the_target_comes_before_the_first_device():
    assert compute_capability() == compute_capability_of(jax.devices()[0]) == 0
    with compile_target(9.0):
        assert compute_capability() == 9.0


@pytest.mark.parametrize("key", GPUS)
def test_properties_follow_from_the_capability(key):
    gpu = GPUS[key]
    assert gpu.has_fp8_units == (gpu.fp8 > 0)
    assert is_hopper(gpu.compute_capability) == (key in ("h100", "h200"))
    if gpu.has_fp8_units:
        assert 1.5 < gpu.fp8 / gpu.bf16 < 2


def of_experts():
    op = fp8.Fp8RaggedDotOp(recipe=fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3))
    args = struct(512, 256), struct(4, 256, 384), struct(4, dtype=jnp.int32)
    return jax.grad(lambda *xs: jnp.sum(op.apply({}, *xs).astype(jnp.float32)), (0, 1)), *args


def of_dense(recipe):
    return dense_step(256, 512, 384, partial(fp8.Fp8DotGeneralOp, recipe=recipe))


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("program", "target"),
    [
        (of_experts, "h200"),
        (partial(of_dense, fp8.Float8BlockScaling()), "h200"),
    ],
    ids=["experts", "quantize blocks"],
)
def test_programs_need_no_triton_backend(program, target, monkeypatch):
    """JAX will remove Pallas's Triton backend. XLA then computes what our kernels did."""

    def lowered():
        step, *args = program()  # a new function, which JAX has not traced
        return lower_for(find_target(target), step, tuple(args)).as_text()

    assert "xla.gpu.triton" in lowered()
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    jax.clear_caches()
    assert "xla.gpu.triton" not in lowered()
