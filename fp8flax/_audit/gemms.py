"""Describes the GEMMs of a compiled program for the audit: whether each runs in FP8, and if not, why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from fp8flax._audit.compiling import Target, compiles_algorithms
from fp8flax._audit.dots import Dot
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

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "bool",
}

_MAY_BE_FP8 = (
    "FP8 operands, and no accumulation that makes XLA use cublasLt: in a Triton kernel the tile decides "
    "whether FP8 units multiply them, and XLA chooses it by measuring on the device"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedGemm:
    """One matrix product (GEMM) of a compiled program: a row of ``AuditReport.gemms``.

    A convolution counts as the GEMM of its windows with its kernel.
    """

    path: str
    """The modules and named scopes around the GEMM: ``Transformer/block_0/up``; ``""`` if unknown."""
    role: str
    """``forward``, ``recomputed forward``, ``dgrad``, ``wgrad`` or ``backward``.

    ``recomputed forward`` is a GEMM under ``jax.checkpoint``. ``backward`` is either of the two gradients
    if they cannot be distinguished, as in products of two activations."""
    batch: int
    """Number of independent products; 1 for a layer."""
    m: int
    """Rows of the left operand in the GPU kernel. XLA may have swapped the operands."""
    k: int
    """Length of the sum, including the padding that XLA adds to some odd sizes."""
    n: int
    """Columns of the right operand."""
    lhs_dtype: str
    """Dtype of the left operand as it is multiplied, by JAX's name, such as ``float8_e4m3fn``."""
    rhs_dtype: str
    """Dtype of the right operand as it is multiplied."""
    out_dtype: str
    """Dtype of the result. It is float32 if XLA splits the sum and adds the parts in a later kernel."""
    backend: str
    """``cublasLt``, ``cuBLAS``, ``Triton``, ``cuDNN``, ``Pallas`` or ``other``.

    ``Pallas`` is a GPU kernel of this package. ``other`` is a plain loop."""
    accumulation: str
    """``fast`` or ``exact`` if the program states it (cublasLt in FP8), otherwise ``default``."""
    is_fp8: bool
    """Whether FP8 units compute the GEMM; False if that is uncertain, see ``may_be_fp8``."""
    reason: str
    """Why FP8 units do not compute the GEMM, or why that is uncertain; ``""`` if they do."""
    trip_count: int
    """How often the GEMM runs per call: the product of the trip counts of the loops around it."""
    bytes: int
    """Bytes that the GPU kernel reads and writes, over all trips."""
    op_name: str
    """JAX's full name of the operation, including what ``path`` leaves out."""
    may_be_fp8: bool = False
    """Whether FP8 units may compute the GEMM on the device.

    This concerns FP8 operands in XLA's Triton kernels. Small tiles multiply them in float16 on some GPUs.
    """

    @property
    def flops(self) -> int:
        """Returns the floating-point operations over all trips: two per multiply and add."""
        return 2 * self.batch * self.m * self.k * self.n * self.trip_count


def is_without_triton(program: Summary, target: Target) -> bool:
    """Returns whether a program was compiled without XLA's Triton GEMMs, see ``compile_lowered``."""
    dots = (dot for kernel in program.kernels for dot in kernel.dots)
    return target.gpu is not None and not compiles_algorithms() and any(map(_is_for_cublaslt, dots))


def _is_for_cublaslt(dot: Dot) -> bool:
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
            reason = _MAY_BE_FP8 if may_be_fp8 else why_not(dot, program.has_fp8, target)
            gemms.append(
                AuditedGemm(
                    path=path_of(dot.op_name),
                    # The batched products of attention contract any dimensions.
                    role=role_of(dot.op_name, dot.contracts_leading if dot.batch == 1 else None),
                    batch=dot.batch,
                    m=dot.m,
                    k=dot.k,
                    n=dot.n,
                    backend=dot.backend,
                    op_name=dot.op_name,
                    lhs_dtype=_dtype(dot.lhs_dtype),
                    rhs_dtype=_dtype(dot.rhs_dtype),
                    out_dtype=_dtype(dot.out_dtype),
                    accumulation="default" if may_be_fp8 else dot.accumulation,
                    is_fp8=is_fp8,
                    reason="" if is_fp8 else reason,
                    trip_count=kernel.trip_count,
                    # If a kernel computes several products, its bytes count for the first one.
                    bytes=0 if i else kernel.bytes * kernel.trip_count,
                    may_be_fp8=may_be_fp8,
                )
            )
    return tuple(gemms)


