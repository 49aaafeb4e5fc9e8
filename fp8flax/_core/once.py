"""What can be differentiated once: a second derivative raises an error, and is not silently zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

ONCE = (
    "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second derivatives "
    "use delayed scaling in the other form: partial(fp8flax.Fp8DotGeneralOp, form='qdq'), or "
    "fp8flax.quantize_model(…, form='qdq'). Or turn FP8 off for this part with "
    "fp8flax.autocast(enabled=False)."
)


def once(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a function of arrays: a derivative of it raises ``TypeError``.

    The ``custom_vjp`` of a contraction calls such functions, and does not differentiate them. So they are
    differentiated only where somebody asks for the derivative of the derivative.
    """
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        del primals, tangents
        raise TypeError(ONCE)

    return wrapped
