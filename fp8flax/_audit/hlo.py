"""Parses optimized HLO text: the instructions of each computation."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of one array: its dtype and dimensions."""

    dtype: str
    """XLA's name of the dtype, such as ``bf16`` or ``f8e4m3fn``."""
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size in memory; 0 for tokens."""
        if self.dtype == "pred":
            bits = 8
        else:
            digits = re.match(r"[a-z]+(\d+)", self.dtype)
            bits = int(digits[1]) if digits else 0
        return math.ceil(math.prod(self.dims) * bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: a line of HLO."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    """The arrays of the result; several for a tuple, whose nesting is dropped."""
    operands: tuple[str, ...]
    text: str
    """The text between the parentheses of the operands."""
    attributes: str
    """The text after the operands."""

    @property
    def result(self) -> Array:
        """The array of the result; for a tuple its first array."""
        return self.results[0] if self.results else Array("token", ())

    @property
    def bytes(self) -> int:
        """The size of the whole result."""
        return sum(array.bytes for array in self.results)

    @property
    def op_name(self) -> str:
        """The name that JAX gave the operation, or an empty string."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The configuration of the backend; empty if there is none."""
        start = self.attributes.find("backend_config={")
        if start < 0:
            return {}
        try:
            return json.JSONDecoder().raw_decode(self.attributes, start + len("backend_config="))[0]
        except ValueError:  # an older form, which is not JSON and holds nothing that is needed here
            return {}

    def attribute(self, name: str) -> str:
        """Returns the value of an attribute, without braces or quotes; an empty string if it is missing."""
        found = re.search(rf'(?:^|[ ,{{]){name}=(?:\{{([^}}]*)\}}|"([^"]*)"|([^, ]+))', self.attributes)
        return next((value for value in found.groups() if value is not None), "") if found else ""

    def ints(self, name: str) -> tuple[int, ...]:
        """Returns the integers in the value of an attribute."""
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
        """For each instruction, the instructions that read its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for operand in set(instruction.operands):
                users[operand].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> list[Instruction]:
        """The parameters of the function, in order."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.text))

    @property
    def outputs(self) -> list[Instruction]:
        """The instructions that compute the results: the root, or the operands of a root tuple."""
        root = self.instructions[self.root]
        return [self.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of an HLO module by name."""

    computations: dict[str, Computation]
    entry: str

    def fused(self, instruction: Instruction) -> Computation | None:
        """Returns the computation of a fusion; None for any other instruction."""
        if instruction.opcode not in ("fusion", "fusion-start"):
            return None
        return self.computations[instruction.called("calls")[0]]


def _closing(text: str, start: int) -> int:
    """Returns the position of the bracket that closes the one at ``start``; skips brackets in strings."""
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
    """Parses the text after ``name =``: type, opcode, operands and attributes."""
    after_type = _closing(line, 0) + 1 if line.startswith("(") else line.index(" ")
    opcode, rest = line[after_type:].lstrip().split("(", 1)
    end = _closing("(" + rest, 0) - 1
    text = rest[:end]
    operands = () if opcode in ("constant", "parameter") else tuple(re.findall(r"%([^\s,(){}]+)", text))
    return Instruction(name, opcode, _arrays(line[:after_type]), operands, text, rest[end + 1 :])


def parse(text: str) -> Program:
    """Parses the text of an HLO module.

    Raises:
        ValueError: the text is not an HLO module.
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
