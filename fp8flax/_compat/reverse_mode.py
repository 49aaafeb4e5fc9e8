"""Raises an error that explains itself if somebody differentiates an FP8 op in forward mode.

Why: the backward pass of an op returns the next scaling state, so the op has a ``custom_vjp``. JAX cannot
differentiate a ``custom_vjp`` in forward mode. JAX's error names neither the op nor what to do.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define a primitive that can be transposed but
not computed. Without them forward mode raises the error of JAX. Nothing else changes.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax

FORWARD_MODE = (
    "An FP8 matmul cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.hessian, the "
    "function that jax.linearize returns), because its backward pass carries the scaling state. Use "
    "reverse mode (jax.vjp, jax.jacrev, fp8flax.grad), or turn FP8 off for this call with "
    "fp8flax.autocast(enabled=False)."
)

_tangent_p: Any = None
"""The primitive that stands for the tangent of an operand; None if JAX lacks a part.

Reverse mode only transposes the primitive, as an identity. Forward mode computes it, and that raises the
error."""

try:
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    _NEEDED = ad.deflinear2, batching.primitive_batchers, mlir.register_lowering
except (ImportError, AttributeError):
    pass
else:
    _tangent_p = Primitive("fp8_tangent")


@jax.custom_jvp
def _checked(x: jax.Array) -> jax.Array:
    """Returns ``x``; its tangent goes through ``_tangent_p``."""
    return x


@_checked.defjvp
def _checked_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    return _checked(primals[0]), _tangent_p.bind(tangents[0])


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """Returns ``x``; raises ``TypeError`` if JAX differentiates the result in forward mode."""
    return x if _tangent_p is None else _checked(x)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    del args, kwargs
    raise TypeError(FORWARD_MODE)


if _tangent_p is not None:
    _tangent_p.def_impl(_refuse)
    _tangent_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(_tangent_p, _refuse)
    ad.deflinear2(_tangent_p, lambda ct, _: [ct])
    batching.primitive_batchers[_tangent_p] = lambda args, dims: (_tangent_p.bind(*args), dims[0])
