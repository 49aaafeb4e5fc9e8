"""How ``lowered`` chooses: a table of additions, each of another number, in the place of GEMMs."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm import lowering
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.lowering import Row, lowered
from fp8flax._core.ops.contract import Operand, States
from fp8flax._core.ops.dot_general import DotPlan
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from tests.cases import MATMUL
from tests.gpus import run_branch_for_gpus


class Adding(NamedTuple):
    """The request: what the reference adds."""

    number: int

    def reference(self, x):
        return x + self.number


def adds(number):
    return lambda request, x: x + request.number + number


def adds_on_shards(number):
    def run(request, x):
        @custom_partitioning
        def add(x):
            return x + number

        def partition(mesh, args, result):
            return mesh, lambda x: x + number, result.sharding, (args[0].sharding,)

        add.def_partition(partition, sharding_rule="i j -> i j")
        return add(x) + request.number

    return run


def is_hopper(capability, request, x):
    return capability >= 9


PLAIN = adds(40)
ROWS = {
    "held": Row(is_hopper, adds(10), adds(20)),
    "kernel": Row(is_hopper, adds(10), on_shards=adds_on_shards(30)),
    "both": Row(is_hopper, adds(10), adds(20), adds_on_shards(30)),
    "one device": Row(is_hopper, adds(10)),
    "plain": Row(lambda capability, request, x: capability >= 8, PLAIN, PLAIN),
}


def ways(rows, capability, monkeypatch):
    """Returns what is added on one GPU, on several, and on several under ``jax.vmap``."""
    monkeypatch.setitem(lowering._TABLE, Adding, tuple(ROWS[name] for name in rows))
    run_branch_for_gpus(monkeypatch)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.device_put(np.zeros((8, 2), np.float32), NamedSharding(mesh, P("data")))

    def add(x):
        return lowered(Adding(1), x)

    with compile_target(capability):
        one, several = jax.jit(add)(jnp.zeros((2, 2))), jax.jit(add)(split)
        mapped = jax.jit(jax.vmap(add))(split[:, None])
    return [int(result.ravel()[0]) for result in (one, several, mapped)]


@pytest.mark.parametrize(
    ("rows", "capability", "expected"),
    [
        (["held", "plain"], 9.0, [11, 21, 21]),
        (["kernel", "plain"], 9.0, [11, 31, 41]),
        (["kernel"], 9.0, [11, 31, 1]),
        (["both", "plain"], 9.0, [11, 31, 21]),
        (["one device", "plain"], 9.0, [11, 41, 41]),
        (["one device"], 9.0, [11, 1, 1]),
        (["plain"], 9.0, [41, 41, 41]),
        (["held", "kernel", "plain"], 8.0, [41, 41, 41]),
        (["held", "kernel", "plain"], 7.0, [1, 1, 1]),
    ],
)
def test_which_row_runs(rows, capability, expected, monkeypatch):
    """The first that fits; on several devices the first that can be split; else the reference."""
    assert ways(rows, capability, monkeypatch) == expected


def test_other_devices_run_the_reference(monkeypatch):
    monkeypatch.setitem(lowering._TABLE, Adding, (ROWS["plain"],))
    with compile_target(9.0):
        out = jax.jit(lambda x: lowered(Adding(1), x))(jnp.zeros(2))
    np.testing.assert_array_equal(out, np.ones(2))


def test_a_derivative_is_refused_if_a_row_fits(monkeypatch):
    monkeypatch.setitem(lowering._TABLE, Adding, (ROWS["plain"],))
    gradient = jax.grad(lambda x: lowered(Adding(1), x))
    assert gradient(1.0) == 1
    with compile_target(9.0), pytest.raises(TypeError, match="can be differentiated once"):
        gradient(1.0)


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "blocks",
        pytest.param("vmap", marks=pytest.mark.long),
        pytest.param("remat", marks=pytest.mark.all_cells),
    ],
)
def test_which_gpus_have_the_kernel(way):
    """Hopper, of operands of one dtype; under transformations too. For one GPU, and for several."""
    blocks = way == "blocks"
    recipe = fp8.Float8BlockScaling() if blocks else fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)
    f = partial(fp8_ragged_dot, states=States(), recipe=recipe)
    f = {"vmap": jax.vmap(f), "remat": jax.checkpoint(f)}.get(way, f)
    x, w, sizes = jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])
    if way == "vmap":
        x, w, sizes = (jnp.stack([a] * 2) for a in (x, w, sizes))

    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, vjp(out)

    for capability, count in ((None, 0), (8.9, 0), (9.0, 3), (10.0, 0)):
        # Pallas's pipeline is one for int32.
        with compile_target(capability), jax.enable_x64(way == "blocks"):
            found = str(jax.make_jaxpr(step)(x, w)).count("name=fp8_grouped_gemm")
            assert found == (count if way == "vmap" else 2 * count)


DELAYED = fp8.DelayedScaling().gemms


def gemms_of(lhs, rhs, dims):
    operands = (Operand(shape, jnp.dtype(jnp.bfloat16), None, frozenset()) for shape in (lhs, rhs))
    return DotPlan(
        recipe=DELAYED,
        **dict(zip(("lhs", "rhs"), operands, strict=True)),
        out_dtype=jnp.dtype(jnp.bfloat16),
        dimension_numbers=dims,
    ).gemms


@pytest.mark.parametrize("capability", [9.0, 10.0])
def test_operands_that_are_filled_up_to_other_widths(capability):
    """Blocks of 32 and of 128 columns, with 96 columns; devices of a mesh cannot split these."""
    quantizers = [
        fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=block, scale="e8m0")
        for block in ((1, 32), (1, 128))
    ]
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=quantizers[0], rhs=quantizers[1]))
    op = fp8.Fp8DotGeneralOp(recipe=recipe)
    with compile_target(capability):
        out = jax.eval_shape(
            lambda x, w: op.apply({}, x, w, MATMUL), jnp.zeros((16, 96)), jnp.zeros((96, 16))
        )
    assert out.shape == (16, 16)


@pytest.mark.parametrize(("number", "fits"), [(4, True), (2**18, False)])
def test_sizes_are_counted_with_their_padding(number, fits):
    """A GPU kernel fills up each matrix of a stack to 128 rows."""
    quantizer = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 128), scale="float32")
    dims = (((2,), (1,)), ((0,), (0,)))
    gemm = gemms_of((number, 1, 128), (number, 128, 1), dims).forward
    codes = jax.ShapeDtypeStruct((number, 1, 128), jnp.float8_e4m3fn)
    operand = fp8.QTensor(codes, None, quantizer)
    assert lowering._fits_block_kernels(9.0, gemm, operand, operand) == fits
