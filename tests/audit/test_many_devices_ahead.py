"""A program for eight GPUs does not depend on the devices of the host that compiles it."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._audit.compiling import compiling_for
from fp8flax._core.gemm.gpus import GPUS
from fp8flax._core.names import BLOCK_GEMM_HOPPER, BLOCK_QUANTIZE, GROUPED_GEMM
from tests import FEW_OPTIMIZATIONS_OF_MACHINE_CODE, ROOT, xla_flags
from tests.cases import RECIPES
from tests.gpus import CASES, KERNELS, bytes_sent, compiled_for_gpus, compiled_step, gpus, seen_here


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_a_host_with_one_device_compiles_as_one_with_eight():
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    env |= xla_flags(FEW_OPTIMIZATIONS_OF_MACHINE_CODE)
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpus"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    on_one_device = json.loads(done.stdout)
    assert on_one_device.pop("devices") == 1
    assert jax.device_count() == 8
    assert on_one_device == seen_here()
    assert on_one_device["block128, data parallel"]["kernel"]  # each device's own
    assert all("all-gather" not in on_one_device[case] for case in CASES if "data" in case)
    in_bf16 = bytes_sent(compiled_step(None, KERNELS["FSDP"]))
    assert in_bf16["all-gather"] == 2 * on_one_device["delayed, FSDP"]["all-gather"]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_block_scales_on_each_of_several_gpus():
    """With FSDP and split columns the kernels compute parts, and no more is sent than in bfloat16.

    One set of codes is gathered.
    """
    on = jax.sharding.Mesh(gpus().devices.reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
    of_kernel, of_input = (NamedSharding(on, spec) for spec in (P("data", "model"), P("data")))

    def compiled(op):
        layer = nn.Dense(2048, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op)
        variables = jax.eval_shape(layer.init, jax.random.key(0), x)

        def loss(kernel, x):
            return jnp.mean(jnp.square(layer.apply({"params": {"kernel": kernel}}, x).astype(jnp.float32)))

        step = jax.jit(
            jax.value_and_grad(loss, (0, 1)),
            in_shardings=(of_kernel, of_input),
            out_shardings=(NamedSharding(on, P()), (of_kernel, of_input)),
        )
        with compiling_for(GPUS["h200"]):
            return compiled_for_gpus(step, variables["params"]["kernel"], x)

    program = compiled(partial(fp8.Fp8DotGeneralOp, recipe=RECIPES["block128"]))
    kernels = Counter(
        re.findall(r"custom_call_target=\S+, .*?/(fp8_block_\w+)/custom_partitioning\"", program)
    )
    assert kernels[BLOCK_GEMM_HOPPER] == 3
    assert kernels[BLOCK_QUANTIZE] == 3
    sent, in_bf16 = bytes_sent(program), bytes_sent(compiled(None))
    scales = 2**14
    for kind in ("all-gather", "all-reduce", "reduce-scatter"):
        share = 0.5 if kind == "all-gather" else 1
        assert sent.get(kind, 0) <= share * in_bf16.get(kind, 0) + scales


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("is_mapped", "recipe"),
    [
        (True, fp8.Float8BlockScaling()),
        (False, fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)),
    ],
    ids=["mapped-blocks", "split-current"],
)
def test_experts_on_each_of_several_gpus(is_mapped, recipe):
    """The grouped GEMM runs on the rows of a device and all experts, in shard_map and in XLA's programs."""
    on = jax.sharding.Mesh(gpus().devices, ("experts",), axis_types=(AxisType.Auto,))
    op = fp8.Fp8RaggedDotOp(recipe=recipe)

    def step(x, w, sizes):
        out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, sizes), x, w)
        return vjp(out)

    split = P("experts")
    if is_mapped:
        step = jax.shard_map(step, mesh=on, in_specs=split, out_specs=split)
    shapes = ((2048, 128), jnp.bfloat16), ((16, 128, 256), jnp.bfloat16), ((16,), jnp.int32)
    with compiling_for(GPUS["h200"]):
        program = compiled_for_gpus(
            jax.jit(step, in_shardings=NamedSharding(on, split)),
            *(jax.ShapeDtypeStruct(*shape) for shape in shapes),
        )
    calls = re.findall(r"custom_call_target=\"mosaic\S+, .*op_name=\"(\S+)\"", program)
    assert sum(GROUPED_GEMM in call.split("/") for call in calls) == 3
