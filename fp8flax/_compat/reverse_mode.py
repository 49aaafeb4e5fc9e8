"""Raises an error that explains itself if somebody differentiates an FP8 op in forward mode.

Why: the backward pass of an op returns the next scaling state, so the op has a ``custom_vjp``. JAX cannot
differentiate a ``custom_vjp`` in forward mode. JAX's error names neither the op nor what to do.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define a primitive whose tangent can be
transposed but not computed. Without them forward mode raises the error of JAX. Nothing else changes.
"""

from __future__ import annotations

from typing import Any

import jax

FORWARD_MODE = (
    "An FP8 matmul cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.hessian, the "
    "function that jax.linearize returns), because its backward pass carries the scaling state. Use "
    "reverse mode (jax.vjp, jax.jacrev, fp8flax.grad), or turn FP8 off for this call with "
    "fp8flax.autocast(enabled=False). In the place of jax.hessian(f), jax.jacrev(jax.grad(f)) works with "
    "delayed scaling and form='qdq' of the op, or of quantize_model."
)

_reverse_only_p: Any = None
"""A primitive that returns its operand unchanged; None if JAX lacks a part.

The tangent of its operand goes through the primitive, too, with ``is_tangent``. Reverse mode only
transposes it there. Forward mode computes it, and that raises the error."""

try:
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    _NEEDED = (
        ad.primitive_jvps,
        ad.primitive_transposes,
        batching.primitive_batchers,
        mlir.register_lowering,
    )
except (ImportError, AttributeError):
    pass
else:
    _reverse_only_p = Primitive("fp8_reverse_mode_only")


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """Returns ``x``; raises ``TypeError`` if JAX differentiates the result in forward mode."""
    if _reverse_only_p is None:
        return x
    result: jax.Array = _reverse_only_p.bind(x, is_tangent=False)
    return result


def _computed(x: Any, is_tangent: bool) -> Any:
    """Returns ``x``; raises ``TypeError`` if it is a tangent."""
    if is_tangent:
        raise TypeError(FORWARD_MODE)
    return x


if _reverse_only_p is not None:
    _reverse_only_p.def_impl(_computed)
    _reverse_only_p.def_abstract_eval(lambda x, is_tangent: x)
    mlir.register_lowering(_reverse_only_p, lambda ctx, x, is_tangent: [_computed(x, is_tangent)])
    ad.primitive_jvps[_reverse_only_p] = lambda primals, tangents, is_tangent: (
        _reverse_only_p.bind(*primals, is_tangent=is_tangent),
        _reverse_only_p.bind(*tangents, is_tangent=True),
    )
    ad.primitive_transposes[_reverse_only_p] = lambda g, x, is_tangent: [g]
    batching.primitive_batchers[_reverse_only_p] = lambda args, dims, is_tangent: (
        _reverse_only_p.bind(*args, is_tangent=is_tangent),
        dims[0],
    )
