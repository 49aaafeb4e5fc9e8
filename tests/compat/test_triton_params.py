"""Our kernels in Pallas's Triton backend are lowered without the warning that JAX gives its users."""

import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from fp8flax._core.gemm.kernels.transpose import transpose

from fp8flax._audit.compiling import compiling_for
from fp8flax._compat import triton_params
from fp8flax._core.gemm.gpus import GPUS

CODES = jax.ShapeDtypeStruct((128, 128), jnp.float8_e4m3fn)


def warnings_of(kernel):
    """Returns the warnings of a kernel that is lowered for a GPU."""
    with compiling_for(GPUS["h200"]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = jax.jit(lambda x: kernel(x)).trace(CODES).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()
    return [str(one.message) for one in caught]


def of_a_user(x):
    from jax.experimental import pallas as pl

    def kernel(x_ref, out_ref):
        out_ref[:, :] = x_ref[:, :]

    return pl.pallas_call(kernel, out_shape=CODES)(x)


@pytest.mark.oldest
def test_our_kernels_do_not_warn_but_others_do():
    assert warnings_of(transpose) == []
    if jax.__version_info__ >= (0, 12):
        (message,) = warnings_of(of_a_user)
        assert "The Pallas Triton backend is deprecated" in message


@pytest.mark.oldest
@pytest.mark.parametrize("part", ["jax.extend.pallas", "jax._src.pallas.triton"])
def test_without_a_part_jax_warns(part, monkeypatch):
    monkeypatch.setitem(sys.modules, part, None)
    triton_params._class.cache_clear()
    try:
        params = triton_params.triton_params(num_warps=8, num_stages=1)
    finally:
        triton_params._class.cache_clear()
    assert type(params).__module__.startswith("jax.")
    assert (params.num_warps, params.num_stages) == (8, 1)
