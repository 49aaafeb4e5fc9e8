"""Reads optimized HLO text: which kernels a program launches, what they move, which of them are GEMMs."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fp8flax._core.names import BLOCK_GEMM, BLOCK_GEMM_F16

_FREE = frozenset(
    (
        "add-dependency",
        "after-all",
        "async-done",
        "async-update",
        "bitcast",
        "constant",
        "copy-done",
        "domain",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    )
)
"""Instructions that launch nothing."""

_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
"""Instructions that read no more of their first operand than they return."""

_VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
"""Instructions that, inside a fusion, are computed only where their result is needed."""

_VALUE_KEEPING = _VIEWS | _SLICES | {"broadcast", "multiply", "divide", "pad"}
"""Instructions that may stand between an FP8 value converted back and the GEMM that reads it."""


@dataclasses.dataclass(frozen=True)
class Array:
    """The type of one array."""

    dtype: str
    """XLA's name, such as ``bf16`` or ``f8e4m3fn``."""
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in memory; 0 for tokens."""
        if self.dtype == "pred":
            bits = 8
        else:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(digits[1]) if digits else 0
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    """The arrays of the result; several for a tuple, whose nesting is dropped."""
    operands: tuple[str, ...]
    text: str
    """What stands between the parentheses of the operands."""
    attributes: str
    """What follows them."""

    @property
    def result(self) -> Array:
        """The result where it is one array; the first array of a tuple."""
        return self.results[0] if self.results else Array("token", ())

    @property
    def bytes(self) -> int:
        """Size of the whole result."""
        return sum(array.bytes for array in self.results)

    @property
    def op_name(self) -> str:
        """The name that JAX gave it, or an empty string."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The backend's configuration."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except ValueError:  # an older form that is not JSON; nothing in it is needed
            return {}

    def attribute(self, name: str) -> str:
        """Returns an attribute's value, without braces or quotes; an empty string where it is missing."""
        found = re.search(rf'(?:^|[ ,]){name}=(?:\{{([^}}]*)\}}|"([^"]*)"|([^, ]+))', self.attributes)
        return next((value for value in found.groups() if value is not None), "") if found else ""

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns an attribute that is a list of integers."""
        return tuple(int(value) for value in re.findall(r"\d+", self.attribute(name)))

    def called(self, *names: str) -> list[str]:
        """Returns the computations that the given attributes name."""
        return [c for name in names for c in re.findall(r"[^\s,%]+", self.attribute(name))]


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of HLO: its instructions by name, in order."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """For each instruction, those that read it."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands):
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters in their order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.text))

    @property
    def outputs(self) -> list[Instruction]:
        """The instructions that make the results: the root, or the operands of a root tuple."""
        root = self.instructions[self.root]
        return [self.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of an HLO module by name."""

    computations: dict[str, Computation]
    entry: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dot:
    """One matrix product or convolution, as the hardware is asked to do it."""

    op_name: str
    batch: int
    m: int
    k: int
    n: int
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    backend: str
    """``cublasLt``, ``cuBLAS``, ``Triton``, ``cuDNN``, ``Pallas`` (this package's kernel) or ``other``."""
    accumulation: str
    """``fast`` or ``exact`` in cublasLt's FP8 kernel, else ``default``."""
    contracts_leading: bool | None
    """Whether both operands are contracted along their first (True) or last (False) dimension."""
    fp8_sources: tuple[str, str]
    """The FP8 dtype that each operand is or was converted back from, or ``""``."""
    is_convolution: bool = False
    """Whether it is a convolution; its sizes are those of the product of its windows with the kernel."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch: an instruction in the entry or in a loop's body."""

    name: str
    bytes: int
    """Bytes that one launch reads and writes."""
    trip_count: int
    """Launches per call of the program: the product of the trip counts of the loops around it."""
    dots: tuple[Dot, ...]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Everything that ``read`` finds."""

    kernels: tuple[Kernel, ...]
    unknown_trip_counts: bool
    """Whether some loop's trip count is not known; such a loop counts once."""
    has_fp8: bool
    """Whether any array in the program is FP8."""


def _closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at ``start``, strings skipped."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}]').finditer(text, start):
        if found[0] in "({":
            depth += 1
        elif found[0] in ")}":
            depth -= 1
            if not depth:
                return found.start()
    raise ValueError(f"brackets do not match in this line of HLO: {text[:200]}")


def _arrays(text: str) -> tuple[Array, ...]:
    found = re.findall(r"([a-z]+[a-z0-9]*)\[([^\]]*)\]", text)
    return tuple(Array(t, tuple(int(d) for d in re.findall(r"\d+", dims))) for t, dims in found)


def _parse_line(name: str, line: str) -> Instruction:
    """Parses what follows ``name =``: type, opcode, operands, attributes."""
    after_type = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, rest = line[after_type:].lstrip().split("(", 1)
    end = _closing("(" + rest, 0) - 1
    text = rest[:end]
    operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([^\s,(){}]+)", text))
    return Instruction(name, opcode, _arrays(line[:after_type]), operands, text, rest[end + 1 :])


def parse(text: str) -> Program:
    """Parses the text of an HLO module.

    Raises:
        ValueError: the text is not that of an HLO module.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if instructions is None:
            header = re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line)
            if header:
                instructions, name, root = {}, header[2], ""
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, instructions, root)
            instructions = None
        else:
            found = re.match(r"\s+(ROOT )?%(\S+) = (.*)", line)
            if found:
                instructions[found[2]] = _parse_line(found[2], found[3])
                root = found[2] if found[1] else root
    if not entry:
        raise ValueError("this is not the text of an HLO module: it has no entry computation.")
    return Program(computations, entry)


def read(text: str) -> Summary:
    """Reads the text of an optimized HLO module.

    Args:
        text: what ``compiled.as_text()`` returns.

    Returns:
        The kernels, with all branches of a conditional.

    Raises:
        ValueError: the text is not that of an HLO module.

    Example:
        >>> summary = read('''HloModule example
        ...
        ... ENTRY %main (x: bf16[8,4]) -> f32[8,4] {
        ...   %x = bf16[8,4]{1,0} parameter(0)
        ...   ROOT %convert.1 = f32[8,4]{1,0} convert(%x), metadata={op_name="jit(f)/convert"}
        ... }''')
        >>> summary.kernels
        (Kernel(name='convert.1', bytes=192, trip_count=1, dots=()),)
    """
    return _Reader(parse(text)).summary()


_Site = tuple[tuple[Computation, Instruction], ...]
"""The fusions around an instruction, the outermost first, each with the computation that it stands in."""


class _Reader:
    """Walks a program from its entry."""

    def __init__(self, program: Program):
        self._program = program
        self._unknown_trip_counts = False

    def summary(self) -> Summary:
        kernels = tuple(self._kernels(self._program.computations[self._program.entry], 1))
        has_fp8 = any(
            array.dtype.startswith("f8")
            for computation in self._program.computations.values()
            for instruction in computation.instructions.values()
            for array in instruction.results
        )
        return Summary(kernels, self._unknown_trip_counts, has_fp8)

    def _kernels(self, computation: Computation, trip_count: int) -> Iterator[Kernel]:
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode == "while":
                known = instruction.config.get("known_trip_count", {}).get("n")
                called = ["body"]
                if known is None:
                    # A loop that runs a known number of times does not evaluate its condition.
                    self._unknown_trip_counts = True
                    called = ["condition", "body"]
                count = 1 if known is None else int(known)
                for name in instruction.called(*called):
                    yield from self._kernels(self._program.computations[name], trip_count * count)
            elif opcode in ("call", "conditional", "async-start", "call-start"):
                attributes = ("to_apply", "calls", "branch_computations", "called_computations")
                for name in instruction.called(*attributes, "true_computation", "false_computation"):
                    yield from self._kernels(self._program.computations[name], trip_count)
            elif opcode not in _FREE and not opcode.endswith("-done") and not _allocates(instruction):
                yield Kernel(
                    name=instruction.name,
                    bytes=self._bytes(computation, instruction),
                    trip_count=trip_count,
                    dots=tuple(self._dots(computation, instruction)),
                )

    # What a kernel reads and writes.

    def _bytes(self, computation: Computation, instruction: Instruction) -> int:
        operands = [computation.instructions[o] for o in dict.fromkeys(instruction.operands)]
        fused = self._fused(instruction)
        if fused is not None:
            read = sum(_read_from_parameter(fused, parameter) for parameter in fused.parameters)
            return read + sum(_written_by_fusion(fused, output) for output in fused.outputs)
        if instruction.opcode in _SLICES:
            return 2 * instruction.bytes + sum(o.bytes for o in operands[1:])
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1].bytes + sum(o.bytes for o in operands[2:])
        written = instruction.bytes
        if instruction.opcode.endswith("-start"):  # ((operands), results, context)
            written = max(0, written - sum(o.bytes for o in operands))
        if _is_library_call(instruction) and len(instruction.results) > 1:
            workspace = instruction.results[-1]
            written -= workspace.bytes if workspace.dtype in ("s8", "u8") else 0
        return written + sum(o.bytes for o in operands)

    def _fused(self, instruction: Instruction) -> Computation | None:
        if instruction.opcode not in ("fusion", "fusion-start"):
            return None
        return self._program.computations[instruction.called("calls")[0]]

    # Which kernels are GEMMs.

    def _dots(self, computation: Computation, instruction: Instruction) -> Iterator[Dot]:
        if instruction.opcode in ("fusion", "fusion-start"):
            backend = _fusion_backend(instruction)
            for site, dot in self._fused_dots(((computation, instruction),)):
                read = self._dot if dot.opcode == "dot" else self._convolution
                yield read(site, self._inside(site), dot, backend)
        elif instruction.opcode == "dot":
            yield self._dot((), computation, instruction, "other")
        elif instruction.opcode == "convolution":
            yield self._convolution((), computation, instruction, "other")
        elif instruction.opcode == "custom-call":
            target = instruction.attribute("custom_call_target")
            if target.startswith("__cublas$lt$matmul"):
                yield self._dot((), computation, instruction, "cublasLt")
            elif target == "__cublas$gemm":
                yield self._dot((), computation, instruction, "cuBLAS")
            elif target.startswith("__cudnn$conv"):
                yield self._convolution((), computation, instruction, "cuDNN")
            elif target == "__cudnn$blockScaledDot":
                yield self._dot((), computation, instruction, "cuDNN")
            elif target == "__gpu$xla.gpu.triton" and any(
                name in instruction.op_name.split("/") for name in (BLOCK_GEMM, BLOCK_GEMM_F16)
            ):
                yield self._dot((), computation, instruction, "Pallas")

    def _inside(self, site: _Site) -> Computation:
        fused = self._fused(site[-1][1])
        assert fused is not None
        return fused

    def _fused_dots(self, site: _Site) -> Iterator[tuple[_Site, Instruction]]:
        """Yields each dot and convolution in a fusion, fusions in it included, with the calls to it."""
        fused = self._inside(site)
        for instruction in fused.instructions.values():
            if instruction.opcode in ("dot", "convolution"):
                yield site, instruction
            elif instruction.opcode == "fusion":
                yield from self._fused_dots((*site, (fused, instruction)))

    def _dot(self, site: _Site, computation: Computation, dot: Instruction, backend: str) -> Dot:
        lhs, rhs = (computation.instructions[o].result for o in dot.operands[:2])
        dims = dot.config.get("gemm_backend_config", {}).get("dot_dimension_numbers")
        if backend in ("cuDNN", "Pallas") and not site:  # block-scaled: rows times rows
            contracting = [[len(a.dims) - 1] for a in (lhs, rhs)]
            batch = [list(range(len(a.dims) - 2)) for a in (lhs, rhs)]
        elif dims is None:
            contracting = [list(dot.ints(f"{side}_contracting_dims")) for side in ("lhs", "rhs")]
            batch = [list(dot.ints(f"{side}_batch_dims")) for side in ("lhs", "rhs")]
        else:
            contracting = [_to_ints(dims.get(f"{s}_contracting_dimensions")) for s in ("lhs", "rhs")]
            batch = [_to_ints(dims.get(f"{s}_batch_dimensions")) for s in ("lhs", "rhs")]
        where, kernel = site[0] if site else (computation, dot)
        out = next(
            (a for a in kernel.results if math.prod(a.dims) == math.prod(dot.result.dims)), dot.result
        )
        for i in sorted(self._summed_dims(where, kernel), reverse=True):
            if i < len(batch[0]):
                # A long sum was cut into batches whose products a later kernel adds up ("split-K").
                for c, b in zip(contracting, batch):
                    c.append(b.pop(i))
        free = [
            [i for i in range(len(a.dims)) if i not in (*c, *b)]
            for a, c, b in zip((lhs, rhs), contracting, batch)
        ]
        m, n = (math.prod(a.dims[i] for i in f) for a, f in zip((lhs, rhs), free))
        leading = {f > sorted(c) for f, c in zip(free, contracting)} if all(free) else {True, False}
        sources = [next(self._fp8_sources(site, computation, o, 0), "") for o in dot.operands[:2]]
        return Dot(
            op_name=dot.op_name,
            batch=math.prod(lhs.dims[i] for i in batch[0]),
            m=m,
            k=math.prod(lhs.dims[i] for i in contracting[0]),
            n=n,
            lhs_dtype=lhs.dtype,
            rhs_dtype=rhs.dtype,
            out_dtype=out.dtype,
            backend=backend,
            accumulation=_accumulation(dot),
            contracts_leading=leading.pop() if len(leading) == 1 else None,
            fp8_sources=(sources[0], sources[1]),
        )

    def _convolution(self, site: _Site, computation: Computation, conv: Instruction, backend: str) -> Dot:
        lhs, rhs = (computation.instructions[o].result for o in conv.operands[:2])
        target = conv.attribute("custom_call_target")
        # cuDNN's gradients name the dimensions of the forward convolution's tensors.
        arrays = {
            "__cudnn$convBackwardInput": (rhs, lhs),
            "__cudnn$convBackwardFilter": (conv.result, rhs),
        }
        kernel, out = arrays.get(target, (rhs, conv.result))
        labels = re.split("_|->", conv.attribute("dim_labels"))
        num_features = out.dims[labels[2].index("f")]
        groups = int(conv.attribute("feature_group_count") or 1)
        m = math.prod(out.dims) // max(1, num_features)
        k = math.prod(kernel.dims) // max(1, kernel.dims[labels[1].index("o")])
        n = num_features // groups
        sizes = {
            "__cudnn$convBackwardInput": (m, n, k),
            "__cudnn$convBackwardFilter": (k, m, n),
        }
        sources = [next(self._fp8_sources(site, computation, o, 0), "") for o in conv.operands[:2]]
        m, k, n = sizes.get(target, (m, k, n))
        return Dot(
            op_name=conv.op_name,
            batch=groups,
            m=m,
            k=k,
            n=n,
            lhs_dtype=lhs.dtype,
            rhs_dtype=rhs.dtype,
            out_dtype=conv.result.dtype,
            backend=backend,
            accumulation="default",
            contracts_leading=None,
            fp8_sources=(sources[0], sources[1]),
            is_convolution=True,
        )

    def _summed_dims(self, computation: Computation, value: Instruction) -> frozenset[int]:
        """Returns the dimensions of an array over which everything that reads it sums."""
        summed: list[frozenset[int]] = []
        for user in computation.users[value.name]:
            fused = self._fused(user)
            if fused is not None:
                read = [p for p, o in zip(fused.parameters, user.operands) if o == value.name]
                summed += [self._summed_dims(fused, parameter) for parameter in read]
            elif user.opcode == "get-tuple-element" and user.attribute("index") != "0":
                continue  # the workspace of a library's kernel
            elif user.opcode in ("get-tuple-element", "convert", "bitcast"):
                pairs = enumerate(zip(user.result.dims, value.result.dims))
                same = next((i for i, (a, b) in pairs if a != b), len(user.result.dims))
                summed.append(self._summed_dims(computation, user) & frozenset(range(same)))
            else:
                summed.append(frozenset(user.ints("dimensions") if user.opcode == "reduce" else ()))
        return frozenset.intersection(*summed) if summed else frozenset()

    def _fp8_sources(self, site: _Site, computation: Computation, name: str, index: int) -> Iterator[str]:
        """Yields the FP8 dtypes of the values that the operand ``name`` was converted from.

        Looks through the instructions that keep a value or scale it, out of the fusion into those that made
        its inputs. ``index`` selects from a tuple.
        """
        instruction = computation.instructions[name]
        if instruction.result.dtype.startswith("f8") and len(instruction.results) == 1:
            yield instruction.result.dtype
            return
        opcode = instruction.opcode
        if opcode == "parameter" and site:
            caller, call = site[-1]
            yield from self._fp8_sources(site[:-1], caller, call.operands[int(instruction.text)], 0)
        elif opcode == "get-tuple-element":
            element = int(instruction.attribute("index") or 0)
            yield from self._fp8_sources(site, computation, instruction.operands[0], element)
        elif opcode == "fusion":
            inner = (*site, (computation, instruction))
            outputs = self._inside(inner).outputs
            yield from self._fp8_sources(
                inner, self._inside(inner), outputs[min(index, len(outputs) - 1)].name, 0
            )
        elif opcode in _VALUE_KEEPING:
            for operand in instruction.operands:
                yield from self._fp8_sources(site, computation, operand, 0)


def _to_ints(values: Sequence[str] | None) -> list[int]:
    return [int(value) for value in values or ()]


def _accumulation(dot: Instruction) -> str:
    """Returns how cublasLt accumulates in FP8; what other backends do does not stand in the program."""
    if dot.attribute("custom_call_target") != "__cublas$lt$matmul$f8":
        return "default"
    precision = dot.config.get("gemm_backend_config", {}).get("precision_config", {})
    algorithm = precision.get("algorithm", "ALG_UNSET")
    if algorithm == "ALG_UNSET":
        return "fast" if set(precision.get("operand_precision", ())) <= {"DEFAULT"} else "exact"
    return "fast" if algorithm.endswith("_FAST_ACCUM") else "exact"


def _is_library_call(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.attribute("custom_call_target").startswith(
        ("__cublas", "__cudnn")
    )


def _allocates(instruction: Instruction) -> bool:
    return instruction.attribute("custom_call_target") in ("AllocateBuffer", "CreateBuffer")


def _fusion_backend(instruction: Instruction) -> str:
    kind = instruction.config.get("fusion_backend_config", {}).get("kind", "")
    for part, backend in (("triton", "Triton"), ("cudnn", "cuDNN"), ("cublas", "cublasLt")):
        if part in kind:
            return backend
    return "other"


def _read_from_parameter(fused: Computation, value: Instruction) -> int:
    """Returns how many bytes of a fusion's parameter are read: all, or what the slices of it take.

    ``value`` is the parameter or a view of it; sizes count in its dtype.
    """
    total = 0
    for user in fused.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += math.prod(user.result.dims) * value.bytes // max(1, math.prod(value.result.dims))
        elif user.opcode in _VIEWS and user.name != fused.root:
            total += _read_from_parameter(fused, user) * value.bytes // max(1, user.bytes)
        elif not (_is_in_place(fused, user) and user.operands[0] == value.name):
            return value.bytes
    return min(total, value.bytes)


def _is_in_place(fused: Computation, made: Instruction) -> bool:
    """Tells whether a value is a parameter of the fusion with a slice of it overwritten."""
    if made.opcode != "dynamic-update-slice":
        return False
    return _behind_bitcasts(fused, fused.instructions[made.operands[0]]).opcode == "parameter"


def _behind_bitcasts(fused: Computation, value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = fused.instructions[value.operands[0]]
    return value


def _written_by_fusion(fused: Computation, output: Instruction) -> int:
    """Returns how many bytes one output of a fusion takes to write."""
    made = _behind_bitcasts(fused, output)
    if _is_in_place(fused, made):
        return fused.instructions[made.operands[1]].bytes
    return output.bytes
