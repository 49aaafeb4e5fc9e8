"""The GPU that a program is compiled for."""

import types

import jax
import pytest

from fp8flax._core.gemm.gpus import (
    GPUS,
    NATIVE_FP8,
    compile_target,
    compute_capability,
    compute_capability_of,
    is_hopper,
)


def device(platform, capability):
    attributes = {} if capability is None else {"compute_capability": capability}
    return types.SimpleNamespace(platform=platform, **attributes)


@pytest.mark.parametrize(
    ("platform", "capability", "number"),
    [
        ("cpu", None, 0),
        ("gpu", "8.0", 8.0),
        ("cuda", "10.0", 10.0),
        ("gpu", "gfx942", 0),
        ("rocm", None, 0),
        ("tpu", None, 0),
    ],
)
def test_the_capability_of_a_device(platform, capability, number):
    assert compute_capability_of(device(platform, capability)) == number


def test_the_target_comes_before_the_first_device():
    assert compute_capability() == compute_capability_of(jax.devices()[0]) == 0
    with compile_target(9.0):
        assert compute_capability() == 9.0


@pytest.mark.parametrize("key", GPUS)
def test_properties_follow_from_the_capability(key):
    gpu = GPUS[key]
    has_units = gpu.compute_capability >= NATIVE_FP8
    assert has_units == (gpu.fp8 > 0)
    assert is_hopper(gpu.compute_capability) == (key in ("h100", "h200"))
    if has_units:
        assert 1.5 < gpu.fp8 / gpu.bf16 < 2
