"""Defines the primitive by which an op reports arrays in addition to its result.

The primitive returns its first operand unchanged. So a report remains in the program as long as the result
of the primitive is used. Its derivative is that of the identity. ``interpreter.Values`` finds the primitive
in a traced program. If the key is ``ToHost``, the program itself passes the arrays to the host.

Why: ``statistics`` needs numbers from the forward and the backward pass of each op, inside of any loops and
transformations. Only a primitive passes through all of them and keeps static data (the key). ``calibrate``
needs a callback to the host that does not count as a side effect: the ``nn.scan`` of Flax 0.12.12 raises an
error if its body has one that depends on the carry, such as ``jax.debug.callback``.

Internals: ``jax.extend.core`` and ``jax.interpreters``, which JAX shows to libraries that define
primitives, but does not promise to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_report_p = Primitive("fp8_report")


class ToHost(NamedTuple):
    """The key of a report that a function on the host receives."""

    function: Callable[..., None]
    """Called with ``label`` and the reported arrays whenever the program makes the report."""
    label: Hashable


def _computed(x: Any, *arrays: Any, report: Hashable) -> Any:
    """Returns ``x``. Passes the arrays to the function of a ``ToHost``."""
    if isinstance(report, ToHost):
        jax.debug.callback(partial(report.function, report.label), *arrays)
    return x


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    """Batches the primitive. ``x`` keeps its batch axis; in each reported array the batch is axis 0."""
    (size,) = {x.shape[dim] for x, dim in zip(args, dims) if dim is not None}

    def stacked(x: jax.Array, dim: int | None) -> jax.Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    return _report_p.bind(args[0], *map(stacked, args[1:], dims[1:]), **params), dims[0]


_report_p.def_impl(_computed)
_report_p.def_abstract_eval(lambda x, *arrays, report: x)
# Not cached, because callbacks of TPUs cannot be cached.
mlir.register_lowering(_report_p, mlir.lower_fun(_computed, multiple_results=False), cacheable=False)
ad.primitive_jvps[_report_p] = lambda primals, tangents, report: (
    _report_p.bind(*primals, report=report),
    tangents[0],
)
batching.primitive_batchers[_report_p] = _batched


def with_report(x: jax.Array, arrays: Sequence[jax.Array], key: Hashable) -> jax.Array:
    """Returns ``x``, and reports arrays under a key.

    Args:
        x: the array that the report is bound to: if the result is used, the report is made.
        arrays: the arrays to report. Under ``jax.vmap`` each has the batch as its first axis.
        key: identifies the report; a ``ToHost`` receives it.
    """
    result: jax.Array = _report_p.bind(x, *arrays, report=key)
    return result


def is_report(eqn: Any) -> bool:
    """Returns whether an equation makes a report; the report's key is ``key_of(eqn)``."""
    return eqn.primitive is _report_p


def key_of(eqn: Any) -> Any:
    """Returns the key of the report that an equation makes."""
    return eqn.params["report"]
