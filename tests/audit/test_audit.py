import dataclasses
import functools
import importlib
import json
import types
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax import lax
from jax.lax import DotAlgorithmPreset as Preset

import fp8flax
import fp8flax.nnx
from fp8flax._audit import AuditReport, assert_fp8, audit, compiling, gemms
from fp8flax._audit.compiling import Target
from fp8flax._audit.dots import AuditedGemm
from fp8flax._audit.gemms import path_of, role_of, why_not
from fp8flax._core.gemm.gpus import GPUS
from tests.cases import RECIPES, dense_step, struct

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
MIB = 2**20


@pytest.fixture
def _algorithms(gpu):
    """Skips a test of a user's own FP8 algorithm, if JAX cannot compile one for an absent GPU."""
    if not compiling.compiles_algorithms():
        pytest.skip("this JAX compiles no FP8 algorithm for an absent GPU")


def product(preset, lhs_dtype, rhs_dtype):
    """Returns a product of shapes (512, 256) and (256, 128) and its arguments."""

    def fn(x, w):
        with jax.named_scope("layer"), jax.named_scope("fp8_forward"):
            return lax.dot_general(
                x, w, (((1,), (0,)), ((), ())), precision=preset, preferred_element_type=BF16
            )

    return fn, struct(512, 256, dtype=lhs_dtype), struct(256, 128, dtype=rhs_dtype)


class Layer(nn.Module):
    dot_general_cls: object = None

    @nn.compact
    def __call__(self, x, _=None):
        dense = functools.partial(
            nn.Dense, use_bias=False, dtype=BF16, param_dtype=BF16, dot_general_cls=self.dot_general_cls
        )
        return dense(128, name="down")(nn.relu(dense(256, name="up")(x))), None


def gradient_of(model, *args):
    """Returns a function that differentiates the sum of a model's output, and its arguments."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *args)

    def fn(variables, *args):
        def loss(variables, *args):
            return jnp.sum(jax.tree.leaves(model.apply(variables, *args))[0].astype(jnp.float32) ** 2)

        with jax.numpy_dtype_promotion("standard"):
            return jax.grad(loss, argnums=(0, 1))(variables, *args)

    return fn, variables, *args


# GEMMs that run in FP8, and the reasons of the others.


@pytest.mark.newest
def test_plain_dense(gpu):
    report = audit(*dense_step(8192, 4096, 4096))
    assert (report.num_gemms, report.num_fp8_gemms, report.fp8_flops_share) == (3, 0, 0.0)
    assert {g.reason for g in report.gemms} == {"operands are bfloat16: layer not converted"}
    assert {g.path for g in report.gemms} == {"Dense"}
    assert report.gemm_bytes == 480 * MIB
    assert report.flops == 3 * 2 * 8192 * 4096 * 4096
    assert sorted((g.role, g.batch, g.m, g.k, g.n) for g in report.gemms) == [
        ("backward", 1, 4096, 8192, 4096),
        ("backward", 1, 8192, 4096, 4096),
        ("forward", 1, 8192, 4096, 4096),
    ]
    assert (report.num_kernels, report.num_launches, report.other_bytes) == (3, 3, 0)


def test_flax_direct_op(gpu):
    """XLA's own kernels read FP8, and multiply it in FP8 or in float16: their tile decides."""
    step = dense_step(8192, 4096, 4096, fp8_ops.Fp8DirectDotGeneralOp)
    report = audit(*step)
    assert report.num_gemms == 3
    assert sorted((g.role, g.lhs_dtype, g.rhs_dtype) for g in report.gemms) == [
        ("backward", "float8_e4m3fn", "float8_e5m2"),
        ("backward", "float8_e5m2", "float8_e4m3fn"),
        ("forward", "float8_e4m3fn", "float8_e4m3fn"),
    ]
    assert {g.out_dtype for g in report.gemms} == {"bfloat16"}
    assert {g.backend for g in report.gemms} == {"Triton"}
    assert {g.may_be_fp8 for g in report.gemms} == {True}
    assert all("tile" in g.reason for g in report.gemms)
    assert (report.num_fp8_gemms, report.fp8_flops_share, report.maybe_fp8_flops_share) == (0, 0.0, 1.0)
    with pytest.raises(AssertionError, match="100.0 % may"):
        assert_fp8(*step)
    assert report.num_kernels == (22 if jax.__version_info__ < (0, 12) else 28)
    assert (report.gemm_bytes + report.other_bytes) / MIB == pytest.approx(592, abs=1)
    assert report.compiled_by == "JAX"


