"""The audit compiles programs for a mesh of GPUs that are not present."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from tests.cases import struct

pytestmark = pytest.mark.usefixtures("gpu")

X, KERNEL = struct(1024, 256, dtype=jnp.bfloat16), struct(256, 512, dtype=jnp.bfloat16)


op_without_state = partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling())


def mesh_of(shape=(4, 2), target="h200"):
    devices = fp8.compile_only_devices(target, shape[0] * shape[1])
    return Mesh(np.array(devices).reshape(shape), ("data", "model"))


def on(mesh, x, *spec):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*spec)))


def step(kernel, x, op=fp8.Fp8DotGeneralOp):
    layer = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op)
    state = jax.eval_shape(layer.init, jax.random.key(0), x)
    state = {name: tree for name, tree in state.items() if name != "params"}
    state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), state)

    def loss(kernel, x):
        return jnp.sum(jnp.sin(layer.apply({**state, "params": {"kernel": kernel}}, x).astype(jnp.float32)))

    return jax.grad(loss, (0, 1))(kernel, x)


def step_with_state(kernel, x):
    """Returns the new state, too."""
    layer = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=fp8.Fp8DotGeneralOp)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), X)
    state = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)

    def loss(variables, x):
        return jnp.sum(jnp.sin(layer.apply(variables, x).astype(jnp.float32)))

    return fp8.grad(loss, (0, 1))({**state, "params": {"kernel": kernel}}, x)


@pytest.mark.newest
def test_each_gpu_does_its_part_in_fp8():
    """The wgrad contracts two dimensions; XLA's partitioner would drop the algorithm of such a dot."""
    mesh = mesh_of()
    args = on(mesh, KERNEL, None, "model"), on(mesh, X, "data")
    step = step_with_state
    report = fp8.audit(step, *args, target=mesh)
    # An amax is one number there, and not one of each row, which would be two more kernels.
    assert report.num_kernels <= 31
    assert (report.target, report.device) == ("h200", "8 × NVIDIA H200")
    found = {gemm.role: (gemm.m, gemm.k, gemm.n, gemm.backend, gemm.is_fp8) for gemm in report.gemms}
    assert found == {
        "forward": (256, 256, 256, "cublasLt", True),
        "dgrad": (256, 256, 256, "cublasLt", True),
        "wgrad": (256, 256, 256, "cublasLt", True),
    }
    assert report.predicted_seconds["total"] > 0
    # The gradient of the input (256×256) is a sum over two devices, that of the kernel over four. The rest
    # is single numbers.
    wanted = 2 * (256 * 256 * 2) // 2 + 2 * (256 * 256 * 2) * 3 // 4
    assert wanted <= report.bytes_sent_by["all-reduce"] < wanted + 100
    # A jitted function may have in_shardings instead; arrays on a mesh with these axis names fit, too.
    shardings = tuple(x.sharding for x in args)
    assert fp8.audit(jax.jit(step, in_shardings=shardings), KERNEL, X, target=mesh) == report
    here = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    with jax.set_mesh(mesh):
        assert fp8.audit(step, on(here, KERNEL, None, "model"), on(here, X, "data"), target=mesh) == report


@pytest.mark.newest
def test_inside_of_shard_map():
    mesh = mesh_of()
    rows = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    report = fp8.audit(rows(step), KERNEL, on(mesh, X, "data"), target=mesh)
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == 3 * [("cublasLt", True)]


def test_explicit_axes():
    devices = np.array(fp8.compile_only_devices("h200", 16))
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        args = on(mesh, KERNEL), on(mesh, struct(528, 256, dtype=jnp.bfloat16), "data")
        report = fp8.audit(step, *args, target=mesh)
    backends = {gemm.role: gemm.backend for gemm in report.gemms}
    assert set(backends.values()) == {"cublasLt"}


def test_a_sequence_whose_parts_are_no_multiples_of_16():
    """Each of eight GPUs has 125 of 1000 elements of a sequence; the product of all has 4000 rows."""
    mesh = Mesh(np.array(fp8.compile_only_devices("h200", 8)), ("data",))
    x = on(mesh, struct(4, 1000, 256, dtype=jnp.bfloat16), None, "data")
    report = fp8.audit(step, on(mesh, KERNEL), x, target=mesh)
    assert [gemm.is_fp8 for gemm in report.gemms] == 3 * [True]


