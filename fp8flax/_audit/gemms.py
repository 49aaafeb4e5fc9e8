"""Describes the GEMMs of a compiled program for the audit: whether each runs in FP8, and if not, why."""

from __future__ import annotations

import dataclasses
import re

from fp8flax._audit.compiling import Target, compiles_algorithms
from fp8flax._audit.dots import AuditedGemm
from fp8flax._audit.kernels import Summary
from fp8flax._core.names import (
    BY_OP,
    CHOSEN_WIDE,
    CONVOLVED_WIDE,
    CUBLASLT,
    DGRAD,
    FORWARD,
    KEPT_WIDE,
    NOT_CONVERTED,
    SWITCHED_OFF,
    WGRAD,
    WITHOUT_UNITS,
)

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}

_MAY_BE_FP8 = (
    "FP8 operands, and no accumulation that makes XLA use cublasLt: in a Triton kernel the tile decides "
    "whether FP8 units multiply them, and XLA chooses it by measuring on the device"
)


def is_without_triton(program: Summary, target: Target) -> bool:
    """Returns whether a program was compiled without XLA's Triton GEMMs, see ``compile_lowered``."""
    dots = (dot for kernel in program.kernels for dot in kernel.dots)
    return target.gpu is not None and not compiles_algorithms() and any(map(_is_for_cublaslt, dots))


def _is_for_cublaslt(dot: AuditedGemm) -> bool:
    return CUBLASLT in dot.op_name.split("/")


def read_gemms(program: Summary, target: Target) -> tuple[AuditedGemm, ...]:
    """Returns the GEMMs of a program, compiled for ``target``, in the order of its kernels."""
    without_triton = is_without_triton(program, target)
    gemms = []
    for kernel in program.kernels:
        for i, dot in enumerate(kernel.dots):
            takes_fp8 = target.has_fp8_units and _takes_fp8(dot)
            may_be_fp8 = takes_fp8 and (
                dot.backend == "Triton"
                # With Triton, XLA would have given it this GEMM.
                or (without_triton and dot.backend == "cublasLt" and not _is_for_cublaslt(dot))
            )
            is_fp8 = takes_fp8 and not may_be_fp8
            reason = _MAY_BE_FP8 if may_be_fp8 else why_not(dot, target)
            gemms.append(
                dataclasses.replace(
                    dot,
                    path=path_of(dot.op_name),
                    role=role_of(dot.op_name),
                    lhs_dtype=_dtype(dot.lhs_dtype),
                    rhs_dtype=_dtype(dot.rhs_dtype),
                    out_dtype=_dtype(dot.out_dtype),
                    accumulation="default" if may_be_fp8 else dot.accumulation,
                    is_fp8=is_fp8,
                    may_be_fp8=may_be_fp8,
                    reason="" if is_fp8 else reason,
                    trip_count=kernel.trip_count,
                    # If a kernel computes several products, its bytes count for the first one.
                    bytes=0 if i else kernel.bytes * kernel.trip_count,
                )
            )
    return tuple(gemms)


def _takes_fp8(dot: AuditedGemm) -> bool:
    """Returns whether FP8 units compute a product if the device has them; for Triton, whether they may."""
    if dot.backend == "other":
        return False
    return dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8")


def _dtype(name: str) -> str:
    """Returns the name that JAX has for an XLA dtype of floats; other names are XLA's."""
    return "float8_" + name[2:] if name.startswith("f8") else _DTYPES.get(name, name)


def why_not(dot: AuditedGemm, target: Target) -> str:
    """Returns the reason why a product does not run in FP8."""
    dtypes = " and ".join(dict.fromkeys((_dtype(dot.lhs_dtype), _dtype(dot.rhs_dtype))))
    parts = components(dot.op_name)
    is_op = any(part.startswith(("Fp8", "NANOOFp8")) for part in parts)
    for scope, reason in CHOSEN_WIDE.items():
        if scope in parts:
            return reason.format(dtypes=dtypes)
    if not target.has_fp8_units and (is_op or any(dot.fp8_sources)):
        device = "the CPU" if target.platform == "cpu" else "this GPU"
        return f"{device} has no FP8 units; the values are emulated"
    for scope, reason in WITHOUT_UNITS.items():
        if scope in parts:
            return reason.format(dtypes=dtypes)
    if dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8"):
        return "operands are FP8, but the product is computed in a plain loop, without the FP8 units"
    if dot.fp8_sources == ("f8e5m2", "f8e5m2"):
        return f"e5m2×e5m2 is not supported by cublasLt; multiplied in {dtypes}"
    if is_op or all(dot.fp8_sources):
        return f"quantize-dequantize pattern not matched: multiplied in {dtypes}"
    if any(dot.fp8_sources):
        return f"only one operand comes from FP8: multiplied in {dtypes}"
    or_batched = ", or a batched product (attention)" if dot.batch > 1 else ""
    return f"operands are {dtypes}: layer not converted{or_batched}"


_WRAPPERS = frozenset(
    (
        "checkpoint",
        "closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "eval_jaxpr",
        "pjit",
        "rematted_computation",
        "shard_map",
        "vmap",
        BY_OP,
        NOT_CONVERTED,
    )
)
"""Components of an op name that JAX and ``quantize_model`` add; they are no modules."""

_ROLES = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad"}
"""The roles of GEMMs by the scopes in which the FP8 matmul computes them."""


def components(op_name: str) -> list[str]:
    """Returns the parts of an op name, also those inside of ``jvp(…)``, but not those of ``jit(…)``."""
    op_name = re.sub(r"\bp?jit\((?:[^()]|\([^()]*\))*\)", "", op_name)
    return [part for part in re.sub(r"\w+\(|\)", "", op_name).split("/") if part]


def path_of(op_name: str) -> str:
    """Returns the modules and scopes in an op name, without transformations, control flow and FP8 op."""
    # Under jax.checkpoint JAX names the root twice.
    op_name = re.sub(r"transpose\(jvp\(([^()]+)\)\)/jvp\(\1\)", r"transpose(jvp(\1))", op_name)
    path = "/".join(components(op_name)[:-1])
    kept: list[str] = []
    for part in re.sub(r"\b(while/(body|cond)|cond/branch_\d+_fun)\b", "", path).split("/"):
        if part in _ROLES or part in (SWITCHED_OFF, KEPT_WIDE, CONVOLVED_WIDE):
            break  # the parts that follow are inside the FP8 matmul
        if part and part not in _WRAPPERS and not re.fullmatch(r"(Fp8|NANOOFp8)\w*(Dot|Conv)\w*_\d+", part):
            kept.append(part)
    return "/".join(kept)


def role_of(op_name: str) -> str:
    """Returns the role of a GEMM. The scopes of FP8 ops distinguish its two gradients."""
    parts = components(op_name)
    role = next((_ROLES[part] for part in reversed(parts) if part in _ROLES), "")
    if role in ("dgrad", "wgrad"):
        return role
    if "rematted_computation" in parts:
        return "recomputed forward"
    return "backward" if "transpose(" in op_name and not role else "forward"
