"""A GEMM of a compiled program, as the audit shows it: where it is, and whether and why it runs in FP8."""

from __future__ import annotations

import dataclasses
import re

from fp8flax._audit.compiling import Target
from fp8flax._core import names


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedGemm:
    """One matrix product (GEMM) of a compiled program: a row of ``AuditReport.gemms``.

    A convolution counts as the GEMM of its windows with its kernel, and so do its gradients.
    """

    path: str = ""
    """The modules and named scopes around the GEMM: ``Transformer/block_0/up``; ``""`` if unknown."""
    role: str = "forward"
    """``forward``, ``recomputed forward``, ``dgrad``, ``wgrad`` or ``backward``.

    ``recomputed forward`` is a GEMM under ``jax.checkpoint``. ``backward`` is a gradient of a product
    outside of the FP8 ops."""
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
    accumulation: str = "default"
    """``fast`` or ``exact`` if the program states it (cublasLt in FP8), otherwise ``default``."""
    is_fp8: bool = False
    """Whether FP8 units compute the GEMM; False if that is uncertain, see ``may_be_fp8``."""
    may_be_fp8: bool = False
    """Whether FP8 units may compute the GEMM on the device.

    This concerns FP8 operands in XLA's Triton kernels. Small tiles multiply them in float16 on some GPUs.
    """
    reason: str = ""
    """Why FP8 units do not compute the GEMM, or why that is uncertain; ``""`` if they do."""
    trip_count: int = 1
    """How often the GEMM runs per call: the product of the trip counts of the loops around it."""
    bytes: int = 0
    """Bytes that the GPU kernel reads and writes, over all trips."""
    op_name: str
    """JAX's full name of the operation, including what ``path`` leaves out."""
    fp8_sources: tuple[str, ...] = ("", "")
    """For each operand the FP8 dtype that it has, or that it was converted from; ``""`` for none."""

    @property
    def flops(self) -> int:
        """Returns the floating-point operations over all trips: two per multiply and add."""
        return 2 * self.batch * self.m * self.k * self.n * self.trip_count


_MAY_BE_FP8 = (
    "FP8 operands, and no accumulation that makes XLA use cublasLt: in a Triton kernel the tile decides "
    "whether FP8 units multiply them, and XLA chooses it by measuring on the device"
)


def asks_for_cublaslt(gemm: AuditedGemm) -> bool:
    """Returns whether this package asks for cublasLt, so that Triton does not get the GEMM."""
    return names.CUBLASLT in gemm.op_name.split("/")


def with_reason(gemm: AuditedGemm, target: Target, *, without_triton: bool) -> AuditedGemm:
    """Returns a GEMM with the statement whether FP8 units of ``target`` compute it, and why not.

    ``without_triton`` says whether XLA was not allowed to use its Triton GEMMs, see ``compile_lowered``.
    """
    is_fp8 = target.has_fp8_units and gemm.backend != "other" and _has_fp8_operands(gemm)
    is_tritons = gemm.backend == "Triton" or (
        without_triton and gemm.backend == "cublasLt" and not asks_for_cublaslt(gemm)
    )
    if is_fp8 and is_tritons:
        return dataclasses.replace(gemm, may_be_fp8=True, accumulation="default", reason=_MAY_BE_FP8)
    reason = "" if is_fp8 else _why_not(gemm, target)
    return dataclasses.replace(gemm, is_fp8=is_fp8, reason=reason)


def _has_fp8_operands(gemm: AuditedGemm) -> bool:
    return gemm.lhs_dtype.startswith("float8") and gemm.rhs_dtype.startswith("float8")


def _why_not(gemm: AuditedGemm, target: Target) -> str:
    """Returns the reason why a GEMM does not run in FP8."""
    dtypes = " and ".join(dict.fromkeys((gemm.lhs_dtype, gemm.rhs_dtype)))
    scopes = components(gemm.op_name)
    is_op = any(scope.startswith(("Fp8", "NANOOFp8")) for scope in scopes)
    for scope, reason in names.CHOSEN_WIDE.items():
        if scope in scopes:
            return reason.format(dtypes=dtypes)
    if not target.has_fp8_units and (is_op or any(gemm.fp8_sources)):
        return f"{target.device.device_kind} has no FP8 units; the values are emulated"
    for scope, reason in names.WITHOUT_UNITS.items():
        if scope in scopes:
            return reason.format(dtypes=dtypes)
    if _has_fp8_operands(gemm):
        return "operands are FP8, but the product is computed in a plain loop, without the FP8 units"
    if is_op or all(gemm.fp8_sources):
        return f"quantize-dequantize pattern not matched: multiplied in {dtypes}"
    if any(gemm.fp8_sources):
        return f"only one operand comes from FP8: multiplied in {dtypes}"
    or_batched = ", or a batched product (attention)" if gemm.batch > 1 else ""
    return f"operands are {dtypes}: layer not converted{or_batched}"


_ROLES = {names.FORWARD: "forward", names.DGRAD: "dgrad", names.WGRAD: "wgrad"}
"""The roles of GEMMs by the scopes in which the FP8 matmul computes them."""

_INSIDE = (*_ROLES, names.SWITCHED_OFF, names.KEPT_WIDE, names.CONVOLVED_WIDE)
"""The scopes with which the inside of an FP8 matmul begins."""

_WRAPPERS = (
    r"checkpoint|closed_call|custom_jvp_call|custom_vjp_call|eval_jaxpr|pjit|rematted_computation|shard_map|vmap"
    rf"|{names.BY_OP}|{names.NOT_CONVERTED}|(Fp8|NANOOFp8)\w*(Dot|Conv)\w*_\d+"
)
"""Components of an op name that JAX, ``quantize_model`` and FP8 ops add; they are no modules."""


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
        if part in _INSIDE:
            break
        if part and not re.fullmatch(_WRAPPERS, part):
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