def without_algorithms(monkeypatch):
    """Lets the audit compile as where JAX compiles no FP8 algorithm for an absent GPU."""
    for module in (compiling, gemms):
        monkeypatch.setattr(module, "compiles_algorithms", lambda: False)


@pytest.mark.parametrize("target", ["h200", pytest.param("b200", marks=pytest.mark.long)])
def test_the_precision_can_stand_for_the_algorithm(gpu, monkeypatch, target):
    """The GEMMs are the same, but XLA computes none of them as several sums, as it does small ones."""
    args = dense_step(512, 256, 384, fp8flax.Fp8DotGeneralOp)
    expected = audit(*args, target=target)
    without_algorithms(monkeypatch)
    report = audit(*args, target=target)
    assert report.compiled_by != "JAX"
    assert report.compiled_by in str(report)
    assert report.num_launches <= expected.num_launches
    names = "path", "role", "lhs_dtype", "rhs_dtype", "backend", "accumulation", "is_fp8", "flops"
    rows, others = ({tuple(getattr(g, n) for n in names) for g in r.gemms} for r in (report, expected))
    assert rows == others


def test_other_fp8_gemms_beside_one_without_an_algorithm(gpu, monkeypatch):
    """Without Triton XLA gives Flax's GEMM to cublasLt, and on the GPU it would not."""

    def fn(x, w):
        return product(None, E4M3, E4M3)[0](x, w), layer.apply(variables, x.astype(BF16))

    layer = nn.Dense(128, dtype=BF16, dot_general_cls=fp8flax.Fp8DotGeneralOp)
    variables = jax.tree.map(
        lambda x: jnp.ones(x.shape, x.dtype),
        jax.eval_shape(layer.init, jax.random.key(0), struct(512, 256)),
    )
    without_algorithms(monkeypatch)
    report = audit(fn, *product(None, E4M3, E4M3)[1:])
    found = sorted((g.accumulation, g.is_fp8, g.may_be_fp8) for g in report.gemms)
    assert found == [("default", False, True), ("fast", True, False)]


def test_a_function_of_nnx_jit(gpu, monkeypatch):
    """Flax wraps the lowered program of JAX."""
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0), dot_general=fp8flax.nnx.Fp8DotGeneralOp())
    without_algorithms(monkeypatch)
    assert audit(nnx.jit(lambda model, x: model(x)), model, jnp.ones((64, 64))).num_fp8_gemms == 1


@pytest.mark.newest
@pytest.mark.parametrize(
    ("preset", "accumulation"),
    [(Preset.ANY_F8_ANY_F8_F32, "exact"), (Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM, "fast")],
)
@pytest.mark.usefixtures("_algorithms")
def test_cublaslt_and_its_accumulation(preset, accumulation):
    (gemm,) = audit(*product(preset, E4M3, E5M2)).gemms
    assert (gemm.is_fp8, gemm.backend, gemm.accumulation) == (True, "cublasLt", accumulation)
    assert not gemm.may_be_fp8
    assert (gemm.path, gemm.role, gemm.reason) == ("layer", "forward", "")
    assert (gemm.batch, gemm.m, gemm.k, gemm.n) == (1, 512, 256, 128)


@pytest.mark.usefixtures("_algorithms")
def test_e5m2_by_e5m2_has_no_algorithm():
    with pytest.raises(RuntimeError, match="e5m2 × e5m2") as info:
        audit(*product(Preset.ANY_F8_ANY_F8_F32, E5M2, E5M2))
    assert info.value.__cause__ is not None


@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "reason"),
    [
        (E4M3, E4M3, "quantize-dequantize pattern not matched: multiplied in bfloat16"),
        (E5M2, E5M2, "e5m2×e5m2 is not supported by cublasLt; multiplied in bfloat16"),
        (E4M3, BF16, "only one operand comes from FP8: multiplied in bfloat16"),
        (BF16, BF16, "operands are bfloat16: layer not converted"),
    ],
)
def test_reasons_of_products_in_bf16(gpu, lhs_dtype, rhs_dtype, reason):
    def fn(x, w, scale):
        return (x.astype(BF16) * scale) @ w.astype(BF16)

    report = audit(fn, struct(64, 128, dtype=lhs_dtype), struct(128, 32, dtype=rhs_dtype), struct(1, 1))
    assert [g.reason for g in report.gemms] == [reason]


