"""Replaces a private part of JAX or Flax that the installed version does not have.

Most other files of this folder import their part in a ``try`` statement; the rest are imported in one. If
the part is missing, ``import fp8flax`` still works, and at most the feature that needs the part raises an
error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import flax
import jax


class MissingPart:
    """Raises ``RuntimeError`` when it is called, or when an attribute of it is read."""

    def __init__(self, part: str, feature: str) -> None:
        self._fp8_part, self._fp8_feature = part, feature

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise missing(self._fp8_part, self._fp8_feature)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these, for example to copy or to document an object
            raise AttributeError(name)
        raise missing(self._fp8_part, self._fp8_feature)


def missing(part: str, feature: str) -> RuntimeError:
    """Returns the error to raise if a feature needs a part that the installed JAX or Flax lacks."""
    return RuntimeError(
        f"{feature} needs {part}, which JAX {jax.__version__} with Flax {flax.__version__} does not have. "
        "Install versions of JAX and Flax that fp8flax is known to work with; docs/supported.md lists them."
    )
