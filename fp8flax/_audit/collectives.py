"""Counts the bytes that each device sends to other devices in a collective operation."""

from __future__ import annotations

import math
import re

from fp8flax._audit.hlo import Computation, Instruction

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
"""The collective operations of HLO."""


def kind_of(instruction: Instruction) -> str:
    """Returns the name of a collective operation, without ``-start``; "" for other instructions."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


def bytes_sent(computation: Computation, instruction: Instruction, num_devices: int) -> int:
    """Returns the bytes that each device sends in one run of an instruction; 0 if it is no collective.

    With operands of ``O`` bytes on each of the ``n`` devices of a group, a device sends

    * all-gather: ``O * (n - 1)``, which is ``R * (n - 1) / n`` for a result of ``R`` bytes
    * reduce-scatter, all-to-all: ``O * (n - 1) / n``
    * all-reduce: ``2 * O * (n - 1) / n``, as a reduce-scatter and an all-gather
    * collective-permute, collective-broadcast: ``O``

    A ragged all-to-all counts as an all-to-all of its whole data operand, since its sizes are not known.

    Args:
        computation: the computation of the instruction.
        instruction: any instruction.
        num_devices: number of devices that run the program.
    """
    kind = kind_of(instruction)
    if not kind:
        return 0
    operands = [computation.instructions[o].bytes for o in instruction.operands]
    if kind in ("collective-permute", "collective-broadcast"):
        return sum(operands)
    size = _group_size(instruction, num_devices)
    # The operands of a ragged all-to-all are data, a buffer for the result, and numbers.
    total = operands[0] if kind == "ragged-all-to-all" else sum(operands)
    if kind == "all-gather":
        return total * (size - 1)
    return (2 if kind == "all-reduce" else 1) * total * (size - 1) // size


def _group_size(instruction: Instruction, num_devices: int) -> int:
    """Returns the number of devices in a group; all groups must have the same size.

    Raises:
        ValueError: the groups are written in a form that is not known.
    """
    text = instruction.attributes.partition("replica_groups=")[2]
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
