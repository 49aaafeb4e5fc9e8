"""Reads and changes what Flax keeps about a model that runs, for which it has no public functions.

Why: Linen passes the flags of a scope on to the scopes below it, also through its transformations. A flag
finds the call of a converted model that a scope belongs to. A converted model shows its variables to the
methods of its modules in another layout than Linen keeps them, and makes ops in scopes of its own. The
methods of an NNX module are watched by a subclass of its class. A Linen op refuses an ``nn.WeightNorm``
that would normalize its state, and Qwix adds LoRA only where a module runs: both need the modules that run.

Internals: ``_context`` of ``nn.module``; ``method_handler_wrapped``, which marks methods; ``flags``,
``push`` and ``variables`` of ``flax.core.Scope``; the class and the ``__dict__`` of an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import flax.core
import flax.linen as nn

_CALL = "fp8flax"
"""The name of the flag whose value is the innermost running call of a converted model."""


@contextmanager
def having(owner: object, **attributes: object) -> Iterator[None]:
    """A context in which an object has these attributes of its own."""
    own = vars(owner)  # a module of NNX refuses ``setattr`` in another trace of JAX than its own
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)


def running_modules() -> list[nn.Module]:
    """Returns the modules whose methods run now, from the outermost to the innermost."""
    return [module for module in nn.module._context.module_stack if module is not None]


@contextmanager
def running(module: nn.Module) -> Iterator[None]:
    """A context in which a module is the innermost one whose method runs."""
    nn.module._context.module_stack.append(module)
    try:
        yield
    finally:
        nn.module._context.module_stack.pop()


def call_of(scope: flax.core.Scope | None) -> Any:
    """Returns the innermost running call of a converted model that a scope belongs to, or None.

    The call takes part in each Linen op. ``call.on_op(op, recipe, compute, lhs, rhs, *rest)``, if it is not
    None, replaces ``compute(lhs, rhs, *rest)``; the recipe is None if FP8 is off. ``compute`` declares the
    state of the op and computes. ``call.state_of(op, name, leaf)`` returns one array of the state, or None
    if it is not among the parameters.
    """
    return None if scope is None else scope.flags.get(_CALL)


def in_call(scope: flax.core.Scope, call: object) -> AbstractContextManager[None]:
    """Returns a context in which a scope, and those that are made below it, belong to a call."""
    return having(scope, flags=flax.core.freeze({**scope.flags, _CALL: call}))


def variables_of(scope: flax.core.Scope) -> Any:
    """Returns the variables in a scope, also while the scope is ``showing`` others."""
    return type(scope).variables(scope)


def showing(
    scope: flax.core.Scope, show: Callable[[Any], Any], on_put: Callable[[Any], None]
) -> AbstractContextManager[None]:
    """Returns a context in which a scope shows ``show(variables)``, and reports what is put in.

    ``on_put({collection: {name: value}})`` is called after a variable was made or changed.
    """

    def put_variable(collection: str, name: str, value: Any) -> None:
        type(scope).put_variable(scope, collection, name, value)
        on_put({collection: {name: value}})

    return having(scope, variables=lambda: show(variables_of(scope)), put_variable=put_variable)


def scope_below(scope: flax.core.Scope, name: str) -> Any:
    """Returns the scope of this name below a scope, the same one at each call."""
    return scope.push(name, reuse=True)


def change_class(instance: object, cls: type) -> None:
    """Makes an object, which may be frozen, an instance of another class."""
    object.__setattr__(instance, "__class__", cls)


def is_method(f: object) -> bool:
    """Returns whether Linen has wrapped a function of a module's class as a method."""
    return callable(f) and hasattr(f, "method_handler_wrapped")


def unwrapped(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of a module, marked so that Linen does not wrap it as a method."""
    f.method_handler_wrapped = True  # type: ignore[attr-defined]
    return f
