"""Reads a compiled program: its instructions, its GPU kernels, and the bytes that each moves or sends."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

SLICES = frozenset(("slice", "dynamic-slice", "gather"))
"""Instructions that read only as many elements of their first operand as they return."""

VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
"""Instructions that a fusion computes only for the elements that are needed."""


NARROW = ("f8", "f4")
"""How XLA's names of the dtypes of 8 and of 4 bits begin."""


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of one array: its dtype and dimensions."""

    dtype: str
    """XLA's name of the dtype, such as ``bf16`` or ``f8e4m3fn``."""
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The size in memory; 0 for tokens."""
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        bits = 8 if self.dtype == "pred" else int(digits[1]) if digits else 0
        return math.ceil(self.size * bits / 8)


@dataclasses.dataclass(eq=False, repr=False)
class Instruction:
    """One instruction: a line of HLO, linked with the instructions and computations around it."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    """The arrays of the result; several for a tuple, whose nesting is dropped."""
    text: str
    """The text between the parentheses of the operands."""
    attributes: str
    """The text after the operands."""
    computation: Computation
    operands: list[Instruction] = dataclasses.field(default_factory=list)
    users: list[Instruction] = dataclasses.field(default_factory=list)
    """The instructions that read the result."""
    called: list[Computation] = dataclasses.field(default_factory=list)
    """The computations that the instruction runs, all branches of a conditional, and the body of a loop."""

    @property
    def result(self) -> Array:
        """The array of the result; for a tuple its first array."""
        return self.results[0] if self.results else Array("token", ())

    @property
    def bytes(self) -> int:
        """The size of the whole result."""
        return sum(array.bytes for array in self.results)

    @property
    def fused(self) -> Computation | None:
        """The computation of a fusion; None for any other instruction."""
        return self.called[0] if self.opcode in ("fusion", "fusion-start") else None

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation, or an empty string."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def target(self) -> str:
        """The target of a custom call, or an empty string."""
        return self.attribute("custom_call_target")

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the backend, for opcodes that have it as JSON; empty if there is none."""
        _, name, text = self.attributes.partition("backend_config=")
        return json.JSONDecoder().raw_decode(text)[0] if name else {}

    @property
    def trip_count(self) -> int:
        """How often one call of the program runs it; a loop of unknown trip count counts once."""
        caller = self.computation.caller
        if caller is None:
            return 1
        known = caller.config.get("known_trip_count", {}) if caller.opcode == "while" else {}
        return caller.trip_count * int(known.get("n", 1))

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute, without braces or quotes; an empty string if it is missing."""
        found = re.search(rf'(?:^|[ ,{{]){name}=(?:\{{([^}}]*)\}}|"([^"]*)"|([^, ]+))', self.attributes)
        return next((value for value in found.groups() if value is not None), "") if found else ""

    def ints(self, name: str) -> list[int]:
        """Returns the integers in the value of an attribute."""
        return [int(value) for value in re.findall(r"\d+", self.attribute(name))]


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """A function of HLO."""

    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    """The instructions by name, in order."""
    root: Instruction | None = None
    caller: Instruction | None = None
    """An instruction that runs the computation; the only one for the computation of a fusion."""

    @property
    def outputs(self) -> list[Instruction]:
        """The instructions that compute the results: the root, or the operands of a root tuple."""
        assert self.root is not None
        return self.root.operands if self.root.opcode == "tuple" else [self.root]


@dataclasses.dataclass(frozen=True)
class Program:
    """An HLO module."""

    kernels: list[Instruction]
    """The instructions that launch a GPU kernel, also in the bodies of loops and in all branches."""
    instructions: list[Instruction]
    """The instructions of all computations."""
    num_devices: int


_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z][\w-]*)\(((?:[^()]|\([^()]*\))*)\)(.*)")
"""An instruction: its name, type, opcode, operands and attributes."""

_CALLS = re.compile(
    r"\b(?:calls|body|to_apply|(?:branch|called)_computations|(?:true|false)_computation)=(\{[^}]*\}|[^\s,]+)"
)
"""The attributes that name the computations that an instruction runs."""


def parse(text: str) -> Program:
    """Parses the text of an HLO module. In it operands and called computations stand before their users."""
    computations: dict[str, Computation] = {}
    entry = computation = None
    for line in text.splitlines():
        if computation is None:
            if header := re.match(r"(ENTRY )?%?(\S+) \(.*\{$", line):
                computation = computations[header[2]] = Computation()
                entry = computation if header[1] else entry
        elif line.startswith("}"):
            computation = None
        elif re.match(r"\s+(ROOT )?%\S+ = ", line):
            found = _LINE.fullmatch(line)
            if found is None:
                raise ValueError(f"this line of HLO is not in a known form: {line[:200]}")
            is_root, name, types, opcode, operands, attributes = found.groups()
            arrays = re.findall(r"([a-z]+[a-z0-9]*)\[([^\]]*)\]", types)
            results = tuple(Array(t, tuple(map(int, re.findall(r"\d+", dims)))) for t, dims in arrays)
            instruction = Instruction(name, opcode, results, operands, attributes, computation)
            computation.instructions[name] = instruction
            computation.root = instruction if is_root else computation.root
            if opcode not in ("constant", "parameter"):
                names = re.findall(r"%([^\s,(){}]+)", operands)
                instruction.operands = [computation.instructions[name] for name in names]
            for operand in dict.fromkeys(instruction.operands):
                operand.users.append(instruction)
            called = re.findall(r"%([^\s,{}]+)", " ".join(_CALLS.findall(attributes)))
            instruction.called = [computations[name] for name in called if name in computations]
            for one in instruction.called:
                one.caller = instruction
    assert entry is not None, "the text of an HLO module has an entry computation"
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    instructions = [i for one in computations.values() for i in one.instructions.values()]
    return Program(list(_kernels_of(entry)), instructions, math.prod(map(int, counts)))


# GPU kernels.

_FREE = re.compile(
    r"add-dependency|after-all|bitcast|constant|get-tuple-element|opt-barrier|parameter|tuple"
    r"|(partition|replica)-id|\S+-done"
)
"""The opcodes of instructions that launch no GPU kernel."""

_BUFFERS = ("AllocateBuffer", "CreateBuffer")
"""The targets of custom calls that launch no GPU kernel."""


def _kernels_of(computation: Computation) -> Iterator[Instruction]:
    """Yields the instructions that launch a GPU kernel, also in the bodies of loops and in all branches."""
    for instruction in computation.instructions.values():
        if instruction.opcode in ("while", "call", "conditional", "async-start", "call-start"):
            for called in instruction.called:
                yield from _kernels_of(called)
        elif not (_FREE.fullmatch(instruction.opcode) or instruction.target in _BUFFERS):
            yield instruction


# Bytes that a GPU kernel reads and writes.


def bytes_moved(kernel: Instruction) -> int:
    """Returns the number of bytes that one launch of a kernel reads and writes."""
    if kernel.fused is not None:
        parameters = (i for i in kernel.fused.instructions.values() if i.opcode == "parameter")
        return sum(map(_read_from, parameters)) + sum(map(_written_by_fusion, kernel.fused.outputs))
    operands = list(dict.fromkeys(kernel.operands))
    written = kernel.bytes
    if kernel.opcode == "dynamic-update-slice":
        written = operands[1].bytes
    # ((operands), results, context); the result of an all-reduce-start is the results alone
    elif kernel.opcode.endswith("-start") and kernel.opcode != "all-reduce-start":
        written = max(0, written - sum(o.bytes for o in operands))
    elif kernel.target.startswith(("__cublas", "__cudnn")):
        # Of several results the last one may be a workspace.
        written -= sum(array.bytes for array in kernel.results[1:] if array.dtype in ("s8", "u8"))
    return written + sum(_read_by(kernel, operand) for operand in operands)


def has_codes(kernel: Instruction) -> bool:
    """Returns whether a kernel reads or writes FP8 or FP4."""
    read = (array for operand in kernel.operands for array in operand.results)
    return any(array.dtype.startswith(NARROW) for array in (*kernel.results, *read))


def _read_by(user: Instruction, value: Instruction) -> int:
    """Returns the number of bytes that an instruction reads of its operand ``value``."""
    if user.operands[0] is value:
        if user.opcode in SLICES:
            return user.result.size * value.bytes // max(1, value.result.size)
        if user.opcode == "dynamic-update-slice":
            return 0
    return value.bytes


def _read_from(value: Instruction) -> int:
    """Returns the number of bytes that a fusion reads of a parameter: all, or those of its slices.

    ``value`` is the parameter or a view of it. The bytes count in the dtype of ``value``.
    """
    total = 0
    for user in value.users:
        if user.opcode in VIEWS and user is not user.computation.root:
            total += _read_from(user) * value.bytes // max(1, user.bytes)
        else:
            total += _read_by(user, value)
    return min(total, value.bytes)


def _written_by_fusion(output: Instruction) -> int:
    """Returns the number of bytes that a fusion writes for one output: all, or a slice of a parameter."""
    made = _behind_bitcasts(output)
    if made.opcode == "dynamic-update-slice" and _behind_bitcasts(made.operands[0]).opcode == "parameter":
        return made.operands[1].bytes
    return output.bytes


def _behind_bitcasts(value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value


# Bytes that a device sends.


_TIMES_SENT: dict[str, Callable[[int], int]] = {
    "all-gather": lambda size: size * (size - 1),
    "all-reduce": lambda size: 2 * (size - 1),
    "all-to-all": lambda size: size - 1,
    "collective-broadcast": lambda size: size,
    "collective-permute": lambda size: size,
    "ragged-all-to-all": lambda size: size - 1,
    "reduce-scatter": lambda size: size - 1,
}
"""How often each device sends its part of the operand, by the collective operation and the size of a group.

