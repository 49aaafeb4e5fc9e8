"""Returns the Linen modules whose methods run now.

Why: a Linen op refuses an ``nn.WeightNorm`` that would normalize its state. Flax has no public way to list
the modules that are running.

Internals: ``_context`` of ``nn.module``.
"""

from __future__ import annotations

import flax.linen as nn


def running_modules() -> list[nn.Module]:
    """Returns the modules whose methods run now, from the outermost to the innermost."""
    return [module for module in nn.module._context.module_stack if module is not None]
