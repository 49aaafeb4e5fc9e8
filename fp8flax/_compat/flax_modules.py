"""Stands around each call of a method of a Linen module, and runs a function as if it were a method.

Why: in a converted model something must happen before a method runs, also where a caller gives ``apply`` a
function of the module. ``nn.intercept_methods`` does not see such functions, and its context would have to
be entered by the caller.

Internals: ``_call_wrapped_method`` of ``nn.Module``, through which Linen runs all methods. Without it
``quantize_model`` raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn

from fp8flax._compat.missing import missing


class AroundCalls:
    """Is to stand before ``nn.Module`` among the bases of a class."""

    def _around_call(self, name: str, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns the result of a method; ``compute(module, args, kwargs)`` runs the method of a module."""
        raise NotImplementedError

    def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        def compute(module: Any, args: Any, kwargs: Any) -> Any:
            return super()._call_wrapped_method(fun, args, kwargs)  # type: ignore[misc]

        return self._around_call(getattr(fun, "__name__", type(fun).__name__), compute, args, kwargs)


def check_calls() -> None:
    """Raises ``RuntimeError`` where Linen runs methods in another way than ``AroundCalls`` knows."""
    if not hasattr(nn.Module, "_call_wrapped_method"):
        raise missing("nn.Module._call_wrapped_method", "fp8flax.quantize_model")


def call_as_method(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns ``function(module, *args, **kwargs)``, run as Linen runs a method."""
    return module._call_wrapped_method(function, args, kwargs)
