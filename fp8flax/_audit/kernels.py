"""Reads a compiled program: its GPU kernels, and the bytes that each moves or sends to other devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from fp8flax._audit.dots import gemms_of
from fp8flax._audit.gemms import AuditedGemm
from fp8flax._audit.hlo import SLICES, VIEWS, Computation, Instruction, parse

_FREE = re.compile(
    r"add-dependency|after-all|bitcast|constant|get-tuple-element|opt-barrier|parameter|tuple"
    r"|(partition|replica)-id|\S+-done"
)
"""The opcodes of instructions that launch no GPU kernel."""

_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?"
)
"""The opcodes of collective operations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One GPU kernel: an instruction of the entry computation or of the body of a loop."""

    name: str
    bytes: int
    """Bytes that one launch reads and writes."""
    trip_count: int
    """Launches per call of the program: the product of the trip counts of the loops around it."""
    gemms: tuple[AuditedGemm, ...]
    collective: str
    """The name of a collective operation, such as ``all-gather``; empty for other kernels."""
    bytes_sent: int
    """Bytes that each device sends to other devices in one launch."""
    is_in_unknown_loop: bool
    """Whether XLA does not know the trip count of a loop around the kernel. Such a loop counts once."""


def read(text: str) -> list[Kernel]:
    """Returns the kernels of an optimized HLO module, with those of all branches of a conditional.

    ``text`` is what ``compiled.as_text()`` returns. Raises ``ValueError`` if it is no HLO module.
    """
    program = parse(text)
    return list(_kernels(program.entry, 1, False, program.num_devices))


def _kernels(
    computation: Computation, trip_count: int, is_in_unknown_loop: bool, num_devices: int
) -> Iterator[Kernel]:
    """Yields the kernels of a computation, which runs ``trip_count`` times."""
    for instruction in computation.instructions.values():
        opcode = instruction.opcode
        if opcode == "while":
            count = instruction.config.get("known_trip_count", {}).get("n")
            trips, is_unknown = trip_count * int(count or 1), is_in_unknown_loop or count is None
            for called in instruction.called:
                yield from _kernels(called, trips, is_unknown, num_devices)
        elif opcode in ("call", "conditional", "async-start", "call-start"):
            for called in instruction.called:
                yield from _kernels(called, trip_count, is_in_unknown_loop, num_devices)
        elif not (_FREE.fullmatch(opcode) or instruction.target in ("AllocateBuffer", "CreateBuffer")):
            moved = bytes_moved(instruction)
            collective = _COLLECTIVE.fullmatch(opcode)
            kind = collective[1] if collective else ""
            yield Kernel(
                name=instruction.name,
                bytes=moved,
                trip_count=trip_count,
                gemms=tuple(gemms_of(instruction, trip_count, moved)),
                collective=kind,
                bytes_sent=bytes_sent(instruction, kind, num_devices) if kind else 0,
                is_in_unknown_loop=is_in_unknown_loop,
            )


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


def bytes_sent(collective: Instruction, kind: str, num_devices: int) -> int:
    """Returns the bytes that each device sends in one run of a collective operation.

    With operands of ``O`` bytes on each of the ``n`` devices of a group, a device sends

    * all-gather: ``O * (n - 1)``, which is ``R * (n - 1) / n`` for a result of ``R`` bytes
    * reduce-scatter, all-to-all: ``O * (n - 1) / n``
    * all-reduce: ``2 * O * (n - 1) / n``, as a reduce-scatter and an all-gather
    * collective-permute, collective-broadcast: ``O``

    A ragged all-to-all counts as an all-to-all of its whole data operand, since its sizes are not known.
    ``num_devices`` devices run the program.
    """
    # The operands of a ragged all-to-all are data, a buffer for the result, and numbers.
    operands = collective.operands[:1] if kind == "ragged-all-to-all" else collective.operands
    total = sum(operand.bytes for operand in operands)
    if kind in ("collective-permute", "collective-broadcast"):
        return total
    size = _group_size(collective, num_devices)
    if kind == "all-gather":
        return total * (size - 1)
    return (2 if kind == "all-reduce" else 1) * total * (size - 1) // size


def _group_size(collective: Instruction, num_devices: int) -> int:
    """Returns the number of devices in a group; all groups must have the same size.

    Raises:
        ValueError: the groups are written in a form that is not known.
    """
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
