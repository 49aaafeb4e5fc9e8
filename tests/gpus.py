"""Programs for eight GPUs that are not present."""

from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import AxisType

import fp8flax as fp8
from fp8flax._audit.compiling import compile_for, find_target
from fp8flax._core.gemm import dispatch, hopper, quantize_blocks
from tests.cases import tiled_gemm_in_jax


def compiled_for_gpus(target, function, *args):
    """Returns a program compiled for a GPU, or for a mesh of GPUs, that is not present."""
    return compile_for(find_target(target), function, args)[0].as_text()


def run_branch_for_gpus(monkeypatch):
    """Makes GEMMs take here the branch of programs for GPUs. Other operations keep that of this CPU.

    The kernel that quantizes blocks is interpreted, and the one for Hopper is replaced by plain JAX.
    """
    branching_lax = SimpleNamespace(**vars(jax.lax))
    branching_lax.platform_dependent = lambda *args, cuda, default: cuda(*args)
    monkeypatch.setattr(dispatch, "lax", branching_lax)
    interpreted = partial(quantize_blocks.block_quantize, interpret=True)
    monkeypatch.setattr(quantize_blocks, "block_quantize", interpreted)
    monkeypatch.setattr(hopper, "tiled_gemm", tiled_gemm_in_jax)


def gpus(target="h200"):
    devices = np.array(fp8.compile_only_devices(target, 8))
    return jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
