"""Which instructions multiply in XLA's own kernels, as the PTX says that XLA makes of them."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"^\s*\.visible \.entry (\w+)\(", re.MULTILINE)
_MULTIPLIES = re.compile(r"\b((?:wgmma\.mma_async|tcgen05\.mma|mma)\.\S+)")
_FP8_OPERAND = re.compile(r"\.e[45]m[23]\b|kind::(?:mx)?f8f6f4")

_SAID = "xla_dump_emitter_re"
"""Without which XLA writes no PTX from JAX 0.11 on."""


def read_instructions(compile_with: Callable[[dict[str, Any]], object]) -> dict[str, frozenset[str]]:
    """Returns the instructions that multiply matrices in each kernel that XLA compiles to PTX.

    Args:
        compile_with: compiles the program with these options of XLA's.

    Returns:
        For the name of each kernel those instructions, as PTX writes them without operands, such as
        ``mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32``. Empty where XLA wrote no PTX, or there is
        no folder that it could be written to.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="fp8flax-audit-")
    except OSError:
        return {}
    with temporary as folder:
        # The name, which nothing else has, is for JAX's persistent cache of programs: it does not look
        # where XLA is to write, and of a program that it knows XLA writes nothing.
        compile_with({"xla_dump_to": folder, _SAID: f"ptx|{Path(folder).name}"})
        return parse_ptx(path.read_text() for path in Path(folder).glob("*.ptx"))


def parse_ptx(texts: Iterable[str]) -> dict[str, frozenset[str]]:
    """Returns what ``read_instructions`` does, of texts of PTX.

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
    """Tells whether an instruction is one of a GPU's FP8 units.

    ``mma.sync`` with FP8 operands is so on Ada (8.9) and the small Blackwell GPUs (12.0). On Hopper (9.0)
    and the large Blackwell ones (10.0) CUDA 13.0 assembles it to conversions and ``HMMA``, in float16.

    Example:
        >>> on_fp8_units("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e5m2", 9.0)
        True
        >>> on_fp8_units("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", 9.0)
        False
    """
    is_converted = instruction.startswith("mma.") and 9 <= compute_capability < 12
    return _FP8_OPERAND.search(instruction) is not None and not is_converted


def kernel_name(instruction: str) -> str:
    """Returns the name that XLA gives the kernel of an instruction of HLO."""
    return re.sub(r"\W", "_", instruction)
