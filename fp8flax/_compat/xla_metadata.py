"""Keeps XLA for CPUs from inlining a function.

Why: XLA for CPUs copies cheap operations into every kernel that reads their result. The arithmetic of a
scale is then compiled and run again in each kernel that reads the scale.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define a primitive, and ``set_xla_metadata`` of
``jax.experimental``. JAX shows them to libraries, but does not promise to keep them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_apart_p = Primitive("fp8_apart")
"""A primitive that returns its operand unchanged.

The operand is the result of a call of a jitted function. In a program for CPUs, the lowering of the
primitive marks this call as not to be inlined."""


def apart(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jits a function of arrays, and keeps XLA for CPUs from inlining it where its result is read.

    XLA compiles equal functions once, however often they are called. For GPUs the function is only jitted,
    because a function that is not inlined would start more GPU kernels.

    Do not use it for the whole body of a ``lax.while_loop``: XLA for CPUs never ends such a loop if it has
    two results or more.
    """
    jitted = jax.jit(f)

    def call(*args: Any) -> Any:
        (first, *rest), treedef = jax.tree.flatten(jitted(*args))
        return treedef.unflatten([_apart_p.bind(first), *rest])

    return call


def _lower_apart(ctx: Any, x: Any) -> Any:
    """Lowers the primitive: in a program for CPUs, marks the call that returned ``x``."""
    if tuple(ctx.module_context.platforms) != ("cpu",):
        return [x]
    mark = functools.partial(set_xla_metadata, inlineable="false")
    return mlir.lower_fun(mark, multiple_results=False)(ctx, x)


_apart_p.def_impl(lambda x: x)
_apart_p.def_abstract_eval(lambda x: x)
# Not cached: a cached rule is lowered as a function of ``x``, in which the call to mark is not visible.
mlir.register_lowering(_apart_p, _lower_apart, cacheable=False)
ad.primitive_jvps[_apart_p] = lambda primals, tangents: (_apart_p.bind(*primals), tangents[0])
batching.primitive_batchers[_apart_p] = lambda args, dims: (_apart_p.bind(*args), dims[0])
