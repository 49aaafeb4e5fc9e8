"""Finds the GEMMs among the instructions of a compiled program: their sizes, dtypes and backends."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fp8flax._audit.gemms import AuditedGemm, path_of, role_of
from fp8flax._audit.hlo import SLICES, VIEWS, Instruction
from fp8flax._core.names import BLOCK_GEMM_HOPPER, GROUPED_GEMM

_VALUE_KEEPING = VIEWS | SLICES | {"broadcast", "multiply", "divide", "pad"}
"""Instructions that may stand between the conversion from FP8 to a wide dtype and the GEMM."""

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def gemms_of(kernel: Instruction, trip_count: int, num_bytes: int) -> Iterator[AuditedGemm]:
    """Yields the products and convolutions that a GPU kernel computes.

    ``num_bytes`` is what one launch moves; it counts for the first of them.
    """
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
            trip_count=trip_count,
            bytes=0 if i else num_bytes * trip_count,
            op_name=dot.op_name,
            fp8_sources=tuple(_name_of(next(_fp8_sources(o), "")) for o in dot.operands[:2]),
        )


def _name_of(dtype: str) -> str:
    """Returns the name that JAX has for an XLA dtype of floats; other names are XLA's."""
    return "float8_" + dtype[2:] if dtype.startswith("f8") else _DTYPES.get(dtype, dtype)


def _backend(kernel: Instruction) -> str:
    """Returns the backend of a kernel; an empty string if it is neither a fusion nor a matrix product."""
    if kernel.fused is not None:
        kind = kernel.config.get("fusion_backend_config", {}).get("kind", "")
        parts = {"triton": "Triton", "cudnn": "cuDNN", "cublas": "cublasLt"}
        return next((backend for part, backend in parts.items() if part in kind), "other")
    if kernel.opcode in ("dot", "convolution"):
        return "other"
    if kernel.target.startswith("mosaic_gpu"):  # no GPU kernel of ours in Triton multiplies
        is_ours = not {BLOCK_GEMM_HOPPER, GROUPED_GEMM}.isdisjoint(kernel.op_name.split("/"))
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
    # XLA cuts a long sum into batches ("split-K"), whose products a later kernel adds up.
    summed = _summed_dims(kernel) & set(range(len(batch)))
    num = math.prod(lhs.dims[dim] for i, dim in enumerate(batch) if i not in summed)
    k = math.prod(lhs.dims[dim] for dim in [*contracting, *(batch[i] for i in summed)])
    m, n = (array.size // max(1, num * k) for array in (lhs, rhs))
    names = dot.op_name.split("/")
    if BLOCK_GEMM_HOPPER in names:  # the matrices of a batch are stacked as rows
        num = n // dot.result.dims[1]
        m, n = m // num, n // num
    elif GROUPED_GEMM in names:  # each row or column is multiplied by one group only
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


def _summed_dims(value: Instruction) -> set[int]:
    """Returns the dimensions of an array that all instructions that read it sum over.

    For ``%p`` it is dimension 0, if these two instructions alone read it, the first through the fusion::

        %r = f32[8,4] fusion(f32[2,8,4] %p), calls=%sum    where %sum has reduce(%parameter), dimensions={0}
        %s = f32[8,4] reduce(f32[2,8,4] %p, f32[] %zero), dimensions={0}
    """
    summed: list[set[int]] = []
    for user in value.users:
        if user.fused is not None:
            read = zip(user.fused.parameters, user.operands)
            summed += [_summed_dims(parameter) for parameter, operand in read if operand is value]
        elif user.opcode == "get-tuple-element" and user.attribute("index") != "0":
            continue  # the workspace of a library's kernel
        elif user.opcode in ("get-tuple-element", "convert", "bitcast"):
            pairs = enumerate(zip(user.result.dims, value.result.dims))
            same = next((i for i, (a, b) in pairs if a != b), len(user.result.dims))
            summed.append(_summed_dims(user) & set(range(same)))
        else:
            summed.append(set(user.ints("dimensions") if user.opcode == "reduce" else ()))
    return set.intersection(*summed) if summed else set()


def _fp8_sources(value: Instruction, element: int = 0) -> Iterator[str]:
    """Yields the FP8 dtypes that a value was converted from; ``element`` is its index in a tuple.

    The search follows instructions that keep or scale the value. From a parameter of a fusion it goes on to
    the instruction that computes that parameter.
    """
    caller = value.computation.caller
    if value.result.dtype.startswith("f8") and len(value.results) == 1:
        yield value.result.dtype
    elif value.opcode == "parameter" and caller is not None and caller.fused is not None:
        yield from _fp8_sources(caller.operands[int(value.text)])
    elif value.opcode == "get-tuple-element":
        yield from _fp8_sources(value.operands[0], int(value.attribute("index") or 0))
    elif value.fused is not None:
        outputs = value.fused.outputs
        yield from _fp8_sources(outputs[min(element, len(outputs) - 1)])
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
