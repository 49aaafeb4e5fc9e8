"""The audit of functions: which GEMMs run in FP8, why not the others, and what can be audited."""

import importlib
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen import fp8_ops
from jax import lax
from jax.lax import DotAlgorithmPreset as Preset

import fp8flax as fp8
import fp8flax.nnx
from fp8flax import assert_fp8, audit
from fp8flax._audit import compiling
from fp8flax._audit.compiling import Target
from fp8flax._audit.gemms import path_of, role_of, with_reason
from fp8flax._core.gemm import cublaslt
from fp8flax._core.gemm.gpus import GPUS
from tests.cases import RECIPES, dense_step, struct

E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
MIB = 2**20


def product(x, w, preset=None):
    """Returns a product in bfloat16."""
    with jax.named_scope("layer"), jax.named_scope("fp8_forward"):
        dims = (((1,), (0,)), ((), ()))
        return lax.dot_general(x, w, dims, precision=preset, preferred_element_type=BF16)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        dense = partial(nn.Dense, use_bias=False, dtype=BF16, param_dtype=BF16)
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
    assert sorted(g.role for g in report.gemms) == ["backward", "backward", "forward"]
    assert (report.num_kernels, report.num_launches, report.other_bytes) == (3, 3, 0)


def test_flax_direct_op(gpu):
    """XLA's own kernels read FP8, and multiply it in FP8 or in float16: their tile decides."""
    report = audit(*dense_step(8192, 4096, 4096, fp8_ops.Fp8DirectDotGeneralOp))
    assert {(g.out_dtype, g.backend, g.units) for g in report.gemms} == {
        ("bfloat16", "Triton", "maybe FP8")
    }
    assert all("tile" in g.reason for g in report.gemms)
    assert (report.num_fp8_gemms, report.fp8_flops_share, report.maybe_fp8_flops_share) == (0, 0.0, 1.0)
    assert report.num_kernels == (22 if jax.__version_info__ < (0, 12) else 28)
    assert (report.gemm_bytes + report.other_bytes) / MIB == pytest.approx(592, abs=1)
    assert report.compiled_by == "JAX"


@pytest.fixture
def _no_algorithms(gpu, monkeypatch):
    """Lets the audit compile as where JAX compiles no FP8 algorithm for an absent GPU."""
    for module in (compiling, cublaslt):
        monkeypatch.setattr(module, "takes_algorithms", lambda: False)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.long
def test_the_precision_can_stand_for_the_algorithm(gpu, request):
    """The GEMMs are the same, but XLA computes none of them as several sums, as it does small ones.

    Without Triton, XLA gives to cublasLt also a GEMM that Triton would get on the GPU, such as Flax's.
    """
    step, *args = dense_step(256, 128, 128, fp8.Fp8DotGeneralOp)
    codes = struct(32, 64, dtype=E4M3), struct(64, 16, dtype=E4M3)

    def fn(codes, *args):
        return step(*args), product(*codes)

    expected = audit(fn, codes, *args)
    request.getfixturevalue("_no_algorithms")
    report = audit(fn, codes, *args)
    assert report.compiled_by != "JAX"
    assert report.num_launches <= expected.num_launches + 1  # cublasLt needs a transposed operand
    names = "path", "role", "lhs_dtype", "rhs_dtype", "accumulation", "units", "flops"
    rows, others = ({tuple(getattr(g, n) for n in names) for g in r.gemms} for r in (report, expected))
    assert rows == others
    assert len({row[-2] for row in rows}) == 2


@pytest.mark.usefixtures("_no_algorithms")
def test_a_function_of_nnx_jit():
    """Flax wraps the lowered program of JAX."""
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0), dot_general=fp8flax.nnx.Fp8DotGeneralOp())
    assert audit(nnx.jit(lambda model, x: model(x)), model, jnp.ones((64, 64))).num_fp8_gemms == 1


