"""Finds the GEMMs of a compiled program: their sizes, dtypes and names, and why they do not run in FP8."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Literal

from fp8flax._audit.compiling import Target
from fp8flax._audit.program import NARROW, SLICES, VIEWS, Instruction, bytes_moved
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
    units: Literal["FP8", "maybe FP8", "FP4", ""] = ""
    """The units that compute the GEMM; ``""`` for those of a wider dtype.

    ``maybe FP8`` is for FP8 operands in XLA's Triton kernels. Small tiles multiply them in float16 on some
    GPUs."""
    reason: str = ""
    """Why neither FP8 nor FP4 units compute the GEMM, or why that is uncertain; ``""`` if they do."""
    trip_count: int = 1
    """How often the GEMM runs per call: the product of the trip counts of the loops around it."""
    bytes: int = 0
    """Bytes that the GPU kernel reads and writes, over all trips."""
    op_name: str
    """JAX's full name of the operation, including what ``path`` leaves out."""
    fp8_sources: tuple[str, ...] = ("", "")
    """For each operand the FP8 or FP4 dtype that it has, or was converted from; ``""`` for none."""

    @property
    def is_fp8(self) -> bool:
        """Returns whether FP8 units compute the GEMM; False if that is uncertain."""
        return self.units == "FP8"

    @property
    def flops(self) -> int:
        """Returns the floating-point operations over all trips: two per multiply and add."""
        return 2 * self.batch * self.m * self.k * self.n * self.trip_count


_VALUE_KEEPING = VIEWS | SLICES | {"broadcast", "multiply", "divide", "pad"}
"""Instructions that may stand between the conversion from FP8 or FP4 to a wide dtype and the GEMM."""

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def gemms_of(kernel: Instruction) -> Iterator[AuditedGemm]:
    """Yields the products and convolutions of a GPU kernel. The bytes of the kernel count for the first."""
    backend = _backend(kernel)
    for i, dot in enumerate(_multiplying(kernel) if backend else ()):
        lhs, rhs = (operand.result for operand in dot.operands[:2])
        is_convolution = dot.opcode == "convolution" or dot.target.startswith("__cudnn$conv")
        batch, m, k, n = _sizes_of_convolution(dot) if is_convolution else _sizes_of_dot(dot, kernel)
        out = next((array for array in kernel.results if array.size == dot.result.size), dot.result)
        yield AuditedGemm(
            path=path_of(dot.op_name),
            role=role_of(dot.op_name),
            batch=batch,
            m=m,
            k=k,
            n=n,
            lhs_dtype=_name_of(lhs.dtype),
            rhs_dtype=_name_of(rhs.dtype),
            out_dtype=_name_of(out.dtype),
            backend=backend,
            accumulation=_accumulation(dot),
            trip_count=kernel.trip_count,
            bytes=0 if i else bytes_moved(kernel) * kernel.trip_count,
            op_name=dot.op_name,
            fp8_sources=tuple(_name_of(next(_fp8_sources(o), "")) for o in dot.operands[:2]),
        )


def _name_of(dtype: str) -> str:
    """Returns the name that JAX has for an XLA dtype of floats; other names are XLA's."""
    is_narrow = dtype.startswith(NARROW)
    return f"float{dtype[1]}_{dtype[2:]}" if is_narrow else _DTYPES.get(dtype, dtype)


def _backend(kernel: Instruction) -> str:
    """Returns the backend of a kernel; an empty string if it is neither a fusion nor a matrix product."""
    if kernel.fused is not None:
        kind = kernel.config.get("fusion_backend_config", {}).get("kind", "")
        parts = {"triton": "Triton", "cudnn": "cuDNN", "cublas": "cublasLt"}
        return next((backend for part, backend in parts.items() if part in kind), "other")
    if kernel.opcode in ("dot", "convolution"):
        return "other"
    if kernel.target.startswith("mosaic_gpu"):  # no GPU kernel of ours in Triton multiplies
        is_ours = not {names.BLOCK_GEMM_HOPPER, names.GROUPED_GEMM}.isdisjoint(kernel.op_name.split("/"))
        return "Pallas" if is_ours else ""
    libraries = {
        "__cublas$lt$matmul": "cublasLt",
        "__cublas$gemm": "cuBLAS",
        "__cudnn$conv": "cuDNN",
        "__cudnn$blockScaledDot": "cuDNN",
    }
    return next((name for start, name in libraries.items() if kernel.target.startswith(start)), "")


