"""Reads the scopes (``jax.named_scope``) of the code that runs.

Why: FP8 ops compute their contractions in scopes of ours. By these scopes ``quantize_model`` knows that it
must not convert these contractions again.

Internals: ``jax._src.source_info_util``. JAX has no public way to read the entered scopes.
"""

from __future__ import annotations

from jax._src import source_info_util


def current() -> str:
    """Returns the scopes of the code that runs, from the outermost to the innermost, joined by ``/``."""
    return str(source_info_util.current_name_stack())
