"""Makes subclasses of users' classes, whose objects can be copied and pickled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeAlias, cast

Make: TypeAlias = Callable[..., type]


def subclass_of(cls: type, make: Make, *key: Any) -> Any:
    """Returns ``make(cls, *key)``, a subclass of a class; equal arguments give one subclass.

    The subclass has the name of the class. Its instances can be pickled, although it cannot be imported.
    Only its instances keep it alive (and JAX's registry, if they are pytrees). After the last one, the
    subclass and its key can be freed.
    """
    with _LOCK:
        for known in cast(list[Any], cls.__subclasses__()):
            if vars(known).get("_fp8_made_by") == (make, *key):
                return known
        made = cast(Any, make(cls, *key))
        made.__module__, made.__qualname__, made.__doc__ = cls.__module__, cls.__qualname__, cls.__doc__
        made._fp8_base, made._fp8_made_by, made.__reduce_ex__ = cls, (make, *key), _reduce
        return made


_LOCK = threading.RLock()
"""Held while a subclass is found or made: Flax changes the bases of a dataclass while it makes one."""


def _reduce(self: Any, protocol: int) -> tuple[object, ...]:
    """Returns how a copy or a pickle makes an object of a subclass again, as ``__reduce_ex__`` does."""
    return _empty, (self._fp8_base, *self._fp8_made_by), self.__getstate__()


def _empty(cls: type, make: Make, *key: Any) -> object:
    """Returns an object without attributes, which a copy or a pickle then sets."""
    return object.__new__(subclass_of(cls, make, *key))
