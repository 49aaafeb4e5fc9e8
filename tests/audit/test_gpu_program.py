"""Programs that XLA compiles for an NVIDIA H200 have the expected GPU kernels; no GPU is needed."""

import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._audit.program import parse
from fp8flax._core.gemm.quantize_blocks import block_quantize
from fp8flax._core.names import BLOCK_QUANTIZE
from tests.cases import OWG, dense_step, fp8_dot_general, struct
from tests.gpus import compiled_for_gpus

pytestmark = pytest.mark.usefixtures("gpu")

MIB = 2**20


compiled = partial(compiled_for_gpus, "h200")


def audit_of_dense(shape, **options):
    with jax.numpy_rank_promotion("allow"):
        return fp8.audit(*dense_step(*shape, partial(fp8.Fp8DotGeneralOp, **options)))


@pytest.mark.newest
def test_three_of_three_gemms_of_a_dense_layer(texts):
    report = audit_of_dense((8192, 4096, 4096))
    assert [report.num_fp8_gemms, report.num_gemms, report.fp8_flops_share] == [3, 3, 1.0]
    found = {g.role: (g.path, g.lhs_dtype, g.rhs_dtype, g.backend, g.accumulation) for g in report.gemms}
    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    assert found == {
        "forward": ("Dense", e4m3, e4m3, "cublasLt", "fast"),
        "dgrad": ("Dense", e5m2, e4m3, "cublasLt", "exact"),
        "wgrad": ("Dense", e4m3, e5m2, "cublasLt", "exact"),
    }
    # The op makes the metas of three states by itself, each in kernels of its own.
    assert report.num_kernels <= 24
    assert report.gemm_bytes + report.other_bytes < 737 * MIB  # 816 for Flax's op with this backend
    # cublasLt multiplies by the scale before it rounds, so no scale is rounded to the result's dtype.
    assert len(scales_of_gemms(texts[0])) == 3
    assert "= bf16[] convert(" not in texts[0]


def scales_of_gemms(program):
    """Returns the operands that cublasLt multiplies by, of the GEMMs in FP8; all are float32 numbers."""
    calls = re.findall(r"custom-call\(([^)]*)\), custom_call_target=\"__cublas\$lt\$matmul\$f8\"", program)
    scales = [call.split(", ")[2] for call in calls]
    for scale in scales:
        assert re.search(rf"(?m)^ *{re.escape(scale)} = f32\[\]", program)
    return scales


