"""Parses optimized HLO text into a graph of instructions."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from typing import Any

SLICES = frozenset(("slice", "dynamic-slice", "gather"))
"""Instructions that read only as many elements of their first operand as they return."""

VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
"""Instructions that a fusion computes only for the elements that are needed."""


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
    def parameters(self) -> list[Instruction]:
        """The parameters of the function, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.text))

    @property
    def outputs(self) -> list[Instruction]:
        """The instructions that compute the results: the root, or the operands of a root tuple."""
        assert self.root is not None
        return self.root.operands if self.root.opcode == "tuple" else [self.root]


@dataclasses.dataclass(frozen=True)
class Program:
    """An HLO module."""

    entry: Computation
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
    if entry is None:
        raise ValueError("this is not the text of an HLO module: it has no entry computation.")
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    instructions = [i for one in computations.values() for i in one.instructions.values()]
    return Program(entry, instructions, math.prod(map(int, counts)))
