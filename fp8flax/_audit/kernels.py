"""Reads optimized HLO text: the GPU kernels of a program, the bytes that they move, and their GEMMs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from fp8flax._audit.dots import AuditedGemm, dots_of
from fp8flax._audit.hlo import Computation, Instruction, Program, parse
from fp8flax._audit.traffic import bytes_moved, bytes_sent, kind_of

_FREE = frozenset(
    (
        "add-dependency",
        "after-all",
        "bitcast",
        "constant",
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
    dots: tuple[AuditedGemm, ...]
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
    kernels = tuple(_kernels(program, program.computations[program.entry], 1, num_devices))
    instructions = [i for c in program.computations.values() for i in c.instructions.values()]
    return Summary(
        kernels=kernels,
        unknown_trip_counts=any(i.opcode == "while" and _trip_count(i) is None for i in instructions),
    )


def _kernels(
    program: Program, computation: Computation, trip_count: int, num_devices: int
) -> Iterator[Kernel]:
    """Yields the kernels of a computation, which runs ``trip_count`` times."""
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            trips = trip_count * (_trip_count(instruction) or 1)
            for name in instruction.called("body"):
                yield from _kernels(program, program.computations[name], trips, num_devices)
        elif opcode in ("call", "conditional", "async-start", "call-start"):
            for name in instruction.called(*_CALLS):
                yield from _kernels(program, program.computations[name], trip_count, num_devices)
        elif opcode not in _FREE and not opcode.endswith("-done") and not _allocates(instruction):
            yield Kernel(
                name=instruction.name,
                bytes=bytes_moved(program, computation, instruction),
                trip_count=trip_count,
                dots=tuple(dots_of(program, computation, instruction)),
                collective=kind_of(instruction),
                bytes_sent=bytes_sent(computation, instruction, num_devices),
            )


def _trip_count(loop: Instruction) -> int | None:
    known = loop.config.get("known_trip_count", {}).get("n")
    return None if known is None else int(known)


def _allocates(instruction: Instruction) -> bool:
    return instruction.attribute("custom_call_target") in ("AllocateBuffer", "CreateBuffer")
