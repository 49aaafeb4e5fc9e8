"""The report as text and as numbers, of GEMMs that are given."""

import dataclasses
import json

import pytest

from fp8flax import AuditedGemm, AuditReport
from fp8flax._audit.times import Rates

MIB = 2**20
GEMM = AuditedGemm(
    path="M/up",
    batch=1,
    m=64,
    k=32,
    n=16,
    lhs_dtype="float8_e4m3fn",
    rhs_dtype="float8_e4m3fn",
    out_dtype="bfloat16",
    backend="cublasLt",
    accumulation="fast",
    units="FP8",
    trip_count=8,
    bytes=3 * MIB,
    op_name="jit(f)/M/up/dot_general",
)
WIDE = {"lhs_dtype": "bfloat16", "rhs_dtype": "bfloat16", "units": "", "reason": "a < b"}
OTHER = dataclasses.replace(
    GEMM,
    path="<b>",
    batch=4,
    role="backward",
    backend="Triton",
    accumulation="default",
    trip_count=2,
    **WIDE,
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
    code_bytes=MIB // 8,
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
        "Predicted (not measured): 0.0815 ms; GEMMs 0.00151, other kernels 0.000153, launches 0.0798.\n"
        "The prediction takes the rates that one H200 reached.\n"
        "Compiled without the device, which might choose another backend after measuring."
    )


def test_what_is_said_where_it_is_so():
    report = dataclasses.replace(
        REPORT,
        target="local",
        compiled_by="JAX without Triton.",
        bytes_sent_by={"all-gather": MIB, "all-reduce": 2 * MIB},
        unknown_trip_counts=True,
    )
    assert report.bytes_sent == 3 * MIB
    assert hash(report) == hash(report)
    lines = str(report).splitlines()
    assert lines[-3:] == [
        "Each device sends 3.0 MiB; all-gather 1.0 MiB, all-reduce 2.0 MiB.",
        "The trip count of a loop is not known, so its kernels count once.",
        "Compiled by JAX without Triton.",
    ]
    assert report.predicted_seconds == {}
    assert json.loads(json.dumps(dataclasses.asdict(report)))["gemms"][1]["reason"] == "a < b"


def test_fp8_operands_in_triton_only_may_run_in_fp8():
    triton = dataclasses.replace(GEMM, units="maybe FP8", backend="Triton", reason="the tile")
    report = dataclasses.replace(REPORT, gemms=(GEMM, triton, triton, OTHER))
    assert (report.num_fp8_gemms, report.fp8_flops_share, report.maybe_fp8_flops_share) == (1, 0.25, 0.5)
    assert report.summary == (
        "1 of 4 GEMMs run in FP8 (25.0 % of their FLOPs), 2 may (50.0 %), on NVIDIA H200, JAX 0.0."
    )
    assert "25.0     may [1]\n" in str(report)


def test_predicted_time():
    """By hand: each GEMM at its share of the peak or of 4.8 TB/s, the other kernels, and the launches."""
    rates, bandwidth = Rates(), 4.8e12
    large = dataclasses.replace(GEMM, m=8192, k=8192, n=8192, trip_count=2)
    flops = 2 * 2 * 8192**3 * 4**rates.slowdown  # four times the smallest that was measured
    chosen = {"units": "maybe FP8", "accumulation": "default"}
    for gemm, seconds in (
        (large, flops / (1979e12 * rates.fast)),
        (dataclasses.replace(large, accumulation="exact"), flops / (1979e12 * rates.exact)),
        (dataclasses.replace(large, backend="Pallas"), flops / (1979e12 * rates.blocks)),
        (dataclasses.replace(large, **chosen), flops / (1979e12 * rates.exact)),
        (dataclasses.replace(large, **WIDE), flops / (989e12 * rates.wide)),
        (dataclasses.replace(large, **{**WIDE, "lhs_dtype": "float32"}), 2 * flops / (989e12 * rates.wide)),
        (GEMM, GEMM.bytes / (bandwidth * rates.bandwidth)),
    ):
        predicted = dataclasses.replace(REPORT, gemms=(gemm,)).predicted_seconds
        others = 3 * MIB / 8 / rates.bandwidth + MIB / 8 / rates.codes
        parts = [seconds, others / bandwidth, 21 * rates.launch]
        assert list(predicted.values()) == pytest.approx([*parts, sum(parts)])
        assert list(predicted) == ["GEMMs", "other kernels", "launches", "total"]


def test_a_gpu_that_was_not_measured():
    text = str(dataclasses.replace(REPORT, target="b200"))
    assert "The prediction takes the shares of the published peaks that one H200 reached.\n" in text


def test_fp4():
    in_fp4 = dataclasses.replace(GEMM, units="FP4", backend="cuDNN", accumulation="default")
    report = dataclasses.replace(REPORT, gemms=(in_fp4, GEMM, GEMM), target="b200")
    assert (report.num_fp4_gemms, report.num_fp8_gemms) == (1, 2)
    assert "2 of 3 GEMMs run in FP8 (66.7 % of their FLOPs), 1 in FP4 (33.3 %), on" in report.summary
    assert [line.split()[-1] for line in str(report).splitlines()[2:5]] == ["FP4", "FP8", "FP8"]
    large = dataclasses.replace(in_fp4, m=2**14, k=2**14, n=2**14, bytes=1)
    times = [
        dataclasses.replace(report, gemms=(gemm,)).predicted_seconds["GEMMs"]
        for gemm in (large, dataclasses.replace(large, units="FP8"))
    ]
    assert 1.9 < times[1] / times[0] < 2.1
