"""The GEMMs of a compiled program as the audit shows them: whether each runs in FP8, and why not."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from fp8flax._core.names import BLOCK_GEMM_F16, CHOSEN_WIDE, WITHOUT_UNITS
from fp8flax.audit.dots import Dot
from fp8flax.audit.kernels import Summary
from fp8flax.audit.op_names import components, path_of, role_of

_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "c64": "complex64",
    "c128": "complex128",
    "pred": "bool",
}

_OF_THE_TILE = (
    "FP8 operands in a Triton kernel: which instructions multiply them depends on the tile, which XLA "
    "picks by measuring on the device; the tile that it takes without one has them multiplied in float16"
)
"""Why a product only may run in FP8; seen in the PTX of JAX 0.10.2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditedGemm:
    """One matrix product of a compiled program; a convolution is that of its windows with the kernel."""

    path: str
    """The modules and named scopes around it, such as ``Transformer/block_0/up``; ``""`` if unknown."""
    role: str
    """``forward``, ``dgrad``, ``wgrad``, ``recomputed forward`` (under ``jax.checkpoint``), or ``backward``
    where the two gradients cannot be told apart, as in products of two activations."""
    batch: int
    """Number of independent products; 1 for a layer."""
    m: int
    """Rows of the left operand, as the kernel has it: XLA may have swapped the operands."""
    k: int
    """Length of the sum, with the padding that XLA adds to some odd sizes."""
    n: int
    """Columns of the right operand."""
    lhs_dtype: str
    """Of what is multiplied, as JAX names it, such as ``float8_e4m3fn``."""
    rhs_dtype: str
    out_dtype: str
    """What the kernel writes; float32 where XLA cuts the sum into parts that a later kernel adds up."""
    backend: str
    """``cublasLt``, ``cuBLAS``, ``Triton``, ``cuDNN``, ``Pallas`` (this package's kernel for block
    scales), or ``other``: a plain loop."""
    accumulation: str
    """``fast`` or ``exact`` where the program says so (cublasLt in FP8), else ``default``."""
    is_fp8: bool
    """Whether the FP8 units do it; of FP8 operands in Triton, whether they may: see ``may_be_fp8``."""
    reason: str
    """Why not, or why it only may be; ``""`` where the FP8 units do it."""
    trip_count: int
    """How often it runs per call: the product of the trip counts of the loops around it."""
    bytes: int
    """Bytes that its kernel reads and writes, over all trips."""
    op_name: str
    """JAX's name of the operation, with everything that ``path`` leaves out."""

    @property
    def flops(self) -> int:
        """Two per multiply and add, over all trips."""
        return 2 * self.batch * self.m * self.k * self.n * self.trip_count

    @property
    def may_be_fp8(self) -> bool:
        """Whether it has FP8 operands, and the program does not say what multiplies them.

        So it is in XLA's Triton kernels: the tile decides which instructions they use, and XLA picks it by
        measuring on the device. Compiled without one, they convert the operands to float16.
        """
        return self.is_fp8 and self.backend == "Triton"


def read_gemms(program: Summary, *, platform: str, has_fp8_units: bool) -> tuple[AuditedGemm, ...]:
    """Returns the GEMMs of a program in the order of its kernels.

    Args:
        program: what was read from the text of a compiled program.
        platform: what it was compiled for, such as ``"cuda"`` or ``"cpu"``.
        has_fp8_units: whether that multiplies in FP8.
    """
    gemms, dots = [], []
    for kernel in program.kernels:
        for i, dot in enumerate(kernel.dots):
            is_fp8 = has_fp8_units and _multiplies_fp8(dot)
            if not is_fp8:
                reason = why_not(dot, program.has_fp8, has_fp8_units, platform)
            else:
                reason = _OF_THE_TILE if dot.backend == "Triton" else ""
            gemms.append(
                AuditedGemm(
                    path=path_of(dot.op_name),
                    role=role_of(dot.op_name),
                    batch=dot.batch,
                    m=dot.m,
                    k=dot.k,
                    n=dot.n,
                    lhs_dtype=_dtype(dot.lhs_dtype),
                    rhs_dtype=_dtype(dot.rhs_dtype),
                    out_dtype=_dtype(dot.out_dtype),
                    backend=dot.backend,
                    accumulation=dot.accumulation,
                    is_fp8=is_fp8,
                    reason=reason,
                    trip_count=kernel.trip_count,
                    # Of several products in one kernel, the first stands for what the kernel moves.
                    bytes=0 if i else kernel.bytes * kernel.trip_count,
                    op_name=dot.op_name,
                )
            )
            dots.append(dot)
    return tuple(_tell_gradients_apart(gemms, dots))


def _multiplies_fp8(dot: Dot) -> bool:
    """Tells whether FP8 units, where there are any, do a product; in Triton, whether they may."""
    if dot.backend == "other" or BLOCK_GEMM_F16 in dot.op_name.split("/"):
        return False
    return dot.lhs_dtype.startswith("f8") and dot.rhs_dtype.startswith("f8")


def _dtype(name: str) -> str:
    """Returns JAX's name of an XLA dtype."""
    if name.startswith("f8"):
        return "float8_" + name[2:]
    return _DTYPES.get(name, re.sub(r"^([su])(\d+)$", lambda m: f"{'u' * (m[1] == 'u')}int{m[2]}", name))


def why_not(dot: Dot, has_fp8: bool, has_fp8_units: bool, platform: str) -> str:
    """Says why a product does not run in FP8."""
    dtypes = " and ".join(dict.fromkeys((_dtype(dot.lhs_dtype), _dtype(dot.rhs_dtype))))
    parts = [*components(dot.op_name)]
    is_op = any(part.startswith(("Fp8", "NANOOFp8")) for part in parts)
    for scope, reason in CHOSEN_WIDE.items():
        if scope in parts:
            return reason.format(dtypes=dtypes)
    if not has_fp8_units and (is_op or any(dot.fp8_sources)):
        device = "the CPU" if platform == "cpu" else "this GPU"
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


def _tell_gradients_apart(gemms: Sequence[AuditedGemm], dots: Sequence[Dot]) -> Iterator[AuditedGemm]:
    """Replaces ``backward`` by ``dgrad`` or ``wgrad`` where sizes or contracted dimensions tell.

    With a forward product of sizes M, K, N, dgrad is (M, N) by (N, K) and sums over N, wgrad is (K, M) by
    (M, N) and sums over M. Where that does not decide, a product that sums over the first dimensions of
    both operands is taken for wgrad, one that sums over the last for dgrad; for FP8 in cublasLt, which
    sums over the last only, XLA has transposed the operands.
    """
    forward: dict[str, set[tuple[int, int, int]]] = {}
    for gemm in gemms:
        if gemm.role.endswith("forward"):
            forward.setdefault(gemm.path, set()).add((gemm.m, gemm.k, gemm.n))
    for gemm, dot in zip(gemms, dots):
        if gemm.role != "backward" or gemm.batch > 1:
            yield gemm
            continue
        roles = set()
        for m, k, n in forward.get(gemm.path, ()):
            if gemm.k == n and {gemm.m, gemm.n} == {m, k}:
                roles.add("dgrad")
            if gemm.k == m and {gemm.m, gemm.n} == {k, n}:
                roles.add("wgrad")
        transposed = gemm.is_fp8 and gemm.backend == "cublasLt"
        if len(roles) != 1 and dot.contracts_leading is not None and not transposed:
            roles = {"wgrad" if dot.contracts_leading else "dgrad"}
        yield dataclasses.replace(gemm, role=roles.pop()) if len(roles) == 1 else gemm
