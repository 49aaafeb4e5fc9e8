"""``StandIn`` is what the code of a frozen model reads instead of a kernel that is stored as FP8 codes.

Why: the source of a model reads, casts and moves a wide kernel. A wide array in the place of the codes
would take memory, and code that reads its values would be silently wrong.

Internals: ``jax._src.core``, for the class of tracers; ``jax.extend.core`` and ``jax.interpreters`` for the
primitive that a ``FrontTrace`` computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax._src import core
from jax.extend.core import Primitive
from jax.interpreters import mlir

READ = "fp8_read_stored"
"""The name of the primitive that makes a ``StandIn``; it is seen in functions that JAX has traced, too."""

_read_p = Primitive(READ)


class StandIn(core.Tracer):
    """Stands for a wide array: has the shape of its FP8 codes and a wide dtype, and owns no memory.

    The handler of a ``FrontTrace`` may take it as an operand; no trace of JAX computes with it.
    """

    def __init__(self, front: Any, codes: Any, dtype: Any, source: tuple[str, ...]) -> None:
        aval = core.typeof(codes).update(dtype=np.dtype(dtype), weak_type=False)
        super().__init__(front, aval)
        self.codes = codes
        self.source = source
        """The path of the parameter that the codes are stored in."""
        self.cut: tuple[int, int, int] | None = None
        """The axis, the start and the end of the slice of the parameter that the codes are."""


def read_stored(codes: Any, dtype: Any, source: tuple[str, ...]) -> jax.Array:
    """Returns the ``StandIn`` of codes; raises ``ValueError`` if no ``FrontTrace`` sees the reading."""
    result: jax.Array = _read_p.bind(codes, dtype=np.dtype(dtype), source=source)
    return result


def refuse(source: tuple[str, ...]) -> ValueError:
    """Returns the error for code that needs the values of a kernel."""
    return ValueError(
        f"The kernel {'/'.join(source)} is stored in FP8, and is read here in another way than in the "
        "calls that freeze traced. Freeze the model with inputs that reach this code, and name all "
        "methods that you call: freeze(…, methods={'decode': (z,)}). The kernel then stays wide."
    )


def refuse_stand_ins(operands: Iterable[Any]) -> None:
    """Raises ``ValueError`` if an operand has no values."""
    for x in operands:
        if isinstance(x, StandIn):
            raise refuse(x.source)


def _not_seen(*_: Any, source: tuple[str, ...], **__: Any) -> Any:
    raise refuse(source)


_read_p.def_impl(_not_seen)
_read_p.def_abstract_eval(lambda codes, dtype, source: codes.update(dtype=dtype, weak_type=False))
mlir.register_lowering(_read_p, _not_seen)