def test_the_quantize_dequantize_form_runs_none_in_fp8(texts):
    """The audit reports that no GEMM runs in FP8, and the reason (row 17 of Flax's defects).

    XLA drops a cast to FP8 and back as excess precision, unless an operation is between the two.
    """
    report = audit_of_dense((256, 128, 512), form="qdq")
    assert [report.num_fp8_gemms, report.num_gemms] == [0, 3]
    assert all(g.reason.startswith("quantize-dequantize pattern not matched") for g in report.gemms)
    assert "f8e4m3fn[256,128]" in texts[0]
    assert "f8e5m2[256,512]" in texts[0]


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize("name", ["a sum in parts", "experts"])
def test_every_scale_is_applied_in_float32(name, texts):
    """Also where cublasLt does not take it in: after a sum in parts, and with a scale per expert."""
    axes = {"variable_axes": {"params": 0, OWG: 0}, "split_rngs": {"params": True}}
    make, x = {
        "a sum in parts": (partial(nn.Dense, 768), struct(16384, 768)),
        "experts": (partial(nn.vmap(nn.Dense, **axes), 512), struct(8, 256, 512)),
    }[name]
    layer = make(use_bias=False, dtype=jnp.bfloat16, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def step(variables, x, g):
        out, vjp = jax.vjp(layer.apply, variables, x)
        return out, vjp(g)

    report = fp8.audit(step, variables, x, jax.eval_shape(layer.apply, variables, x))
    (text,) = texts
    assert {(g.backend, g.is_fp8, g.flops) for g in report.gemms} == {("cublasLt", True, report.flops // 3)}
    assert not re.findall(r"= bf16\[[\d,]*\]\S* (?:multiply|divide)\(", text)
    assert not re.findall(r"= bf16\[8?\]\S* convert\(", text)
    scales = scales_of_gemms(text)
    taken_in = [scale for scale in scales if "constant" not in scale]
    divided = re.findall(r"= f32\[([\d,]*)\]\S* divide\(.*fp8_(?:forward|dgrad|wgrad)/", text)
    # Results, and not the reciprocals of scales: one, or one for each expert.
    whole = [dims for dims in divided if math.prod(map(int, filter(None, dims.split(",")))) > 8]
    assert len(taken_in) + len(whole) == len(scales) == 3


@pytest.mark.long
def test_kernels_are_quantized_once_for_all_microbatches():
    """XLA does not move the casts back into the loop over 5 microbatches."""
    model, x = nn.Dense(384, dtype=jnp.bfloat16, dot_general_cls=fp8.Fp8DotGeneralOp), struct(5, 640, 256)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x[0]), x)
    step = fp8.accumulate_gradients(lambda v, x: jnp.mean(model.apply(v, x).astype(jnp.float32) ** 2))
    casts = Counter()
    for kernel in parse(compiled(jax.jit(step), variables, x)).kernels:
        fused = kernel.fused
        for inner in fused.instructions.values() if fused else ():
            if inner.opcode == "convert" and inner.result.dtype == "f8e4m3fn":
                casts[inner.result.size] += kernel.trip_count
    assert 1 <= casts[256 * 384] <= 2
    assert casts[640 * 256] >= 5


def test_the_host_changes_nothing(monkeypatch):
    """The host may have an old GPU, or several; the ambient precision of matmuls does not matter."""
    layer = 512, 256, 256, fp8.Fp8DotGeneralOp
    expected = compiled(*dense_step(*layer))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    with jax.default_matmul_precision("BF16_BF16_F32"):
        assert compiled(*dense_step(*layer)) == expected


@pytest.mark.newest
def test_blackwell_under_vmap():
    def dot(x, w):
        return fp8_dot_general(x, w, (((1,), (0,)), ((), ())), recipe=fp8.MXFP8BlockScaling())

    def fn(x, w, xs, ws):
        return jax.vmap(dot, (0, None))(xs, w), jax.vmap(dot, (None, 0))(x, ws)

    args = struct(128, 64), struct(64, 96), struct(4, 128, 64), struct(4, 64, 96)
    report = fp8.audit(fn, *args, target="b200")
    assert [(g.backend, g.is_fp8) for g in report.gemms] == [("cuDNN", True)] * 2


@pytest.mark.newest
@pytest.mark.parametrize(
    ("target", "num_fp4"),
    [("b200", 3), *(pytest.param(*row, marks=pytest.mark.long) for row in (("rtx5090", 3), ("h200", 0)))],
)
def test_nvfp4(target, num_fp4):
    """Blackwell multiplies FP4. Two passes over a tensor make its codes, also those of the rotated one."""

    def step(x, w, g, key):
        dot = partial(fp8_dot_general, recipe=fp8.NVFP4BlockScaling(), key=key)
        y, vjp = jax.vjp(lambda x, w: dot(x, w, (((1,), (0,)), ((), ()))), x, w)
        return y, vjp(g)

    args = struct(8192, 4096), struct(4096, 4096), struct(8192, 4096), jax.random.key(0)
    report = fp8.audit(step, *args, target=target)
    assert [report.num_fp4_gemms, report.num_fp8_gemms, report.num_gemms] == [num_fp4, 0, 3]
    if num_fp4:
        assert {g.backend for g in report.gemms} == {"cuDNN"}
        assert report.other_bytes < 1310 * MIB  # 320 of them for the scales of the tensors
        assert report.num_kernels <= 64
    else:
        assert {(g.lhs_dtype, *g.fp8_sources) for g in report.gemms} == {
            ("bfloat16", *["float4_e2m1fn"] * 2)
        }
        assert all("these codes and scales" in g.reason for g in report.gemms)


def test_what_the_user_keeps_wide_is_said():
    recipe = fp8.Float8CurrentScaling(high_precision_wgrad=True)
    step, *args = dense_step(64, 32, 48, partial(fp8.Fp8DotGeneralOp, recipe=recipe))

    def both(*args):
        on = step(*args)
        with fp8.autocast(enabled=False), jax.named_scope("off"):
            return on, step(*jax.tree.map(lambda x: x + x, args))

    with jax.numpy_rank_promotion("allow"):
        report = fp8.audit(both, *args)
    wide = {(g.path, g.role): g.reason for g in report.gemms if not g.is_fp8}
    kept = wide.pop(("Dense", "wgrad"))
    assert kept.startswith("the recipe keeps an operand of this GEMM wide")
    assert set(wide) == {("off/Dense", "forward"), ("off/Dense", "backward")}
    assert all(reason.startswith("FP8 is off here, by autocast") for reason in wide.values())
    assert {g.role for g in report.gemms if g.is_fp8} == {"forward", "dgrad"}


def run(script, **env):
    """Returns what a process prints that compiles for a GPU."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0", **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


# Until JAX 0.11 the instruction takes no operands of two dtypes.
FOR_EXPERTS = fp8.DelayedScaling(
    fp8_format=fp8.Format.HYBRID if jax.__version_info__ >= (0, 11) else fp8.Format.E4M3
)


def experts_step(rows, num_experts, depth, columns, dtype=jnp.bfloat16, recipe=FOR_EXPERTS):
    """A ragged dot and both of its gradients."""
    op = fp8.Fp8RaggedDotOp(recipe=recipe)
    args = struct(rows, depth, dtype=dtype), struct(num_experts, depth, columns, dtype=dtype)
    args = *args, jax.ShapeDtypeStruct((num_experts,), jnp.int32)
    variables = jax.eval_shape(op.init, jax.random.key(0), *args)

    def step(variables, g, *args):
        out, vjp = jax.vjp(op.apply, variables, *args)
        return out, vjp(g)

    return step, variables, struct(rows, columns, dtype=dtype), *args


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "launches", "mib"),
    [
        (FOR_EXPERTS, 37, 1200),
        (fp8.Float8BlockScaling(), 24, 1220),
    ],
    ids=["delayed", "blocks"],
)
def test_experts_on_hopper(recipe, launches, mib):
    """Each of the three products is one GPU kernel for all experts; a loop over tiles launches 486."""
    report = fp8.audit(*experts_step(8192, 8, 4096, 2048, recipe=recipe))
    assert report.num_fp8_gemms == report.num_gemms == 3
    assert report.num_launches <= launches
    assert report.gemm_bytes + report.other_bytes <= mib * MIB
    needed = 3 * 2 * 8192 * 4096 * 2048
    assert needed <= sum(2 * g.m * g.k * g.n for g in report.gemms) <= 1.1 * needed


@pytest.mark.long
def test_kernels_for_experts_of_any_size_compile():
    recipe = fp8.Float8BlockScaling(use_f32_scales=True)
    report = fp8.audit(*experts_step(100, 5, 200, 72, jnp.float32, recipe=recipe))
    assert report.num_fp8_gemms == report.num_gemms == 3


# Both kinds of operands: one scale for 128 rows of the right one, and one for each.
ON_HOPPER = """
import functools, jax, jax.numpy as jnp
from fp8flax._audit.compiling import compile_for, find_target
from tests.cases import hopper_gemm

def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)