def _takes_fp8(dot: Dot) -> bool:
    """Returns whether FP8 units compute a product if the device has them; for Triton, whether they may."""
    if dot.backend == "other":
        return False
    return dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8")


def _dtype(name: str) -> str:
    """Returns the name that JAX has for an XLA dtype."""
    if name.startswith("f8"):
        return "float8_" + name[2:]
    return _DTYPES.get(name, re.sub(r"^([su])(\d+)$", lambda m: f"{'u' * (m[1] == 'u')}int{m[2]}", name))


def why_not(dot: Dot, has_fp8: bool, target: Target) -> str:
    """Returns the reason why a product does not run in FP8."""
    dtypes = " and ".join(dict.fromkeys((_dtype(dot.lhs_dtype), _dtype(dot.rhs_dtype))))
    parts = [*components(dot.op_name)]
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
        dropped = "" if has_fp8 else " (XLA left out even the rounding to FP8)"
        return f"quantize-dequantize pattern not matched: multiplied in {dtypes}{dropped}"
    if any(dot.fp8_sources):
        return f"only one operand comes from FP8: multiplied in {dtypes}"
    if dot.batch > 1 and not dot.is_convolution:
        return f"operands are {dtypes}: batched product (attention, or an einsum layer not converted)"
    return f"operands are {dtypes}: layer not converted"


_WRAPPERS = frozenset(
    (
        "checkpoint",
        "closed_call",
        "core_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "eval_jaxpr",
        "pjit",
        "remat",
        "remat2",
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


def components(op_name: str) -> Iterator[str]:
    """Yields the parts of an op name, also those inside of ``jvp(…)``, but not those of ``jit(…)``."""
    for part in re.findall(r"(?:[^/()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))+", op_name):
        wrapped = re.fullmatch(r"(\w+)\((.*)\)", part)
        if wrapped is None:
            yield part
        elif wrapped[1] not in ("jit", "pjit"):
            yield from components(wrapped[2])


def path_of(op_name: str) -> str:
    """Returns the modules and scopes in an op name, without transformations, control flow and FP8 op."""
    # Under jax.checkpoint JAX names the root twice.
    op_name = re.sub(r"transpose\(jvp\(([^()]+)\)\)/jvp\(\1\)", r"transpose(jvp(\1))", op_name)
    *parts, _ = [*components(op_name)] or [""]
    kept: list[str] = []
    for part in parts:
        if part in _ROLES or part in (SWITCHED_OFF, KEPT_WIDE, CONVOLVED_WIDE):
            break  # the parts that follow are inside the FP8 matmul
        if part in _WRAPPERS or re.fullmatch(r"(Fp8|NANOOFp8)\w*(Dot|Conv)\w*_\d+", part):
            continue
        if (kept[-1:] == ["while"] and part in ("body", "cond")) or (
            kept[-1:] == ["cond"] and re.fullmatch(r"branch_\d+_fun", part)
        ):
            kept.pop()
        else:
            kept.append(part)
    return "/".join(kept)


def role_of(op_name: str, contracts_leading: bool | None = None) -> str:
    """Returns the role of a GEMM; ``backward`` if it is not known which gradient it is.

    Args:
        op_name: the name of the operation. Those of FP8 ops contain the role.
        contracts_leading: as in ``Dot``. For a layer in a wide dtype, wgrad sums over the first dimensions
            of the operands, and dgrad over the last ones.
    """
    *parts, _ = [*components(op_name)] or [""]
    scope = next((_ROLES[part] for part in reversed(parts) if part in _ROLES), "")
    if scope in ("dgrad", "wgrad"):
        return scope
    if "rematted_computation" in parts:
        return "recomputed forward"
    if "transpose(" not in op_name or scope == "forward":
        return "forward"
    return "backward" if contracts_leading is None else "wgrad" if contracts_leading else "dgrad"