@pytest.mark.long
def test_attention_is_told_from_layers(gpu):
    model = nn.MultiHeadDotProductAttention(4, dtype=BF16, param_dtype=BF16, use_bias=False)
    report = audit(*gradient_of(model, struct(2, 64, 128)))
    attention = [g for g in report.gemms if g.batch > 1]
    assert {g.batch for g in attention} == {8}
    assert sorted(g.role for g in attention) == ["backward"] * 4 + ["forward"] * 2
    assert all("->" in g.path and "batched product (attention" in g.reason for g in attention)
    layers = {g.path.split("/")[-1] for g in report.gemms if g.batch == 1}
    assert layers <= {"query", "key", "value", "out"}
    per_token = 2 * (4 * 128 * 128 + 2 * 64 * 128)
    assert report.flops == 3 * 2 * 64 * per_token


@pytest.mark.parametrize(
    ("dot", "has_units", "platform", "reason"),
    [
        ({}, False, "cpu", "the CPU has no FP8 units; the values are emulated"),
        ({}, False, "cuda", "this GPU has no FP8 units; the values are emulated"),
        (
            {},
            True,
            "cuda",
            "operands are FP8, but the product is computed in a plain loop, without the FP8",
        ),
    ],
)
def test_other_reasons(dot, has_units, platform, reason):
    dot = AuditedGemm(
        op_name="jit(f)/dot_general",
        batch=1,
        m=4,
        k=4,
        n=4,
        lhs_dtype="f8e4m3fn",
        rhs_dtype="f8e4m3fn",
        out_dtype="f32",
        backend="other",
        fp8_sources=("f8e4m3fn", "f8e4m3fn"),
    )
    target = Target(key="local", name="", platform=platform, has_fp8_units=has_units)
    assert why_not(dot, target).startswith(reason)


# Paths and roles.


@pytest.mark.parametrize(
    ("op_name", "path", "role"),
    [
        ("jit(step)/jvp(M)/Dense_0/dot_general", "M/Dense_0", "forward"),
        ("jit(step)/M/Dense_0/dot_general", "M/Dense_0", "forward"),
        ("jit(step)/transpose(jvp(M))/Dense_0/transpose", "M/Dense_0", "backward"),
        ("jit(s)/transpose(jvp(M))/Dense_3/Fp8DotGeneralOp_0/fp8_wgrad/dot_general", "M/Dense_3", "wgrad"),
        (
            "jit(s)/transpose(jvp(M))/Dense_3/NANOOFp8DotGeneralOp_0/fp8_dgrad/dot_general",
            "M/Dense_3",
            "dgrad",
        ),
        (
            "jit(s)/jvp(M)/Dense_3/Fp8DotGeneralOp_0/custom_vjp_call/fp8_forward/dot_general",
            "M/Dense_3",
            "forward",
        ),
        ("jit(s)/jvp()/while/body/closed_call/layers/up/dot_general", "layers/up", "forward"),
        (
            "jit(s)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/layers/up/dot_general",
            "layers/up",
            "recomputed forward",
        ),
        ("jit(s)/transpose(jvp(vmap(M)))/body/dot_general", "M/body", "backward"),
        ("jit(s)/M/cond/branch_1_fun/up/dot_general", "M/up", "forward"),
        ("jit(s)/M/attn/...qhd,...khd->...hqk/dot_general", "M/attn/...qhd,...khd->...hqk", "forward"),
        ("jit(s)/jvp(loss/M)/Dense_0/jit(_einsum)/dot_general", "loss/M/Dense_0", "forward"),
        ("jit(s)/dot_general", "", "forward"),
        ("jit(s)/transpose(jvp(M))/jvp(M)/checkpoint/b0/up/dot_general", "M/b0/up", "backward"),
        ("jit(s)/jvp(M)/forward/dot_general", "M/forward", "forward"),
        ("jit(s)/vmap(jvp(M))/up/dot_general", "M/up", "forward"),
        ("jit(s)/transpose(jvp(vmap))/dot_general", "", "backward"),
        ("", "", "forward"),
    ],
)
def test_path_and_role(op_name, path, role):
    assert (path_of(op_name), role_of(op_name)) == (path, role)


