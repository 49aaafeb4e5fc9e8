"""``no_derivative``: makes the second derivative of an FP8 matmul an error; it would silently be zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

DIFFERENTIATED_ONCE = (
    "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second derivatives "
    "pass form='qdq' to the op, or to quantize_model, with delayed scaling. (Fp8RaggedDotOp has no second "
    "derivative.) Or turn FP8 off for this part with fp8flax.autocast(enabled=False)."
)


def no_derivative(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``f``, a function of arrays, so that ``TypeError`` is raised if JAX differentiates it.

    The forward and backward rules in the ``custom_vjp`` of a contraction call decorated functions. A first
    derivative uses these rules and does not differentiate them. A second derivative differentiates the
    rules, and so raises the error.
    """
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise TypeError(DIFFERENTIATED_ONCE)

    return wrapped
