"""Reads the scopes (``jax.named_scope``) of the code that runs, and enters those of an equation.

Why: a contraction that an FP8 op computes stands in a scope of ours, by which conversion does not meet it
twice. And a program that statistics compute again keeps its scopes, which ``audit`` reads.

Internals: ``jax._src.source_info_util``. JAX's public ``named_scope`` enters a scope, but nothing public
tells which are entered. Without it ``quantize_model`` and ``statistics`` raise an error when a model runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fp8flax._compat.missing import MissingPart

try:
    from jax._src import source_info_util

    _NEEDED = source_info_util.current_name_stack, source_info_util.user_context
except (ImportError, AttributeError):
    source_info_util = MissingPart(
        "jax._src.source_info_util", "Tracing a model (quantize_model, fp8flax.statistics)"
    )


def current() -> str:
    """Returns the scopes of the code that runs, joined by ``/``."""
    return str(source_info_util.current_name_stack())


@contextlib.contextmanager
def of_equation(eqn: Any) -> Iterator[None]:
    """A context with the scopes, the traceback and the options (such as x64) of an equation."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield
