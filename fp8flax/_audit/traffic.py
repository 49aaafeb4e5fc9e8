"""What a kernel of a compiled program reads and writes."""

from __future__ import annotations

import math

from fp8flax._audit.hlo import Computation, Instruction, Program

SLICES = frozenset(("slice", "dynamic-slice", "gather"))
"""Instructions that read no more of their first operand than they return."""

VIEWS = frozenset(("bitcast", "reshape", "copy", "convert", "transpose"))
"""Instructions that, inside a fusion, are computed only where their result is needed."""


def bytes_moved(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Returns how many bytes one launch of an instruction's kernel reads and writes."""
    operands = [computation.instructions[o] for o in dict.fromkeys(instruction.operands)]
    fused = program.fused(instruction)
    if fused is not None:
        read = sum(_read_from_parameter(fused, parameter) for parameter in fused.parameters)
        return read + sum(_written_by_fusion(fused, output) for output in fused.outputs)
    if instruction.opcode in SLICES:
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


def _is_library_call(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.attribute("custom_call_target").startswith(
        ("__cublas", "__cudnn")
    )


def _read_from_parameter(fused: Computation, value: Instruction) -> int:
    """Returns how many bytes of a fusion's parameter are read: all, or what the slices of it take.

    ``value`` is the parameter or a view of it; sizes count in its dtype.
    """
    total = 0
    for user in fused.users[value.name]:
        if user.opcode in SLICES and user.operands[0] == value.name:
            total += math.prod(user.result.dims) * value.bytes // max(1, math.prod(value.result.dims))
        elif user.opcode in VIEWS and user.name != fused.root:
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
