"""Replaces a function of another library while our code runs, and restores it afterwards.

An import of this package replaces nothing. The files that must replace a function of JAX or Flax use a
``Replacing`` around the code that needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from typing import Any

_lock = threading.RLock()


class Replacing:
    """A context in which ``table[key]`` is another function.

    The contexts of one object may be nested, and several threads may be in them at once. The last one that
    is left restores the function. The replacement must behave as the original outside of our code, because
    other threads also call it.

    Args:
        table: the registry, or the variables (``vars``) of the module, that holds the function.
        key: the function's key or name in ``table``.
        make: a function that gets the original, and returns the replacement.
    """

    def __init__(
        self, table: MutableMapping[Any, Any], key: Any, make: Callable[[Any], Callable[..., Any]]
    ) -> None:
        self._table, self._key, self._make = table, key, make
        self._original: Any = None
        self._depth = 0

    def __enter__(self) -> None:
        with _lock:
            if self._depth == 0:
                self._original = self._table[self._key]
                self._table[self._key] = self._make(self._original)
            self._depth += 1

    def __exit__(self, *exception: object) -> None:
        with _lock:
            self._depth -= 1
            if self._depth == 0:
                self._table[self._key] = self._original