@pytest.mark.newest
@pytest.mark.parametrize(
    ("preset", "accumulation"),
    [(Preset.ANY_F8_ANY_F8_F32, "exact"), (Preset.ANY_F8_ANY_F8_F32_FAST_ACCUM, "fast")],
)
def test_cublaslt_and_its_accumulation(gpu, preset, accumulation):
    if jax.__version_info__ >= (0, 12):
        pytest.skip("this JAX compiles no FP8 algorithm for an absent GPU")
    args = struct(512, 256, dtype=E4M3), struct(256, 128, dtype=E5M2)
    (gemm,) = audit(partial(product, preset=preset), *args).gemms
    assert (gemm.is_fp8, gemm.backend, gemm.accumulation) == (True, "cublasLt", accumulation)
    assert (gemm.path, gemm.role, gemm.reason, gemm.units) == ("layer", "forward", "", "FP8")
    assert (gemm.batch, gemm.m, gemm.k, gemm.n) == (1, 512, 256, 128)


def test_reasons_of_products_in_bf16(gpu):
    dtypes = {
        (E4M3, E5M2): "quantize-dequantize pattern not matched: multiplied in bfloat16",
        (E4M3, BF16): "only one operand comes from FP8: multiplied in bfloat16",
        (BF16, BF16): "operands are bfloat16: layer not converted",
    }

    def fn(scale, *pairs):
        return [(x.astype(BF16) * scale) @ w.astype(BF16) for x, w in pairs]

    pairs = [
        (struct(64, 16 * i, dtype=x), struct(16 * i, 32, dtype=w)) for i, (x, w) in enumerate(dtypes, 1)
    ]
    found = {g.k // 16: g.reason for g in audit(fn, struct(1, 1), *pairs).gemms}
    assert found == dict(enumerate(dtypes.values(), 1))


def test_attention_is_told_from_layers(gpu):
    def fn(x, w, q, k):
        with jax.named_scope("attention"):
            return jnp.einsum("qhd,khd->hqk", q, k), x @ w

    layer, attention = audit(fn, struct(64, 32), struct(32, 48), *[struct(64, 8, 16)] * 2).gemms
    assert (attention.batch, layer.batch) == (8, 1)
    assert "->" in attention.path
    assert "batched product (attention" in attention.reason


@pytest.mark.parametrize(
    ("capability", "rhs", "backend", "reason"),
    [
        ("", "float8_e4m3fn", "other", "cpu has no FP8 units"),
        ("9.0", "float8_e4m3fn", "other", "plain loop"),
        ("9.0", "float8_e5m2", "cublasLt", ""),
    ],
)
def test_units_and_operands_decide(capability, rhs, backend, reason):
    lhs, sizes = "float8_e4m3fn", dict.fromkeys(("batch", "m", "k", "n"), 4)
    sources = lhs, rhs if rhs.startswith("float8") else ""
    fields = {"lhs_dtype": lhs, "rhs_dtype": rhs, "out_dtype": "float32", "fp8_sources": sources}
    gemm = fp8.AuditedGemm(op_name="jit(f)/dot_general", backend=backend, **fields, **sizes)
    platform = "cuda" if capability else "cpu"
    device = SimpleNamespace(platform=platform, device_kind=platform, compute_capability=capability)
    found = with_reason(gemm, Target(key="local", device=device), without_triton=False)
    assert found.is_fp8 == (not reason)
    assert reason in found.reason
    assert bool(found.reason) == bool(reason)


# Paths and roles.


@pytest.mark.parametrize(
    ("op_name", "path", "role"),
    [
        ("jit(step)/jvp(M)/Dense_0/dot_general", "M/Dense_0", "forward"),
        ("jit(step)/transpose(jvp(M))/Dense_0/transpose", "M/Dense_0", "backward"),
        ("jit(s)/transpose(jvp(M))/Dense_3/Fp8DotGeneralOp_0/fp8_wgrad/dot_general", "M/Dense_3", "wgrad"),
        ("jit(s)/jvp(M)/up/Fp8Einsum_0/custom_vjp_call/fp8_forward/dot", "M/up", "forward"),
        ("jit(s)/jvp()/while/body/closed_call/layers/up/dot_general", "layers/up", "forward"),
        (
            "jit(s)/transpose(jvp())/while/body/closed_call/checkpoint/rematted_computation/up/dot_general",
            *("up", "recomputed forward"),
        ),
        ("jit(s)/transpose(jvp(vmap(M)))/body/dot_general", "M/body", "backward"),
        ("jit(s)/M/cond/branch_1_fun/up/dot_general", "M/up", "forward"),
        ("jit(s)/M/attn/...qhd,...khd->...hqk/dot_general", "M/attn/...qhd,...khd->...hqk", "forward"),
        ("jit(s)/jvp(loss/M)/Dense_0/jit(_einsum)/dot_general", "loss/M/Dense_0", "forward"),
        ("jit(s)/dot_general", "", "forward"),
        ("jit(s)/transpose(jvp(M))/jvp(M)/checkpoint/b0/up/dot_general", "M/b0/up", "backward"),
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
    axes, rngs = {"params": 0}, {"params": True}
    model = nn.scan(layer, variable_axes=axes, split_rngs=rngs, length=8)(name="layers")
    report = audit(*gradient_of(model, struct(512, 128)))
    assert {g.trip_count for g in report.gemms} == {8}
    assert {g.path for g in report.gemms} == {"layers/up", "layers/down"}
    roles = ["backward"] * 4 + ["forward"] * 2 + ["recomputed forward"]
    assert sorted(g.role for g in report.gemms) == roles
    assert report.flops == 7 * 8 * 2 * 512 * 128 * 256
    assert report.num_launches > report.num_kernels
    assert not report.unknown_trip_counts
    known = partial(lax.fori_loop, 0, 9, lambda _, x: x @ x)
    unknown = partial(lax.while_loop, jnp.any, jnp.sin)
    assert audit(lambda x: unknown(known(x)), struct(16, 16), target="local").unknown_trip_counts


def test_bytes_of_a_small_program(gpu):
    def fn(x, w, rows, i):
        return x @ w, rows[i] + 1

    args = struct(64, 32, dtype=E4M3), struct(32, 16, dtype=E4M3)
    report = audit(fn, *args, struct(100, 5000, dtype=jnp.float32), struct(dtype=jnp.int32))
    assert report.gemm_bytes == report.gemms[0].bytes == 64 * 32 + 32 * 16 + 64 * 16
    assert report.flops == 2 * 64 * 32 * 16
    assert report.other_bytes == 2 * 4 * 5000 + 4
    assert (report.num_kernels, report.num_launches) == (2, 2)


# Functions and arguments that can be audited.


def test_float64_of_numpy_is_float32_as_for_jit():
    (gemm,) = audit(jnp.dot, np.ones((16, 16)), np.ones((16, 16)), target="local").gemms
    assert (gemm.lhs_dtype, gemm.rhs_dtype) == ("float32", "float32")


def test_donated_arrays_stay(gpu):
    step = jax.jit(lambda w, x: w - x.T @ (x @ w), donate_argnums=0)
    w, x = jnp.ones((32, 32)), np.ones((128, 32), np.float32)
    report = audit(step, w, x)
    assert report.num_gemms == 2
    assert not w.is_deleted()
    assert audit(step, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (w, x))) == report


def test_static_and_keyword_arguments():
    @partial(jax.jit, static_argnums=(0, 2), static_argnames="transposed")
    def fn(name, x, repeats, *, kernel, transposed):
        assert name == "power"
        for _ in range(repeats):
            x = x @ (kernel.T if transposed else kernel)
        return x

    report = audit(fn, "power", struct(8, 16), 3, kernel=struct(16, 16), transposed=True, target="local")
    assert [(gemm.m, gemm.k, gemm.n) for gemm in report.gemms] == [(8, 16, 16)] * 3


def test_scalars_are_arguments_and_arrays_are_optional(gpu):
    report = audit(lambda factor: jax.random.normal(jax.random.key(0), (64, 64)) @ jnp.ones((64, 64)), 2.0)
    assert (report.device, report.num_gemms) == ("NVIDIA H200", 1)


# Each kind of GPU.

EVEN, ODD = (256, 128, 384), (33, 70, 45)
WIDE = "the same values, multiplied in"
MULTIPLIED = {
    # The backend of all three GEMMs; "" if it is not fixed. The reason if they are not in FP8.
    ("h200", "128 blocks"): (RECIPES["block128"], EVEN, "Pallas", ""),
    ("h200", "MX"): (RECIPES["mxfp8"], ODD, "Triton", f"{WIDE} bfloat16"),
    ("b200", "128 blocks"): (RECIPES["block128"], ODD, "cuDNN", ""),
}
LONG = {
    ("a100", "delayed"): (RECIPES["delayed"], EVEN, "", "A100-SXM4-80GB has no FP8 units"),
    ("l40s", "delayed"): (RECIPES["delayed"], EVEN, "cublasLt", ""),
    ("b200", "MX"): (RECIPES["mxfp8"], ODD, "cuDNN", ""),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.newest
@pytest.mark.parametrize(
    ("target", "name"), [*MULTIPLIED, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)]
)
def test_what_each_gpu_multiplies_in_fp8(target, name):
    """Every version of JAX gives the same result. Other targets have one of these capabilities."""
    recipe, shape, backend, reason = {**MULTIPLIED, **LONG}[target, name]
    with jax.numpy_rank_promotion("allow"):
        report = audit(*dense_step(*shape, partial(fp8.Fp8DotGeneralOp, recipe=recipe)), target=target)
    assert (report.target, report.device) == (target, GPUS[target].name)
    assert {(g.path, g.role) for g in report.gemms} == {("Dense", r) for r in ("forward", "dgrad", "wgrad")}
    assert report.fp8_flops_share == (not reason)
    assert report.predicted_seconds["total"] > 0
    for gemm in report.gemms:
        assert backend in ("", gemm.backend)
        assert gemm.is_fp8 == (not reason)
        assert reason in gemm.reason


@pytest.mark.newest
def test_experts_on_an_h200(gpu):
    """Our kernel for experts compiles on every version of JAX that can write it."""
    op = fp8.Fp8RaggedDotOp(recipe=fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3))
    args = struct(512, 128), struct(4, 128, 256), struct(4, dtype=jnp.int32)
    report = audit(partial(op.apply, {}), *args)
    assert [(gemm.backend, gemm.is_fp8) for gemm in report.gemms] == [("Pallas", True)]


# assert_fp8, and errors.


def test_assert_fp8():
    args = (jnp.dot, struct(64, 64), struct(64, 64))
    report = assert_fp8(*args, min_flops=0.0, target="local")
    assert report.num_gemms == 1
    assert report.gemms[0].reason.startswith("operands are")
    with pytest.raises(AssertionError) as info:
        assert_fp8(*args, target="local")
    assert str(info.value).endswith(str(report))
    with pytest.raises(AssertionError, match="0 of 0 GEMMs"):
        assert_fp8(jnp.negative, struct(8), target="local")
    for share in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="min_flops"):
            assert_fp8(*args, min_flops=share, target="local")


def test_programs_that_are_compiled_already():
    x = struct(16, 16)
    lowered = jax.jit(jnp.dot).lower(x, x)
    for program in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match="Pass the function that was lowered"):
            fp8.audit(program, x, x, target="local")


def test_targets_that_cannot_be_audited(monkeypatch):
    with pytest.raises(ValueError, match="h200"):
        audit(jnp.dot, struct(4, 4), struct(4, 4), target="h20")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="tpu", device_kind="TPU v6")])
    with pytest.raises(ValueError, match="CPUs and GPUs"):
        audit(jnp.dot, struct(4, 4), struct(4, 4), target="local")


def test_missing_plugin(monkeypatch):
    def refuse(**_):
        raise NotImplementedError("topology not implemented for cuda")

    topologies = importlib.import_module("jax.experimental.topologies")
    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(ImportError, match=r"pip install .*JAX_PLATFORMS=cpu"):
        compiling._device.__wrapped__("h200")
