"""Reads and sets the Linen modules whose methods run now.

Why: a Linen op refuses an ``nn.WeightNorm`` that would normalize its state. Qwix adds LoRA only where a
module runs, and the methods of converted models begin before Linen says so. Flax has no public way to list
the modules that are running.

Internals: ``_context`` of ``nn.module``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import flax.linen as nn


def running_modules() -> list[nn.Module]:
    """Returns the modules whose methods run now, from the outermost to the innermost."""
    return [module for module in nn.module._context.module_stack if module is not None]


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """A context in which a module is the innermost one whose method runs."""
    nn.module._context.module_stack.append(module)
    try:
        yield
    finally:
        nn.module._context.module_stack.pop()