# Control flow.


@pytest.mark.newest
def test_scanned_layers(gpu):
    layer = nn.remat(Layer, prevent_cse=False)
    model = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)(
        name="layers"
    )
    report = audit(*gradient_of(model, struct(512, 128)))
    assert {g.trip_count for g in report.gemms} == {8}
    assert {g.path for g in report.gemms} == {"layers/up", "layers/down"}
    roles = ["backward"] * 4 + ["forward"] * 2 + ["recomputed forward"]
    assert sorted(g.role for g in report.gemms) == roles
    assert report.flops == 7 * 8 * 2 * 512 * 128 * 256
    assert report.num_launches > report.num_kernels
    assert not report.unknown_trip_counts


def test_loop_of_unknown_length(gpu):
    def fn(x, bound):
        return lax.while_loop(lambda x: jnp.max(x) < bound, lambda x: x @ x, x)

    report = audit(fn, struct(64, 64), struct())
    assert report.unknown_trip_counts
    assert [g.trip_count for g in report.gemms] == [1]
    assert "trip count of a loop is not known" in str(report)


def test_every_branch_counts(gpu):
    def fn(pred, x):
        return lax.cond(pred, lambda x: x @ x, lambda x: x @ (x @ x), x)

    assert audit(fn, struct(dtype=jnp.bool_), struct(64, 64)).num_gemms == 3


# Bytes, computed by hand.


def test_bytes_of_a_small_program(gpu):
    def fn(x, w, rows, i):
        return x @ w, rows[i] + 1

    report = audit(
        fn,
        struct(64, 32, dtype=E4M3),
        struct(32, 16, dtype=E4M3),
        struct(100, 5000, dtype=jnp.float32),
        struct(dtype=jnp.int32),
    )
    assert report.gemm_bytes == report.gemms[0].bytes == 64 * 32 + 32 * 16 + 64 * 16
    assert report.flops == 2 * 64 * 32 * 16
    assert report.other_bytes == 2 * 4 * 5000 + 4
    assert (report.num_kernels, report.num_launches) == (2, 2)


# Functions and arguments that can be audited.


def test_float64_of_numpy_is_float32_as_for_jit():
    (gemm,) = audit(jnp.dot, np.ones((16, 16)), np.ones((16, 16)), target="local").gemms
    assert (gemm.lhs_dtype, gemm.rhs_dtype) == ("float32", "float32")


@pytest.mark.long
def test_train_step_with_donation(gpu):
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)])
    x = np.ones((128, 32), np.float32)
    state = fp8flax.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), x), tx=optax.sgd(1e-3, momentum=0.9)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, x, key):
        x = x + jax.random.normal(key, x.shape)
        grads = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    report = audit(train_step, state, x, jax.random.key(1))
    assert {(g.path, g.role) for g in report.gemms} == {
        ("Sequential/layers_0", "forward"),
        ("Sequential/layers_0", "backward"),
        ("Sequential/layers_2", "forward"),
        ("Sequential/layers_2", "backward"),
    }
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    abstract = jax.eval_shape(lambda s: s, state)
    again = audit(train_step, abstract, struct(*x.shape, dtype=x.dtype), jax.eval_shape(jax.random.key, 1))
    assert again == report


def test_static_arguments_stay_static(gpu):
    @functools.partial(jax.jit, static_argnums=(0, 2))
    def fn(name, x, repeats):
        assert name == "power"
        for _ in range(repeats):
            x = x @ x
        return x

    assert audit(fn, "power", struct(64, 64), 3).num_gemms == 3


def test_a_persistent_compilation_cache_changes_nothing(gpu):
    """Without its GPU JAX warns that it cannot load a cached program; warnings are errors here."""
    assert jax.config.jax_compilation_cache_dir

    def f(x):
        return x @ x.T

    first, second = (audit(f, struct(48, 32), target="h200") for _ in range(2))
    assert first == second


