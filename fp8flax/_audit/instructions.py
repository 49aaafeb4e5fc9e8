"""Reads which instructions multiply matrices in XLA's own GPU kernels, from the PTX that XLA writes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"^\s*\.visible \.entry (\w+)\(", re.MULTILINE)
_MULTIPLIES = re.compile(r"\b((?:wgmma\.mma_async|tcgen05\.mma|mma)\.\S+)")
_FP8_OPERAND = re.compile(r"\.e[45]m[23]\b|kind::(?:mx)?f8f6f4")

_DUMP_FILTER = "xla_dump_emitter_re"
"""The option that XLA needs from JAX 0.11 on to write PTX."""


def read_instructions(compile_with: Callable[[dict[str, Any]], object]) -> dict[str, frozenset[str]]:
    """Returns the instructions that multiply matrices in each kernel that XLA compiles to PTX.

    Args:
        compile_with: a function that compiles the program with the compiler options that it gets.

    Returns:
        A dict from the name of each kernel to its instructions without operands, such as
        ``mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32``. It is empty if XLA wrote no PTX, or if no
        temporary folder can be made.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="fp8flax-audit-")
    except OSError:
        return {}
    with temporary as folder:
        # The unique name in the filter changes the key of JAX's persistent cache; the folder does not. XLA
        # writes no PTX for a program from the cache.
        compile_with({"xla_dump_to": folder, _DUMP_FILTER: f"ptx|{Path(folder).name}"})
        return parse_ptx(path.read_text() for path in Path(folder).glob("*.ptx"))


def parse_ptx(texts: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns the result of ``read_instructions`` for the given PTX texts.

    Example:
        >>> parse_ptx([".visible .entry dot_1( ... mma.sync.aligned.m16n8k8.row.col.f32.tf32 {%r1}, ..."])
        {'dot_1': frozenset({'mma.sync.aligned.m16n8k8.row.col.f32.tf32'})}
    """
    found: dict[str, frozenset[str]] = {}
    for text in texts:
        for name, instructions in _entries(text):
            found[name] = found.get(name, frozenset()) | instructions
    return found


def _entries(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    _, *parts = _ENTRY.split(text)
    for name, body in zip(parts[::2], parts[1::2]):
        yield name, frozenset(_MULTIPLIES.findall(body))


def on_fp8_units(instruction: str, compute_capability: float) -> bool:
    """Returns whether the FP8 units of a GPU execute a PTX instruction.

    On Ada (8.9) and the small Blackwell GPUs (12.0) they execute ``mma.sync`` with FP8 operands. On Hopper
    (9.0) and the large Blackwell GPUs (10.0) CUDA 13.0 assembles it to conversions and ``HMMA`` in float16.

    Example:
        >>> on_fp8_units("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2", 9.0)
        True
        >>> on_fp8_units("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 9.0)
        False
    """
    is_converted = instruction.startswith("mma.") and 9 <= compute_capability < 12
    return _FP8_OPERAND.search(instruction) is not None and not is_converted


def kernel_name(instruction: str) -> str:
    """Returns the name that XLA gives the GPU kernel of an HLO instruction."""
    return re.sub(r"\W", "_", instruction)
