"""Defines the primitive by which an op reports numbers to the host, in addition to its result.

The host returns a number for the report, such as its place among all reports. A value that is computed from
this number is there only after the report has arrived.

Why: ``calibrate`` and ``statistics`` need numbers from the forward and the backward pass of each op, inside
of any loops and transformations. JAX's own callbacks count as side effects: the ``nn.scan`` of Flax 0.12.12
raises an error if its body has one that depends on the carry.

Internals: ``jax.extend.core`` and ``jax.interpreters``, which JAX shows to libraries that define
primitives, but does not promise to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, partial_eval

_report_p = Primitive("fp8_report")
_RESULT = jax.ShapeDtypeStruct((), np.int32)


def _reported(*numbers: Any, receive: Callable[..., Any], label: Hashable) -> Any:
    """Passes the label, the device and the numbers to a function on the host; returns its result."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    device = lax.axis_index(manual) if manual else np.int32(0)
    return io_callback(partial(receive, label), _RESULT, device, *numbers)


def _batched(numbers: Any, dims: Any, **params: Any) -> Any:
    """Batches the primitive: the whole batch is one report, in which the batch is the first axis."""
    batched = [
        jnp.expand_dims(x, 0) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(numbers, dims)
    ]
    return _report_p.bind(*batched, **params), None


def _in_checkpoint(saveable: Any, unknown: list[bool], kept: list[bool], eqn: Any) -> Any:
    """Returns how ``jax.checkpoint`` divides the primitive between first pass and backward pass.

    The forward pass that the backward pass repeats makes no report; the number of the first one is saved.
    ``unknown`` says of each operand whether it is there in the backward pass only, ``kept`` whether the
    backward pass has it.
    """
    del saveable
    if any(unknown):
        return None, eqn, [True], [True], [x for x, is_kept in zip(eqn.invars, kept) if not is_kept]
    return eqn, None, [False], [False], []


_report_p.def_impl(_reported)
_report_p.def_abstract_eval(lambda *numbers, **params: jax.core.ShapedArray(_RESULT.shape, _RESULT.dtype))
# Not cached, because callbacks of TPUs cannot be cached.
mlir.register_lowering(_report_p, mlir.lower_fun(_reported, multiple_results=False), cacheable=False)
batching.primitive_batchers[_report_p] = _batched
partial_eval.partial_eval_jaxpr_custom_rules[_report_p] = _in_checkpoint


def reported(receive: Callable[..., Any], label: Hashable, *numbers: jax.Array) -> jax.Array:
    """Returns ``receive(label, device, *numbers)``, an int32 that the host computes, without a derivative.

    The report is made if the result is used. ``device`` counts the devices of a ``jax.shard_map``; each of
    them reports its own part, and must get the same results. Each ``jax.vmap`` adds a first axis to the
    numbers, of size 1 to those that have no batch. JAX's caches keep ``receive`` alive: it must be a
    function of a module.
    """
    result: jax.Array = _report_p.bind(*map(lax.stop_gradient, numbers), receive=receive, label=label)
    return result