def _multiplying(instruction: Instruction) -> Iterator[Instruction]:
    """Yields an instruction; for a fusion all dots and convolutions inside of it."""
    if instruction.fused is None:
        yield instruction
        return
    for inner in instruction.fused.instructions.values():
        if inner.opcode in ("dot", "convolution", "fusion"):
            yield from _multiplying(inner)


def _sizes_of_dot(dot: Instruction, kernel: Instruction) -> tuple[int, int, int, int]:
    """Returns batch, m, k and n of a product, which may be a part of the kernel."""
    lhs, rhs = (operand.result for operand in dot.operands[:2])
    if dot.opcode == "dot" or dot.target.startswith("__cublas"):
        contracting, batch = (_dims(dot, kind) for kind in ("contracting", "batch"))
    else:  # scales per block: both operands are contracted along their last dimension
        contracting, batch = [len(lhs.dims) - 1], list(range(len(lhs.dims) - 2))
    summed = _split_sums(dot, kernel) & set(range(len(batch)))
    num = math.prod(lhs.dims[dim] for i, dim in enumerate(batch) if i not in summed)
    k = math.prod(lhs.dims[dim] for dim in [*contracting, *(batch[i] for i in summed)])
    m, n = (array.size // max(1, num * k) for array in (lhs, rhs))
    scopes = dot.op_name.split("/")
    if names.BLOCK_GEMM_HOPPER in scopes:  # the matrices of a batch are stacked as rows
        num = n // dot.result.dims[1]
        m, n = m // num, n // num
    elif names.GROUPED_GEMM in scopes:  # each row or column is multiplied by one group only
        n = dot.result.dims[1]
    return num, m, k, n


def _dims(dot: Instruction, kind: str) -> list[int]:
    """Returns the dimensions of the left operand that are contracted, or those of the batch."""
    config = dot.config.get("gemm_backend_config", {}).get("dot_dimension_numbers")
    if config is not None:
        return list(map(int, config.get(f"lhs_{kind}_dimensions", ())))
    return dot.ints(f"lhs_{kind}_dims")


def _sizes_of_convolution(conv: Instruction) -> tuple[int, int, int, int]:
    """Returns the groups of a convolution, and m, k and n of the GEMM of windows and kernel."""
    lhs, rhs = (operand.result for operand in conv.operands[:2])
    # In cuDNN's gradients the dimension labels are those of the forward convolution.
    kernel, out = {
        "__cudnn$convBackwardInput": (rhs, lhs),
        "__cudnn$convBackwardFilter": (conv.result, rhs),
    }.get(conv.target, (rhs, conv.result))
    labels = re.split("_|->", conv.attribute("dim_labels"))
    num_features = out.dims[labels[2].index("f")]
    groups = int(conv.attribute("feature_group_count") or 1)
    m = out.size // max(1, num_features)
    return groups, m, kernel.size // max(1, kernel.dims[labels[1].index("o")]), num_features // groups


def _split_sums(dot: Instruction, kernel: Instruction) -> set[int]:
    """Returns the dimensions of the result of a product that a later kernel sums over.

    XLA cuts a long sum into batches ("split-K"). It names the kernel that adds up their products as the
    product.
    """
    # A library's kernel returns a tuple.
    values = [kernel, *(user for user in kernel.users if user.opcode in ("bitcast", "get-tuple-element"))]
    summed: set[int] = set()
    for user in (user for value in values for user in value.users):
        for one in user.fused.instructions.values() if user.fused else [user]:
            if one.opcode == "reduce" and one.op_name == dot.op_name:
                summed.update(one.ints("dimensions"))
    return summed


def _fp8_sources(value: Instruction) -> Iterator[str]:
    """Yields the FP8 and FP4 dtypes that a value was converted from, perhaps outside of its fusion."""
    caller = value.computation.caller
    whole = value.operands[0] if value.opcode == "get-tuple-element" else value
    if value.result.dtype.startswith(NARROW) and len(value.results) == 1:
        yield value.result.dtype
    elif value.opcode == "parameter" and caller is not None and caller.fused is not None:
        yield from _fp8_sources(caller.operands[int(value.text)])
    elif whole.fused is not None:
        outputs = whole.fused.outputs
        yield from _fp8_sources(outputs[min(int(value.attribute("index") or 0), len(outputs) - 1)])
    elif value.opcode in _VALUE_KEEPING:
        for operand in value.operands:
            yield from _fp8_sources(operand)


def _accumulation(dot: Instruction) -> str:
    """Returns how cublasLt accumulates in FP8; ``default`` for other backends, which do not state it."""
    if dot.target != "__cublas$lt$matmul$f8":
        return "default"
    precision = dot.config.get("gemm_backend_config", {}).get("precision_config", {})
    algorithm = precision.get("algorithm", "ALG_UNSET")
    if algorithm == "ALG_UNSET":
        return "fast" if set(precision.get("operand_precision", ())) <= {"DEFAULT"} else "exact"
    return "fast" if algorithm.endswith("_FAST_ACCUM") else "exact"


# Whether FP8 units compute a GEMM.


def with_reason(gemm: AuditedGemm, target: Target, *, without_triton: bool) -> AuditedGemm:
    """Returns a GEMM with the statement whether FP8 or FP4 units of ``target`` compute it, and why not.

    ``without_triton`` says whether XLA was not allowed to use its Triton GEMMs, see ``compile_for``.
    CublasLt then has also GEMMs that do not ask for it.
    """
    if _has_operands(gemm, "float4") and gemm.backend == "cuDNN":
        return dataclasses.replace(gemm, units="FP4")
    if not (target.has_fp8_units and gemm.backend != "other" and _has_operands(gemm, "float8")):
        return dataclasses.replace(gemm, reason=_why_not(gemm, target))
    asks_for_cublaslt = names.CUBLASLT in gemm.op_name.split("/")
    is_tritons = without_triton and gemm.backend == "cublasLt" and not asks_for_cublaslt
    if is_tritons or gemm.backend == "Triton":
        reason = (
            "a Triton kernel of XLA reads FP8; the size of its tile decides whether FP8 units multiply, "
            "and XLA chooses the tile by measuring on the device"
        )
        return dataclasses.replace(gemm, units="maybe FP8", accumulation="default", reason=reason)
    return dataclasses.replace(gemm, units="FP8")


def _has_operands(gemm: AuditedGemm, dtype: str) -> bool:
    return gemm.lhs_dtype.startswith(dtype) and gemm.rhs_dtype.startswith(dtype)


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
    if _has_operands(gemm, "float8"):
        return "operands are FP8, but the product is computed in a plain loop, without the FP8 units"
    if is_op or all(gemm.fp8_sources):
        return f"quantize-dequantize pattern not matched: multiplied in {dtypes}"
    if any(gemm.fp8_sources):
        return f"only one operand comes from FP8: multiplied in {dtypes}"
    or_batched = ", or a batched product (attention)" if gemm.batch > 1 else ""
    return f"operands are {dtypes}: layer not converted{or_batched}"


# The names in a program.

_ROLES = {names.FORWARD: "forward", names.DGRAD: "dgrad", names.WGRAD: "wgrad"}
"""The roles of GEMMs by the scopes in which the FP8 matmul computes them."""

_INSIDE = (*_ROLES, names.SWITCHED_OFF, names.KEPT_WIDE, names.CONVOLVED_WIDE)
"""The scopes with which the inside of an FP8 matmul begins."""

_WRAPPERS = (
    r"checkpoint|closed_call|custom_jvp_call|custom_vjp_call|eval_jaxpr|pjit|rematted_computation|shard_map|vmap"
    rf"|{names.BY_OP}|{names.NOT_CONVERTED}|(Fp8|NANOOFp8)\w*(Dot|Conv|Einsum)\w*_\d+"
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