@pytest.mark.long  # see test_block_scaled_gemms_under_vmap
def test_128_blocks_under_vmap():
    """Each GPU has one element of the batch, and our kernel multiplies all of its rows."""
    mesh = Mesh(np.array(fp8.compile_only_devices("h200", 8)), ("data",))
    op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8BlockScaling())
    layer = nn.Dense(512, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op)

    def step(kernel, x):
        def loss(kernel, x):
            out = jax.vmap(lambda x: layer.apply({"params": {"kernel": kernel}}, x))(x)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return jax.grad(loss, (0, 1))(kernel, x)

    x = on(mesh, struct(8, 256, 256, dtype=jnp.bfloat16), "data")
    report = fp8.audit(step, on(mesh, KERNEL), x, target=mesh)
    assert [gemm.is_fp8 for gemm in report.gemms] == 3 * [True]


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_one_row_or_column_for_each_gpu(spec):
    """The program compiles, although not to FP8."""
    mesh = Mesh(np.array(fp8.compile_only_devices("h200", 16)), ("data",))
    layer = nn.Dense(16, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=op_without_state)
    x, kernel = struct(16, 256, dtype=jnp.bfloat16), struct(256, 16, dtype=jnp.bfloat16)
    rows, columns = (on(mesh, x, *spec[:1]), on(mesh, kernel, None, *spec[1:]))
    fp8.audit(lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x), rows, columns, target=mesh)


def test_fewer_blocks_than_gpus():
    """The kernel has two blocks of rows for four GPUs, so XLA must not split its scales.

    Hopper has no units for MXFP8; XLA drops the scopes inside of the parts of a mesh.
    """
    mesh, op = mesh_of((4, 1)), partial(fp8.Fp8DotGeneralOp, recipe=fp8.MXFP8BlockScaling())
    x, kernel = struct(512, 64, dtype=jnp.bfloat16), struct(64, 512, dtype=jnp.bfloat16)
    report = fp8.audit(partial(step, op=op), on(mesh, kernel, "data"), on(mesh, x, "data"), target=mesh)
    assert [gemm.reason for gemm in report.gemms] == 3 * [
        "nothing here multiplies FP8 with these scales: the same values, multiplied in bfloat16"
    ]


@pytest.mark.long
@pytest.mark.parametrize("target", ["a100", "h200", "b200"])
def test_fewer_rows_than_a_block(target):
    """Each GPU has 16 rows, and a block of the second GEMM has 128."""
    mesh, op = mesh_of((4, 1), target), partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8BlockScaling())
    x, kernel = struct(64, 256, dtype=jnp.bfloat16), struct(256, 512, dtype=jnp.bfloat16)
    kernel, x = on(mesh, kernel, None, "data"), on(mesh, x, None, "data")
    assert len(fp8.audit(partial(step, op=op), kernel, x, target=mesh).gemms) == 3


def test_a_mesh_of_one_is_one_gpu():
    mesh, step_of = mesh_of((1, 1)), partial(step, op=partial(fp8.Fp8DotGeneralOp, form="qdq"))
    assert fp8.audit(step_of, KERNEL, X, target=mesh) == fp8.audit(step_of, KERNEL, X)


def test_errors():
    mesh = mesh_of((1, 2))
    # Without the check before compiling, XLA would abort the process on JAX 0.12.
    for function, args in ((step, (KERNEL, X)), (lambda x: jnp.cumsum(x, 0), (X,))):
        with pytest.raises(RuntimeError, match="do not lie on the mesh"):
            fp8.audit(jax.jit(function), *args, target=mesh)
    other = on(mesh_of((2, 1), "b200"), X, "data").sharding
    with pytest.raises(RuntimeError, match="Shardings|incompatible"):
        fp8.audit(jax.jit(step, in_shardings=(None, other)), on(mesh, KERNEL), X, target=mesh)
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
    with pytest.raises(TypeError, match="count"):
        fp8.compile_only_devices("h200", 2.0)