def test_scalars_are_arguments_and_arrays_are_optional(gpu):
    (gemm,) = audit(lambda x, factor: x @ (x * factor), struct(64, 64, dtype=jnp.float32), 2.0).gemms
    assert gemm.lhs_dtype == "float32"
    report = audit(lambda: jax.random.normal(jax.random.key(0), (64, 64)) @ jnp.ones((64, 64)))
    assert (report.device, report.num_gemms) == ("NVIDIA H200", 1)


EVEN, ODD = (256, 128, 384), (33, 70, 45)
WIDE = "the same values, multiplied in"
NO_UNITS = "this GPU has no FP8 units; the values are emulated"
AXISWISE = fp8flax.Float8CurrentScaling(granularity="axiswise")
MULTIPLIED = {
    # The backend of all three GEMMs; "" if it is not fixed. The reason if they are not in FP8.
    ("a100", "delayed"): (RECIPES["delayed"], EVEN, "", NO_UNITS),
    ("l40s", "delayed"): (RECIPES["delayed"], EVEN, "cublasLt", ""),
    ("h200", "delayed"): (RECIPES["delayed"], EVEN, "cublasLt", ""),
    ("h200", "128 blocks"): (RECIPES["block128"], EVEN, "Pallas", ""),
    ("h200", "MX"): (RECIPES["mxfp8"], ODD, "Triton", f"{WIDE} bfloat16"),
    ("b200", "delayed"): (RECIPES["delayed"], EVEN, "cublasLt", ""),
    ("b200", "axiswise"): (AXISWISE, EVEN, "cublasLt", ""),
    ("b200", "128 blocks"): (RECIPES["block128"], ODD, "cuDNN", ""),
    ("b200", "MX"): (RECIPES["mxfp8"], ODD, "cuDNN", ""),
    ("b200", "128 blocks, float32"): (
        *(fp8flax.Float8BlockScaling(use_f32_scales=True), EVEN, "Triton", f"{WIDE} float32"),
    ),
}


SELDOM = ("axiswise", "128 blocks, float32")


@pytest.mark.usefixtures("gpu")
@pytest.mark.newest
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(*one, marks=pytest.mark.long) if one[1] in SELDOM or one[0] == "l40s" else one
        for one in MULTIPLIED
    ],
)
def test_what_each_gpu_multiplies_in_fp8(target, name):
    """Every version of JAX gives the same result. Other targets have one of these capabilities."""
    recipe, shape, backend, reason = MULTIPLIED[target, name]
    with jax.numpy_rank_promotion("allow"):
        report = audit(*dense_step(*shape, partial(fp8flax.Fp8DotGeneralOp, recipe=recipe)), target=target)
    assert (report.target, report.device) == (target, GPUS[target].name)
    assert sorted((g.path, g.role) for g in report.gemms) == [
        *(("Dense", "dgrad"), ("Dense", "forward"), ("Dense", "wgrad")),
    ]
    assert report.fp8_flops_share == (not reason)
    assert report.predicted_seconds["total"] > 0
    for gemm in report.gemms:
        assert backend in ("", gemm.backend)
        assert gemm.is_fp8 == (not reason)
        assert reason in gemm.reason


def test_experts_on_an_h200():
    """Our kernel for experts compiles on every version of JAX that can write it."""
    op = fp8flax.Fp8RaggedDotOp(recipe=fp8flax.Float8CurrentScaling(fp8_format=fp8flax.Format.E4M3))
    shapes = ((512, 128), jnp.bfloat16), ((4, 128, 256), jnp.bfloat16), ((4,), jnp.int32)
    report = audit(partial(op.apply, {}), *(jax.ShapeDtypeStruct(*s) for s in shapes), target="h200")
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == [("Pallas", True)]


def test_keyword_arguments():
    def product(x, *, kernel, transposed):
        return x @ (kernel.T if transposed else kernel)

    jitted = jax.jit(product, static_argnames="transposed")
    (gemm,) = audit(jitted, struct(8, 16), kernel=struct(32, 16), transposed=True, target="local").gemms
    assert [gemm.m, gemm.k, gemm.n] == [8, 16, 32]
    plain = partial(product, transposed=False)
    report = assert_fp8(plain, struct(8, 16), kernel=struct(16, 32), min_flops=0, target="local")
    assert report.num_gemms == 1


