"""What is compiled for eight GPUs does not depend on what devices the host has that compiles it."""

import collections
import json
import os
import subprocess
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax import _hlo
from fp8flax._core.device import compile_target
from fp8flax._core.names import BLOCK_GEMM, BLOCK_GEMM_F16
from fp8flax._dot_general import fp8_dot_general
from fp8flax._transforms import unless_partitioned
from tests.train.test_devices import compiled_for_gpus, gpus

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


def bytes_sent(program):
    """Returns the bytes that collectives put out, by kind; those of single numbers left out."""
    total = collections.Counter()
    for computation in _hlo.parse(program).computations.values():
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                total[kind] += sum(array.bytes for array in instruction.results if array.dims)
    return dict(total)


def compiled_step(recipe, kernels):
    """Two layers and their gradients for eight GPUs, the batch sharded; their kernels as told."""
    on = gpus()
    op = None if recipe is None else partial(fp8.Fp8DotGeneralOp, recipe=recipe)
    layer = partial(nn.Dense, dot_general_cls=op, dtype=jnp.bfloat16, use_bias=False)
    model = nn.Sequential([layer(512), nn.relu, layer(256)])
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    place = jax.tree.map(lambda leaf: NamedSharding(on, kernels if leaf.ndim == 2 else P()), variables)
    step = jax.jit(
        fp8.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)),
        in_shardings=(place, NamedSharding(on, P("data"))),
        out_shardings=(NamedSharding(on, P()), place),
    )
    with compile_target(9.0):
        return compiled_for_gpus(step, variables, x)


RECIPES = {
    "bfloat16": None,
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "128 blocks": fp8.Float8BlockScaling(),
}
KERNELS = {"data parallel": P(), "FSDP": P("data")}
CASES = ["bfloat16, FSDP", "delayed, FSDP", "128 blocks, data parallel"]


def seen_here():
    """Returns the bytes per recipe and way of sharding; and whether our kernel is in a program."""
    programs = {}
    for case in CASES:
        recipe, way = case.split(", ")
        programs[case] = compiled_step(RECIPES[recipe], KERNELS[way])
    return {
        name: {"kernel": BLOCK_GEMM in program, **bytes_sent(program)} for name, program in programs.items()
    }


SCRIPT = """
import json, jax
from tests.audit.test_many_devices_ahead import seen_here
assert jax.device_count() == 1
print(json.dumps(seen_here()))
"""


@pytest.mark.usefixtures("gpu")
def test_a_host_with_one_device_compiles_as_one_with_eight():
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    on_one_device = json.loads(done.stdout)
    assert jax.device_count() == 8
    assert on_one_device == seen_here()
    assert not any(seen["kernel"] for seen in on_one_device.values())  # which cannot be partitioned
    assert all("all-gather" not in on_one_device[case] for case in CASES if "data" in case)
    gathered = [on_one_device[f"{recipe}, FSDP"]["all-gather"] for recipe in ("bfloat16", "delayed")]
    assert gathered[0] == 2 * gathered[1]


@pytest.mark.usefixtures("gpu")
def test_for_one_gpu_the_kernel_is_there_whatever_the_host_has():
    def dot(x, w):
        return fp8_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=RECIPES["128 blocks"])

    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    one = jax.sharding.SingleDeviceSharding(gpus().devices[0])
    with compile_target(9.0):
        assert jax.device_count() == 8
        assert BLOCK_GEMM_F16 in compiled_for_gpus(jax.jit(dot, in_shardings=one), x, x)


@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 2)], ids=str)
def test_under_vmap(axes):
    """Either function is mapped."""
    batch = jnp.arange(24.0).reshape(2, 3, 4)
    x, y = (batch[0] if axis is None else jnp.moveaxis(batch, 0, axis) for axis in axes)

    def both(x, y):
        return unless_partitioned(lambda x: x + 1, lambda x: x + 2, x) + unless_partitioned(
            lambda a: a[0] * a[1], lambda a: a[0] - a[1], [x, y]
        )

    expected = jax.vmap(lambda x, y: x + 1 + x * y, axes)(x, y)
    for function in (jax.vmap(both, axes), jax.jit(jax.vmap(both, axes))):
        np.testing.assert_array_equal(function(x, y), expected)


def test_where_a_program_is_partitioned():
    """Over eight devices, or the axis that ``shard_map`` leaves; not on one, nor inside of it over all."""
    x = jnp.zeros((8, 2))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def tell(x):
        return unless_partitioned(lambda x: x + 1, lambda x: x + 2, x)

    def inside(names):
        return jax.jit(
            jax.shard_map(tell, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=set(names))
        )

    split = jax.device_put(x, NamedSharding(mesh, P("a")))
    assert jnp.all(tell(x) == 1)
    assert jnp.all(jax.jit(tell)(x) == 1)
    assert jnp.all(tell(split) == 2)
    assert jnp.all(jax.jit(tell)(split) == 2)
    assert jnp.all(inside("ab")(split) == 1)
    assert jnp.all(inside("a")(split) == 2)
