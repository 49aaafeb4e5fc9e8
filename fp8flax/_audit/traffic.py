"""Counts the bytes that a kernel of a compiled program reads and writes, or sends to other devices."""

from __future__ import annotations

import math
import re

from fp8flax._audit.hlo import Computation, Instruction, Program

SLICES = frozenset(("slice", "dynamic-slice", "gather"))
"""Instructions that read only as many elements of their first operand as they return."""

VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
"""Instructions that a fusion computes only for the elements that are needed."""


def bytes_moved(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Returns the number of bytes that one launch of an instruction's kernel reads and writes."""
    fused = program.fused(instruction)
    if fused is not None:
        read = sum(_read_from(fused, parameter) for parameter in fused.parameters)
        return read + sum(_written_by_fusion(fused, output) for output in fused.outputs)
    operands = [computation.instructions[o] for o in dict.fromkeys(instruction.operands)]
    written = instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        written = operands[1].bytes
    # ((operands), results, context); the result of an all-reduce-start is the results alone
    elif instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        written = max(0, written - sum(o.bytes for o in operands))
    elif instruction.attribute("custom_call_target").startswith(("__cublas", "__cudnn")):
        # Of several results the last one may be a workspace.
        workspace = [array.bytes for array in instruction.results[1:] if array.dtype in ("s8", "u8")]
        written -= sum(workspace)
    return written + sum(_read_by(instruction, operand) for operand in operands)


def _read_by(user: Instruction, value: Instruction) -> int:
    """Returns the number of bytes that an instruction reads of its operand ``value``."""
    if user.operands[0] == value.name:
        if user.opcode in SLICES:
            return math.prod(user.result.dims) * value.bytes // max(1, math.prod(value.result.dims))
        if user.opcode == "dynamic-update-slice":
            return 0
    return value.bytes


def _read_from(fused: Computation, value: Instruction) -> int:
    """Returns the number of bytes that a fusion reads of a parameter: all, or those of its slices.

    ``value`` is the parameter or a view of it. The bytes count in the dtype of ``value``.
    """
    total = 0
    for user in fused.users[value.name]:
        if user.opcode in VIEWS and user.name != fused.root:
            total += _read_from(fused, user) * value.bytes // max(1, user.bytes)
        else:
            total += _read_by(user, value)
    return min(total, value.bytes)


def _behind_bitcasts(fused: Computation, value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = fused.instructions[value.operands[0]]
    return value


def _written_by_fusion(fused: Computation, output: Instruction) -> int:
    """Returns the number of bytes that a fusion writes for one output: all, or a slice of a parameter."""
    made = _behind_bitcasts(fused, output)
    if made.opcode == "dynamic-update-slice":
        whole, update = (fused.instructions[o] for o in made.operands[:2])
        if _behind_bitcasts(fused, whole).opcode == "parameter":
            return update.bytes
    return output.bytes


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
    ``num_devices`` devices run the program.
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
