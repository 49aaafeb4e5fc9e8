"""Defines the primitive by which an op reports numbers to the host, in addition to its result.

The primitive returns its first operand unchanged. So a report is made if the result of the primitive is
used. Its derivative is that of the identity.

Why: ``calibrate`` and ``statistics`` need numbers from the forward and the backward pass of each op, inside
of any loops and transformations. ``jax.debug.callback`` counts as a side effect: the ``nn.scan`` of Flax
0.12.12 raises an error if its body has one that depends on the carry.

Internals: ``jax.extend.core`` and ``jax.interpreters``, which JAX shows to libraries that define
primitives, but does not promise to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_report_p = Primitive("fp8_report")


def _computed(x: Any, numbers: Any, *, receive: Callable[..., None], label: Hashable) -> Any:
    """Returns ``x``, and passes the label and the numbers to a function on the host."""
    jax.debug.callback(partial(receive, label), numbers)
    return x


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    """Batches the primitive. ``x`` keeps its batch axis; in the numbers the batch is axis 0."""
    x, numbers = args
    if dims[1] is not None:
        numbers = jnp.moveaxis(numbers, dims[1], 0)
    return _report_p.bind(x, numbers, **params), dims[0]


_report_p.def_impl(_computed)
_report_p.def_abstract_eval(lambda x, numbers, **params: x)
# Not cached, because callbacks of TPUs cannot be cached.
mlir.register_lowering(_report_p, mlir.lower_fun(_computed, multiple_results=False), cacheable=False)
ad.primitive_jvps[_report_p] = lambda primals, tangents, **params: (
    _report_p.bind(*primals, **params),
    tangents[0],
)
batching.primitive_batchers[_report_p] = _batched


def with_report(
    x: jax.Array, numbers: jax.Array, receive: Callable[..., None], label: Hashable
) -> jax.Array:
    """Returns ``x``; if the result is used, the program calls ``receive(label, numbers)`` on the host.

    Under ``jax.vmap`` the batch is the first axis of the numbers. JAX's caches keep ``receive`` alive: it
    must be a function of a module.
    """
    result: jax.Array = _report_p.bind(x, numbers, receive=receive, label=label)
    return result