def test_local_cpu():
    report = audit(*dense_step(64, 128, 32, fp8_ops.Fp8DirectDotGeneralOp), target="local")
    assert (report.num_gemms, report.num_fp8_gemms) == (3, 0)
    assert {g.reason for g in report.gemms} == {"the CPU has no FP8 units; the values are emulated"}
    assert (report.target, report.device) == ("local", "cpu")
    assert sorted(g.role for g in report.gemms) == ["backward", "backward", "forward"]
    assert report.flops == 3 * 2 * 64 * 128 * 32
    assert "Compiled without the device" not in str(report)
    (plain,) = audit(jnp.dot, struct(64, 64), struct(64, 64), target="local").gemms
    assert plain.reason.startswith("operands are")


# Errors.


def test_unknown_target():
    with pytest.raises(ValueError, match="h200 has 9.0"):
        audit(jnp.dot, struct(4, 4), struct(4, 4), target="h20")


def test_tpus_are_refused(monkeypatch):
    device = types.SimpleNamespace(platform="tpu", device_kind="TPU v6")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.raises(ValueError, match="CPUs and GPUs"):
        audit(jnp.dot, struct(4, 4), struct(4, 4), target="local")


def test_missing_plugin(monkeypatch):
    def refuse(**_):
        raise NotImplementedError("topology not implemented for cuda")

    topologies = importlib.import_module("jax.experimental.topologies")
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(ImportError, match=r"pip install .*JAX_PLATFORMS=cpu"):
        compiling._device.__wrapped__("h200")


def test_function_that_cannot_be_traced():
    def mismatched(x):
        return x @ jnp.ones((3, 3), BF16)

    with pytest.raises(RuntimeError, match="cannot be traced") as info:
        audit(mismatched, struct(4, 4), target="local")
    assert isinstance(info.value.__cause__, TypeError)


def test_function_bound_to_another_device(gpu):
    cpu = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    fn = jax.jit(lambda x: x @ x, in_shardings=cpu)
    with pytest.raises(RuntimeError, match="Shardings|static"):
        audit(fn, struct(64, 64))


# assert_fp8 and the report.


def test_assert_fp8():
    args = (jnp.dot, struct(64, 64), struct(64, 64))
    report = assert_fp8(*args, min_flops=0.0, target="local")
    assert report.num_gemms == 1
    with pytest.raises(AssertionError) as info:
        assert_fp8(*args, target="local")
    assert str(info.value).endswith(str(report))


@pytest.mark.parametrize("share", [-0.1, 1.1, 90, float("nan")])
def test_assert_fp8_takes_a_share(share):
    with pytest.raises(ValueError, match="min_flops"):
        assert_fp8(jnp.dot, struct(4, 4), struct(4, 4), min_flops=share, target="local")


GEMM = AuditedGemm(
    path="M/up",
    role="forward",
    batch=1,
    m=64,
    k=32,
    n=16,
    lhs_dtype="float8_e4m3fn",
    rhs_dtype="float8_e4m3fn",
    out_dtype="bfloat16",
    backend="cublasLt",
    accumulation="fast",
    is_fp8=True,
    reason="",
    trip_count=8,
    bytes=3 * MIB,
    op_name="jit(f)/M/up/dot_general",
)
OTHER = dataclasses.replace(
    GEMM,
    path="<b>",
    batch=4,
    role="backward",
    lhs_dtype="bfloat16",
    rhs_dtype="bfloat16",
    backend="Triton",
    accumulation="default",
    is_fp8=False,
    reason="a < b",
    trip_count=2,
)
REPORT = AuditReport(
    target="h200",
    device="NVIDIA H200",
    jax_version="0.0",
    compiled_by="JAX",
    gemms=(GEMM, OTHER),
    num_kernels=5,
    num_launches=21,
    bytes_sent_by={},
    other_bytes=MIB // 2,
    temp_bytes=MIB,
    unknown_trip_counts=False,
)


