"""Runs our code around each call of a method of a Linen module, and runs a function as if it were a method.

Why: a converted model must run our code before each of its methods, and before a function of the module
that a caller passes to ``apply`` as ``method``. ``nn.intercept_methods`` does not see such functions, and
the caller would have to enter its context.

Internals: ``_call_wrapped_method`` of ``nn.Module``, through which Linen runs all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AroundCalls:
    """Base class that passes each method call of a Linen module to ``_around_call``.

    A class must list it before ``nn.Module`` (or a subclass of ``nn.Module``) among its bases, and have the
    method ``_around_call(name, compute, args, kwargs)``. This returns the result of a call of the method
    ``name``. ``compute(module, args, kwargs)`` runs the method on a module.
    """

    def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        """Overrides the method of ``nn.Module`` through which Linen runs each method."""

        def compute(module: Any, args: Any, kwargs: Any) -> Any:
            # ``super()`` takes the first argument, so this is the method of ``module``, not of ``self``.
            return super()._call_wrapped_method(fun, args, kwargs)  # type: ignore[misc]

        return self._around_call(getattr(fun, "__name__", type(fun).__name__), compute, args, kwargs)


def call_as_method(module: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns ``function(module, *args, **kwargs)``, run by Linen as if it were a method of the module."""
    return module._call_wrapped_method(function, args, kwargs)