for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
    for rows in (4, 512):
        codes = of(1, 512, 1024, dtype=dtype), of(1, 512, 1024, dtype=dtype)
        f = functools.partial(hopper_gemm, out_dtype=jnp.bfloat16)
        compile_for(find_target("h200"), f, (*codes, of(1, 512, 8), of(1, rows, 8)))
"""
FOR_EXPERTS_ON_HOPPER = """
from tests.audit.test_gpu_program import experts_step
from fp8flax._audit.compiling import compile_for, find_target

step, *args = experts_step(512, 4, 256, 512)
compile_for(find_target("h200"), step, args)
"""


@pytest.mark.long
@pytest.mark.parametrize(("script", "kernels"), [(ON_HOPPER, 4), (FOR_EXPERTS_ON_HOPPER, 3)])
def test_hoppers_kernels_multiply_in_fp8_and_spill_no_register(script, kernels):
    found = [path for root in sys.path for path in Path(root).glob("nvidia/*/bin/nvdisasm")]
    disassembler = {"MOSAIC_GPU_DUMP_SASS": "1", "CUDA_ROOT": str(found[0].parent.parent)} if found else {}
    said = run(script, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1", **disassembler)
    multiplications = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", said)
    assert all(re.fullmatch(r"m64n128k32\.f32\.e\dm\d\.e\dm\d", one) for one in multiplications)
    assert len(multiplications) == kernels * 4
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert set(spills) == {"0"}
    assert len(spills) == 2 * kernels
    if disassembler:
        assert len(re.findall(r"\bQGMMA\.64x128x32\.F32\.E\dM\d\.E\dM\d", said)) == kernels * 4
        assert "STL" not in said  # stores to memory that stand in for a register


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_that_quantizes_blocks_compiles(dtype):
    """Shapes with and without partial blocks compile; the assembler once crashed on float32 tiles."""
    for shape in ((1, 256, 512), (2, 200, 300)):
        for rows, scale in ((1, "power_of_two"), (128, "power_of_two"), (128, "float32")):
            quantizer = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(rows, 128), scale=scale)
            f = partial(block_quantize, quantizer=quantizer, inf_is_nan=scale == "power_of_two")
            assert BLOCK_QUANTIZE in compiled(f, struct(*shape, dtype=dtype))


@pytest.mark.long
@pytest.mark.parametrize("use_f32_scales", [False, True])
def test_a_layer_with_block_scales_on_hopper(use_f32_scales):
    """Each tensor is read once and quantized for both of its GEMMs, which run in FP8."""
    recipe = fp8.Float8BlockScaling(use_f32_scales=use_f32_scales)
    report = audit_of_dense((8192, 4096, 4096), recipe=recipe)
    assert report.fp8_flops_share == 1
    assert report.maybe_fp8_flops_share == 0
    assert [(g.m, g.k, g.n) for g in report.gemms if g.role == "wgrad"] == [(4096, 8192, 4096)]
    assert report.num_launches <= 8
    assert (report.gemm_bytes + report.other_bytes) / 2**20 <= 660


@pytest.mark.long
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_gelu_of_a_result_that_is_used_otherwise_too(is_mapped):
    """XLA would fuse the gelu and also return its argument, which cublasLt cannot do in FP8."""
    layer = nn.Dense(256, dtype=jnp.bfloat16, dot_general_cls=fp8.Fp8DotGeneralOp)
    x = struct(64, 32, 256) if is_mapped else struct(2048, 256)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def twice(variables, x):
        y = layer.apply(variables, x)
        return y, nn.gelu(y)

    report = fp8.audit(jax.vmap(twice, (None, 0)) if is_mapped else twice, variables, x)
    assert report.num_fp8_gemms == report.num_gemms > 0