def test_table():
    assert str(REPORT) == (
        "GEMM  role      M×K×N                 operands        backend         % FLOPs  FP8?\n"
        "-----------------------------------------------------------------------------------\n"
        "M/up  forward   64×32×16 (8 times)    e4m3×e4m3→bf16  cublasLt, fast  50.0     FP8\n"
        "<b>   backward  4×64×32×16 (2 times)  bf16×bf16→bf16  Triton          50.0     [1]\n"
        "\n"
        "[1] a < b\n"
        "\n"
        "1 of 2 GEMMs run in FP8 (50.0 % of their FLOPs) on NVIDIA H200, JAX 0.0.\n"
        "5 kernels, 21 launches. The GEMMs move 6.0 MiB, the other kernels 0.5 MiB; "
        "temporaries take 1.0 MiB.\n"
        "Predicted (not measured): 0.0647 ms; GEMMs 0.00154, other kernels 0.000129, launches 0.063.\n"
        "Compiled without the device, which might choose another backend after measuring."
    )


def test_fp8_operands_in_triton_only_may_run_in_fp8():
    changes = {"backend": "Triton", "accumulation": "default", "reason": "the tile"}
    triton = dataclasses.replace(GEMM, is_fp8=False, may_be_fp8=True, **changes)
    report = dataclasses.replace(REPORT, gemms=(GEMM, triton, triton, OTHER))
    assert report.num_fp8_gemms == 1
    assert report.fp8_flops_share == 0.25
    assert report.maybe_fp8_flops_share == 0.5
    assert report.summary == (
        "1 of 4 GEMMs run in FP8 (25.0 % of their FLOPs), 2 may (50.0 %), on NVIDIA H200, JAX 0.0."
    )
    assert "Triton          25.0     may [1]\n" in str(report)


def test_only_all_is_100_percent():
    wide = dataclasses.replace(OTHER, m=1, k=1, n=1)
    report = dataclasses.replace(REPORT, gemms=(dataclasses.replace(GEMM, m=1000, k=1000, n=1000), wide))
    assert "1 of 2 GEMMs run in FP8 (>99.9 % of their FLOPs)" in report.summary


def test_a_report_can_be_written_as_json():
    restored = json.loads(json.dumps(dataclasses.asdict(REPORT)))
    assert restored["gemms"][1]["reason"] == "a < b"


def test_predicted_time():
    """By hand: GEMMs at their rates or 85 % of 4.8 TB/s, other bytes at that bandwidth, 3 µs per launch."""
    bandwidth = 0.85 * 4.8e12
    large = dataclasses.replace(GEMM, m=8192, k=8192, n=8192, trip_count=2)
    flops = 2 * 2 * 8192**3
    for gemm, seconds in (
        (large, flops / 1400e12),
        (dataclasses.replace(large, is_fp8=False, may_be_fp8=True, reason="tile"), flops / 790e12),
        (dataclasses.replace(large, lhs_dtype="bfloat16", is_fp8=False, reason="x"), flops / 790e12),
        (dataclasses.replace(large, lhs_dtype="float32", is_fp8=False, reason="x"), flops / 395e12),
        (GEMM, GEMM.bytes / bandwidth),
    ):
        report = dataclasses.replace(REPORT, gemms=(gemm,))
        predicted = report.predicted_seconds
        assert predicted["GEMMs"] == pytest.approx(seconds)
        assert predicted["other kernels"] == pytest.approx(MIB / 2 / bandwidth)
        assert predicted["launches"] == pytest.approx(21 * 3e-6)
        assert predicted["total"] == pytest.approx(sum(predicted.values()) - predicted["total"])
    local = dataclasses.replace(REPORT, target="local")
    assert local.predicted_seconds == {}
    assert "Predicted" not in str(local)


def test_bytes_that_a_device_sends():
    report = dataclasses.replace(REPORT, bytes_sent_by={"all-gather": MIB, "all-reduce": 2 * MIB})
    assert report.bytes_sent == 3 * MIB
    assert hash(report) == hash(REPORT)
    assert "Each device sends 3.0 MiB; all-gather 1.0 MiB, all-reduce 2.0 MiB." in str(report)
    assert "sends" not in str(REPORT)


def test_program_without_gemms():
    report = audit(jnp.negative, struct(8), target="local")
    assert (report.num_gemms, report.fp8_flops_share) == (0, 0.0)
    assert "0 of 0 GEMMs" in str(report)
    with pytest.raises(AssertionError, match="no GEMM"):
        assert_fp8(jnp.negative, struct(8), target="local")
