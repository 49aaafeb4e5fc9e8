"""Finds the GEMMs among the instructions of a compiled program: their sizes, dtypes and backends."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from fp8flax._audit.hlo import Array, Computation, Instruction, Program
from fp8flax._audit.traffic import SLICES, VIEWS
from fp8flax._core.names import BLOCK_GEMM_HOPPER, GROUPED_GEMM

_VALUE_KEEPING = VIEWS | SLICES | {"broadcast", "multiply", "divide", "pad"}
"""Instructions that may stand between the conversion from FP8 to a wide dtype and the GEMM."""


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


class _Place(NamedTuple):
    """The place of an instruction in a program."""

    computation: Computation
    instruction: Instruction
    caller: _Place | None = None
    """The fusion that contains the instruction."""

    @property
    def kernel(self) -> _Place:
        """The outermost fusion around the instruction; without a fusion the instruction itself."""
        return self if self.caller is None else self.caller.kernel

    def operand(self, index: int) -> _Place:
        """Returns the place of the operand at ``index``."""
        return self._replace(instruction=self.computation.instructions[self.instruction.operands[index]])


def dots_of(program: Program, computation: Computation, instruction: Instruction) -> Iterator[AuditedGemm]:
    """Yields the products and convolutions that an instruction of ``computation`` launches.

    Their dtypes have XLA's names.
    """
    backend = _backend(instruction)
    if backend is not None:
        for place in _multiplying(program, _Place(computation, instruction)):
            is_convolution = place.instruction.opcode == "convolution" or (
                place.instruction.attribute("custom_call_target").startswith("__cudnn$conv")
            )
            yield (_read_convolution if is_convolution else _read_dot)(program, place, backend)


def _backend(instruction: Instruction) -> str | None:
    """Returns the backend of an instruction; None if it is neither a fusion nor a matrix product."""
    if instruction.opcode in ("fusion", "fusion-start"):
        kind = instruction.config.get("fusion_backend_config", {}).get("kind", "")
        parts = {"triton": "Triton", "cudnn": "cuDNN", "cublas": "cublasLt"}
        return next((backend for part, backend in parts.items() if part in kind), "other")
    if instruction.opcode in ("dot", "convolution"):
        return "other"
    target = instruction.attribute("custom_call_target") if instruction.opcode == "custom-call" else ""
    if target == "__gpu$xla.gpu.triton" or target.startswith("mosaic_gpu"):
        is_ours = not {BLOCK_GEMM_HOPPER, GROUPED_GEMM}.isdisjoint(instruction.op_name.split("/"))
        return "Pallas" if is_ours else None
    if target.startswith("__cublas$lt$matmul"):
        return "cublasLt"
    if target == "__cublas$gemm":
        return "cuBLAS"
    is_cudnns = target.startswith("__cudnn$conv") or target == "__cudnn$blockScaledDot"
    return "cuDNN" if is_cudnns else None


def _multiplying(program: Program, place: _Place) -> Iterator[_Place]:
    """Yields the place of an instruction; for a fusion those of all dots and convolutions inside of it."""
    fused = program.fused(place.instruction)
    if fused is None:
        yield place
        return
    for instruction in fused.instructions.values():
        if instruction.opcode in ("dot", "convolution", "fusion"):
            yield from _multiplying(program, _Place(fused, instruction, place))


def _multiplied(program: Program, place: _Place) -> tuple[Array, Array, dict[str, Any]]:
    """Returns the two operands of a product, and the fields of ``AuditedGemm`` that describe them."""
    lhs, rhs = (place.operand(i).instruction.result for i in (0, 1))
    sources = tuple(next(_fp8_sources(program, place.operand(i)), "") for i in (0, 1))
    fields = {"lhs_dtype": lhs.dtype, "rhs_dtype": rhs.dtype, "fp8_sources": sources}
    return lhs, rhs, {**fields, "op_name": place.instruction.op_name}


def _read_dot(program: Program, place: _Place, backend: str) -> AuditedGemm:
    lhs, rhs, fields = _multiplied(program, place)
    dot, kernel = place.instruction, place.kernel
    is_block_scaled = backend in ("cuDNN", "Pallas") and place.caller is None
    contracting, batch = _dimensions(dot, (lhs, rhs), is_block_scaled)
    summed = _summed_dims(program, kernel.computation, kernel.instruction)
    # XLA cuts a long sum into batches ("split-K"), whose products a later kernel adds up.
    for i in sorted(summed, reverse=True):
        if i < len(batch[0]):
            for c, b in zip(contracting, batch):
                c.append(b.pop(i))
    free = [
        [i for i in range(len(a.dims)) if i not in (*c, *b)]
        for a, c, b in zip((lhs, rhs), contracting, batch)
    ]
    m, n = (math.prod(a.dims[i] for i in f) for a, f in zip((lhs, rhs), free))
    num, names = math.prod(lhs.dims[i] for i in batch[0]), dot.op_name.split("/")
    if BLOCK_GEMM_HOPPER in names:  # the matrices of a batch are stacked as rows
        num = n // dot.result.dims[1]
        m, n = m // num, n // num
    elif GROUPED_GEMM in names:  # each row or column is multiplied by one group only
        n = dot.result.dims[1]
    size = math.prod(dot.result.dims)
    out = next((a for a in kernel.instruction.results if math.prod(a.dims) == size), dot.result)
    return AuditedGemm(
        **fields,
        batch=num,
        m=m,
        k=math.prod(lhs.dims[i] for i in contracting[0]),
        n=n,
        out_dtype=out.dtype,
        backend=backend,
        accumulation=_accumulation(dot),
    )


def _dimensions(
    dot: Instruction, operands: tuple[Array, Array], is_block_scaled: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the contracted dimensions of the two operands, and their batch dimensions."""
    sides = ("lhs", "rhs")
    if is_block_scaled:  # both operands are contracted along their last dimension
        ndims = [len(a.dims) for a in operands]
        return [[ndim - 1] for ndim in ndims], [list(range(ndim - 2)) for ndim in ndims]
    config = dot.config.get("gemm_backend_config", {}).get("dot_dimension_numbers", {})

    def dims_of(side: str, kind: str) -> list[int]:
        in_config = config.get(f"{side}_{kind}_dimensions") or ()
        return list(map(int, in_config)) or list(dot.ints(f"{side}_{kind}_dims"))

    return [dims_of(s, "contracting") for s in sides], [dims_of(s, "batch") for s in sides]


