"""The audit compiles programs for a mesh of GPUs that are not present."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.names import BLOCK_QUANTIZE
from tests.cases import MATMUL, fp8_dot_general, struct

pytestmark = pytest.mark.usefixtures("gpu")

X, KERNEL = struct(1024, 256), struct(256, 512)


def mesh_of(shape=(4, 2), target="h200"):
    devices = fp8.compile_only_devices(target, shape[0] * shape[1])
    return Mesh(np.array(devices).reshape(shape), ("data", "model"))


def on(mesh, x, *spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))


def step(kernel, x, op=fp8.Fp8DotGeneralOp, in_axes=()):
    """Returns the gradients of a layer, with its new state; ``in_axes`` are those of ``jax.vmap``."""
    layer = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), X)
    state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), {**shapes, "params": {}})

    def loss(variables, x):
        apply = partial(layer.apply, variables)
        out = jax.vmap(apply, *in_axes)(x) if in_axes else apply(x)
        return jnp.sum(jnp.sin(out.astype(jnp.float32)))

    return fp8.grad(loss, (0, 1))({**state, "params": {"kernel": kernel}}, x)


@pytest.mark.newest
def test_each_gpu_does_its_part_in_fp8():
    """The wgrad contracts two dimensions; XLA's partitioner would drop the algorithm of such a dot."""
    mesh = mesh_of()
    args = on(mesh, KERNEL, None, "model"), on(mesh, X, "data")
    report = fp8.audit(step, *args, target=mesh)
    # An amax is one number there, and not one of each row, which would be two more kernels.
    assert report.num_kernels <= 31
    assert (report.target, report.device) == ("h200", "8 × NVIDIA H200")
    found = {gemm.role: (gemm.m, gemm.k, gemm.n, gemm.backend, gemm.is_fp8) for gemm in report.gemms}
    assert found == dict.fromkeys(("forward", "dgrad", "wgrad"), (256, 256, 256, "cublasLt", True))
    assert report.predicted_seconds["total"] > 0
    # The gradient of the input (256×256) is a sum over two devices, that of the kernel over four. The rest
    # is single numbers.
    wanted = 2 * (256 * 256 * 2) // 2 + 2 * (256 * 256 * 2) * 3 // 4
    assert wanted <= report.bytes_sent_by["all-reduce"] < wanted + 100


def test_where_the_shardings_may_be():
    """Arrays on another mesh with these axis names fit, and a jitted function may have in_shardings."""
    mesh = mesh_of()
    here = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    rows, columns = on(here, X, "data"), on(here, KERNEL, None, "model")
    expected = fp8.audit(jnp.dot, rows, columns, target=mesh)
    assert [(gemm.m, gemm.k, gemm.n) for gemm in expected.gemms] == [(256, 256, 256)]
    jitted = jax.jit(jnp.dot, in_shardings=[NamedSharding(mesh, x.sharding.spec) for x in (rows, columns)])
    assert fp8.audit(jitted, X, KERNEL, target=mesh) == expected


@pytest.mark.newest
def test_inside_of_shard_map():
    mesh = mesh_of()
    rows = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    report = fp8.audit(rows(step), KERNEL, on(mesh, X, "data"), target=mesh)
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == 3 * [("cublasLt", True)]


@pytest.mark.long
def test_explicit_axes():
    devices = np.array(fp8.compile_only_devices("h200", 16))
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        report = fp8.audit(step, on(mesh, KERNEL), on(mesh, struct(528, 256), "data"), target=mesh)
    assert {gemm.backend for gemm in report.gemms} == {"cublasLt"}


BLOCKS = partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8BlockScaling())


@pytest.mark.parametrize(
    ("shape", "spec", "options"),
    [
        # Each GPU has 125 of 1000 elements of a sequence; the product of all has 4000 rows.
        ((4, 1000, 256), (None, "data"), {}),
        # Each GPU has one element of a batch, and our kernel multiplies all of its rows.
        pytest.param((8, 256, 256), ("data",), {"op": BLOCKS, "in_axes": (0,)}, marks=pytest.mark.long),
    ],
    ids=["no multiples of 16", "blocks under vmap"],
)
def test_parts_of_a_sequence_or_batch(shape, spec, options):
    mesh = mesh_of((8, 1))
    args = on(mesh, KERNEL), on(mesh, struct(*shape), *spec)
    report = fp8.audit(partial(step, **options), *args, target=mesh)
    assert [gemm.is_fp8 for gemm in report.gemms] == 3 * [True]


