"""Reads optimized HLO text: the GPU kernels of a program, the bytes that they move, and their GEMMs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from fp8flax._audit.dots import Dot, dots_of
from fp8flax._audit.hlo import Computation, Instruction, Program, parse
from fp8flax._audit.traffic import bytes_moved, bytes_sent, kind_of

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
"""Instructions that launch no GPU kernel."""

_CALLS = (
    "to_apply",
    "calls",
    "branch_computations",
    "called_computations",
    "true_computation",
    "false_computation",
)
"""Attributes that name the computations that a call or a conditional runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One GPU kernel: an instruction of the entry computation or of the body of a loop."""

    name: str
    bytes: int
    """Bytes that one launch reads and writes."""
    trip_count: int
    """Launches per call of the program: the product of the trip counts of the loops around it."""
    dots: tuple[Dot, ...]
    collective: str = ""
    """The name of a collective operation, such as ``all-gather``; empty for other kernels."""
    bytes_sent: int = 0
    """Bytes that each device sends to other devices in one launch."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The kernels of a program, and facts about the whole program; the result of ``read``."""

    kernels: tuple[Kernel, ...]
    unknown_trip_counts: bool
    """Whether the trip count of a loop is not known. Such a loop counts once."""
    has_fp8: bool
    """Whether any array in the program is FP8."""


def read(text: str) -> Summary:
    """Reads the text of an optimized HLO module.

    Args:
        text: what ``compiled.as_text()`` returns.

    Returns:
        The kernels, with those of all branches of a conditional, and facts about the program.

    Raises:
        ValueError: the text is not that of an HLO module.
    """
    program = parse(text)
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.partition("\n")[0])
    num_devices = math.prod(map(int, counts))
    kernels = tuple(_kernels(program, program.computations[program.entry], 1, num_devices, ""))
    instructions = [i for c in program.computations.values() for i in c.instructions.values()]
    return Summary(
        kernels=kernels,
        unknown_trip_counts=any(i.opcode == "while" and _trip_count(i) is None for i in instructions),
        has_fp8=any(array.dtype.startswith("f8") for i in instructions for array in i.results),
    )


_OF_PART = "tmp_xla_computation/"
"""How JAX begins the names in the program of each device, for ``custom_partitioning``."""


def _kernels(
    program: Program, computation: Computation, trip_count: int, num_devices: int, loop: str
) -> Iterator[Kernel]:
    """Yields the kernels of a computation; ``loop`` is the op name of the loop around it, or empty."""

    def full_name(op_name: str) -> str:
        # XLA gives the loop of a part its full name, and leaves the names inside of the loop as they are.
        return f"{loop}/{op_name.removeprefix(_OF_PART)}" if op_name.startswith(_OF_PART) else op_name

    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            known = _trip_count(instruction)
            count = 1 if known is None else known
            # A loop that runs a known number of times does not evaluate its condition.
            called = ["condition", "body"] if known is None else ["body"]
            inner, trips = full_name(instruction.op_name), trip_count * count
            for name in instruction.called(*called):
                yield from _kernels(program, program.computations[name], trips, num_devices, inner)
        elif opcode in ("call", "conditional", "async-start", "call-start"):
            for name in instruction.called(*_CALLS):
                yield from _kernels(program, program.computations[name], trip_count, num_devices, loop)
        elif opcode not in _FREE and not opcode.endswith("-done") and not _allocates(instruction):
            dots = dots_of(program, computation, instruction)
            yield Kernel(
                name=instruction.name,
                bytes=bytes_moved(program, computation, instruction),
                trip_count=trip_count,
                dots=tuple(dataclasses.replace(dot, op_name=full_name(dot.op_name)) for dot in dots),
                collective=kind_of(instruction),
                bytes_sent=bytes_sent(computation, instruction, num_devices),
            )


def _trip_count(loop: Instruction) -> int | None:
    known = loop.config.get("known_trip_count", {}).get("n")
    return None if known is None else int(known)


def _allocates(instruction: Instruction) -> bool:
    return instruction.attribute("custom_call_target") in ("AllocateBuffer", "CreateBuffer")