def _read_convolution(program: Program, place: _Place, backend: str) -> AuditedGemm:
    lhs, rhs, fields = _multiplied(program, place)
    conv = place.instruction
    # In cuDNN's gradients the dimension labels are those of the forward convolution.
    kernel, out = {
        "__cudnn$convBackwardInput": (rhs, lhs),
        "__cudnn$convBackwardFilter": (conv.result, rhs),
    }.get(conv.attribute("custom_call_target"), (rhs, conv.result))
    labels = re.split("_|->", conv.attribute("dim_labels"))
    num_features = out.dims[labels[2].index("f")]
    groups = int(conv.attribute("feature_group_count") or 1)
    return AuditedGemm(
        **fields,
        batch=groups,
        m=math.prod(out.dims) // max(1, num_features),
        k=math.prod(kernel.dims) // max(1, kernel.dims[labels[1].index("o")]),
        n=num_features // groups,
        out_dtype=conv.result.dtype,
        backend=backend,
    )


def _summed_dims(program: Program, computation: Computation, value: Instruction) -> frozenset[int]:
    """Returns the dimensions of an array that all instructions that read it sum over.

    For ``%p`` it is dimension 0, if these two instructions alone read it, the first through the fusion::

        %r = f32[8,4] fusion(f32[2,8,4] %p), calls=%sum    where %sum has reduce(%parameter), dimensions={0}
        %s = f32[8,4] reduce(f32[2,8,4] %p, f32[] %zero), dimensions={0}
    """
    summed: list[frozenset[int]] = []
    for user in computation.users[value.name]:
        fused = program.fused(user)
        if fused is not None:
            read = [p for p, o in zip(fused.parameters, user.operands) if o == value.name]
            summed += [_summed_dims(program, fused, parameter) for parameter in read]
        elif user.opcode == "get-tuple-element" and user.attribute("index") != "0":
            continue  # the workspace of a library's kernel
        elif user.opcode in ("get-tuple-element", "convert", "bitcast"):
            pairs = enumerate(zip(user.result.dims, value.result.dims))
            same = next((i for i, (a, b) in pairs if a != b), len(user.result.dims))
            summed.append(_summed_dims(program, computation, user) & frozenset(range(same)))
        else:
            summed.append(frozenset(user.ints("dimensions") if user.opcode == "reduce" else ()))
    return frozenset.intersection(*summed) if summed else frozenset()


def _fp8_sources(program: Program, place: _Place, element: int = 0) -> Iterator[str]:
    """Yields the FP8 dtypes that a value was converted from; ``element`` is its index in a tuple.

    The search follows instructions that keep or scale the value. From a parameter of a fusion it goes on to
    the instruction that computes that parameter.
    """
    instruction = place.instruction
    if instruction.result.dtype.startswith("f8") and len(instruction.results) == 1:
        yield instruction.result.dtype
    elif instruction.opcode == "parameter" and place.caller is not None:
        yield from _fp8_sources(program, place.caller.operand(int(instruction.text)))
    elif instruction.opcode == "get-tuple-element":
        yield from _fp8_sources(program, place.operand(0), int(instruction.attribute("index") or 0))
    elif instruction.opcode == "fusion":
        fused = program.computations[instruction.called("calls")[0]]
        made = fused.outputs[min(element, len(fused.outputs) - 1)]
        yield from _fp8_sources(program, _Place(fused, made, place))
    elif instruction.opcode in _VALUE_KEEPING:
        for i in range(len(instruction.operands)):
            yield from _fp8_sources(program, place.operand(i))


def _accumulation(dot: Instruction) -> str:
    """Returns how cublasLt accumulates in FP8; ``default`` for other backends, which do not state it."""
    if dot.attribute("custom_call_target") != "__cublas$lt$matmul$f8":
        return "default"
    precision = dot.config.get("gemm_backend_config", {}).get("precision_config", {})
    algorithm = precision.get("algorithm", "ALG_UNSET")
    if algorithm == "ALG_UNSET":
        return "fast" if set(precision.get("operand_precision", ())) <= {"DEFAULT"} else "exact"
    return "fast" if algorithm.endswith("_FAST_ACCUM") else "exact"