A device sends to the ``size - 1`` other devices of its group their parts of its operand, and in an
all-gather the whole operand. An all-reduce is a reduce-scatter and an all-gather. A ragged all-to-all
counts as an all-to-all of its whole data operand, since its sizes are not known."""


def collective_of(kernel: Instruction) -> str:
    """Returns the name of a collective operation, such as ``all-gather``; empty for other kernels."""
    name = kernel.opcode.removesuffix("-start")
    return name if name in _TIMES_SENT else ""


def bytes_sent(collective: Instruction, num_devices: int) -> int:
    """Returns the bytes that each device sends in one run of a collective operation."""
    kind, size = collective_of(collective), _group_size(collective, num_devices)
    # The operands of a ragged all-to-all are data, a buffer for the result, and numbers.
    operands = collective.operands[: 1 if kind == "ragged-all-to-all" else None]
    return sum(operand.bytes for operand in operands) * _TIMES_SENT[kind](size) // size


def _group_size(collective: Instruction, num_devices: int) -> int:
    """Returns the number of devices in a group; all groups must have the same size."""
    text = collective.attributes.partition("replica_groups=")[2]
    if text.startswith("{}") or not text:  # all devices
        return num_devices
    if text.startswith("{{"):  # {{0,1},{2,3}}
        return text.partition("}")[0].count(",") + 1
    if found := re.match(r"\[\d+,(\d+)\]", text):  # [groups,size]<=[...]
        return int(found[1])
    if found := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):  # mesh['x'=2,'y'=4] {'x'}
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", found[1])}
        # An axis may be a part of an axis of the mesh: 'x':(2)4 is a part of size 4.
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    raise ValueError(f"the groups of this collective are not in a known form: {text[:200]}")