@pytest.mark.long
def test_block_scales_on_each_of_several_gpus(texts):
    """With FSDP and split columns the kernels compute parts, and no more is sent than in bfloat16.

    Each tensor is quantized once, for both of its GEMMs, and one set of codes is gathered.
    """
    mesh = mesh_of()
    split, rows, whole = (NamedSharding(mesh, spec) for spec in (P("data", "model"), P("data"), P()))
    kernel, x = struct(1024, 2048), struct(4096, 1024)

    def audited(op):
        layer = nn.Dense(2048, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op)

        def loss(kernel, x):
            out = layer.apply({"params": {"kernel": kernel}}, x)
            return jnp.mean(jnp.square(out.astype(jnp.float32)))

        step = jax.jit(
            jax.value_and_grad(loss, (0, 1)),
            in_shardings=(split, rows),
            out_shardings=(whole, (split, rows)),
        )
        return fp8.audit(step, kernel, x, target=mesh)

    wide = audited(None)
    report = audited(BLOCKS)
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == [("Pallas", True)] * 3
    calls = re.findall(r"custom_call_target=.*op_name=\"(\S+)\"", texts[-1])
    assert sum(BLOCK_QUANTIZE in call.split("/") for call in calls) == 3
    scales = 2**14
    for kind, size in report.bytes_sent_by.items():
        share = 0.5 if kind == "all-gather" else 1
        assert size <= share * wide.bytes_sent_by.get(kind, 0) + scales


@pytest.mark.long
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
    mesh, split = Mesh(np.array(fp8.compile_only_devices("h200", 8)), ("experts",)), P("experts")
    op = fp8.Fp8RaggedDotOp(recipe=recipe)

    def step(x, w, sizes):
        out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, sizes), x, w)
        return vjp(out)

    if is_mapped:
        step = jax.shard_map(step, mesh=mesh, in_specs=split, out_specs=split)
    shapes = ((2048, 128), jnp.bfloat16), ((16, 128, 256), jnp.bfloat16), ((16,), jnp.int32)
    args = [on(mesh, jax.ShapeDtypeStruct(*shape), "experts") for shape in shapes]
    report = fp8.audit(step, *args, target=mesh)
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == [("Pallas", True)] * 3


@pytest.mark.long
def test_one_row_for_each_gpu():
    """The program compiles, although not to FP8."""
    mesh, op = mesh_of((16, 1)), fp8.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
    args = on(mesh, struct(16, 256), "data"), on(mesh, struct(256, 16))
    fp8.audit(lambda *args: op.apply({}, *args, MATMUL), *args, target=mesh)


@pytest.mark.long
def test_fewer_blocks_than_gpus():
    """The kernel has two blocks of rows for four GPUs, so XLA must not split its scales.

    Hopper has no units for MXFP8; XLA drops the scopes inside of the parts of a mesh.
    """
    mesh, op = mesh_of((4, 1)), partial(fp8.Fp8DotGeneralOp, recipe=fp8.MXFP8BlockScaling())
    args = on(mesh, struct(64, 512), "data"), on(mesh, struct(512, 64), "data")
    reasons = {gemm.reason for gemm in fp8.audit(partial(step, op=op), *args, target=mesh).gemms}
    assert reasons == {
        "nothing here multiplies these codes and scales: the same values, multiplied in bfloat16"
    }


@pytest.mark.long
@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
def test_fewer_rows_than_a_block(target):
    """Each GPU has 16 rows, and a block of the second GEMM has 128."""
    mesh = mesh_of((4, 1), target)
    args = on(mesh, KERNEL, None, "data"), on(mesh, struct(64, 256), None, "data")
    assert len(fp8.audit(partial(step, op=BLOCKS), *args, target=mesh).gemms) == 3


@pytest.mark.long
def test_nvfp4_under_fsdp():
    """Each GPU, with one sequence, multiplies in FP4, and sends fewer bytes than in bfloat16."""
    mesh = mesh_of((8, 1), "b200")
    rows = NamedSharding(mesh, P("data"))

    @partial(jax.jit, out_shardings=(rows, (rows, rows)), static_argnums=0)
    def dense(recipe, x, w, g, key):
        dims = ((2,), (0,)), ((), ())
        y, vjp = jax.vjp(lambda x, w: fp8_dot_general(x, w, dims, recipe=recipe, key=key), x, w)
        return y, vjp(g)

    sequences, kernel = struct(8, 512, 1024), struct(1024, 1024)
    args = (*(on(mesh, x, "data") for x in (sequences, kernel, sequences)),)
    wide, narrow = (
        fp8.audit(dense, recipe, *args, jax.random.key(0), target=mesh)
        for recipe in (fp8.CustomRecipe(), fp8.NVFP4BlockScaling())
    )
    assert [narrow.num_fp4_gemms, narrow.num_gemms] == [3, 3]
    assert 0 < narrow.bytes_sent < 0.75 * wide.bytes_sent


def test_errors():
    mesh = mesh_of((1, 2))
    with pytest.raises(ValueError, match="do not lie on the mesh"):
        fp8.audit(jax.jit(lambda x: x + x), X, target=mesh)
    for devices in (
        jax.devices()[:1],
        [*fp8.compile_only_devices("h200"), *fp8.compile_only_devices("b200")],
    ):
        with pytest.raises(ValueError, match="compile_only_devices"):
            fp8.audit(step, KERNEL, X, target=Mesh(np.array(devices), ("data",)))
    with pytest.raises(ValueError, match="target"):
        fp8.compile_only_devices("h20")
    with pytest.raises(ValueError, match="count"):
        fp8.compile_only_devices("h200", 0)
