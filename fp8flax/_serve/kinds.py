"""What serving asks of a quantizer."""

from __future__ import annotations

from typing import Any

from fp8flax._core.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer


def needs_state(quantizer: Any) -> bool:
    """Tells whether its scale comes from the past, and is fixed in a frozen model."""
    return isinstance(quantizer, DelayedQuantizer)


def has_blocks(quantizer: Any) -> bool:
    """Tells whether it has several scales along a contraction."""
    return isinstance(quantizer, BlockQuantizer)


def has_one_scale(quantizer: Any) -> bool:
    """Tells whether it has one scale per tensor."""
    is_tensorwise = isinstance(quantizer, CurrentQuantizer) and quantizer.granularity == "tensorwise"
    return needs_state(quantizer) or is_tensorwise


def is_deepseeks(quantizer: Any) -> bool:
    """Tells whether its scales are those of DeepSeek's kernels, one for each 128×128 block."""
    return isinstance(quantizer, BlockQuantizer) and quantizer.block == (128, 128)
