"""Reads the scopes (``jax.named_scope``) of the code that runs, and enters those of an equation.

Why: FP8 ops compute their contractions in scopes of ours. By these scopes ``quantize_model`` knows that it
must not convert these contractions again. And ``audit`` reads the scopes, so ``statistics`` keeps them in a
program that it computes again.

Internals: ``jax._src.source_info_util``. JAX's public ``named_scope`` enters a scope, but JAX has no public
way to read the entered scopes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from jax._src import source_info_util


def current() -> str:
    """Returns the scopes of the code that runs, from the outermost to the innermost, joined by ``/``."""
    return str(source_info_util.current_name_stack())


@contextlib.contextmanager
def of_equation(eqn: Any) -> Iterator[None]:
    """Enters the scopes of an equation, and sets its traceback and its options (such as x64)."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield
