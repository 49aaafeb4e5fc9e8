"""Finds the GPU kernels of a compiled program, and the bytes that each moves or sends to other devices."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from fp8flax._audit.hlo import SLICES, VIEWS, Computation, Instruction

_FREE = re.compile(
    r"add-dependency|after-all|bitcast|constant|get-tuple-element|opt-barrier|parameter|tuple"
    r"|(partition|replica)-id|\S+-done"
)
"""The opcodes of instructions that launch no GPU kernel."""

_BUFFERS = ("AllocateBuffer", "CreateBuffer")
"""The targets of custom calls that launch no GPU kernel."""

_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?"
)
"""The opcodes of collective operations."""


def kernels_of(computation: Computation) -> Iterator[Instruction]:
    """Yields the instructions that launch a GPU kernel, also in the bodies of loops and in all branches."""
    for instruction in computation.instructions.values():
        if instruction.opcode in ("while", "call", "conditional", "async-start", "call-start"):
            for called in instruction.called:
                yield from kernels_of(called)
        elif not (_FREE.fullmatch(instruction.opcode) or instruction.target in _BUFFERS):
            yield instruction


def collective_of(kernel: Instruction) -> str:
    """Returns the name of a collective operation, such as ``all-gather``; empty for other kernels."""
    found = _COLLECTIVE.fullmatch(kernel.opcode)
    return found[1] if found else ""


# Bytes that a GPU kernel reads and writes.


def bytes_moved(kernel: Instruction) -> int:
    """Returns the number of bytes that one launch of a kernel reads and writes."""
    if kernel.fused is not None:
        read = sum(map(_read_from, kernel.fused.parameters))
        return read + sum(map(_written_by_fusion, kernel.fused.outputs))
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
    if made.opcode == "dynamic-update-slice":
        whole, update = made.operands[:2]
        if _behind_bitcasts(whole).opcode == "parameter":
            return update.bytes
    return output.bytes


def _behind_bitcasts(value: Instruction) -> Instruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value


# Bytes that a device sends.


def bytes_sent(collective: Instruction, num_devices: int) -> int:
    """Returns the bytes that each device sends in one run of a collective operation.

    A device sends to the ``size - 1`` other devices of its group their parts of its operand, and in an
    all-gather the whole operand. An all-reduce is a reduce-scatter and an all-gather. A ragged all-to-all
    counts as an all-to-all of its whole data operand, since its sizes are not known.
    """
    kind, size = collective_of(collective), _group_size(collective, num_devices)
    # The operands of a ragged all-to-all are data, a buffer for the result, and numbers.
    operands = collective.operands[: 1 if kind == "ragged-all-to-all" else None]
    times = {
        "all-gather": size * (size - 1),
        "all-reduce": 2 * (size - 1),
        "collective-permute": size,
        "collective-broadcast": size,
    }.get(kind, size - 1)
    return sum(operand.bytes for operand in operands) * times // size


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
