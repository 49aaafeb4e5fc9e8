"""Returns the Linen modules whose methods run now.

Why: an NNX op that is called by a Linen layer raises an error that names the layer, and a Linen op warns if
``apply`` was asked by name for the next state. Nothing public tells which modules are running.

Internals: ``_context`` of ``nn.module``. Without it no module is known: that error and that warning do not
come, and nothing else changes.
"""

from __future__ import annotations

import flax.linen as nn


def running_modules() -> list[nn.Module]:
    """Returns the modules whose methods run now, from the outermost to the innermost."""
    try:
        stack = nn.module._context.module_stack
    except AttributeError:
        return []
    return [module for module in stack if module is not None]
