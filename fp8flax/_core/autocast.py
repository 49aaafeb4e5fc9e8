"""``autocast``: the ambient recipe of a thread, which is part of the cache key of ``jax.jit``."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import jax

from fp8flax._core.options import check_bool
from fp8flax._core.recipes import CustomRecipe, Recipe, check_recipe

F = TypeVar("F", bound=Callable[..., Any])

_jit_key: Any = jax.make_user_context(None)
"""The ``_Autocast`` that the code of a thread runs under; None outside of ``autocast``."""

_entered = threading.local()
"""Each thread has a list ``settings`` here: the JAX contexts that it has entered, from the outermost."""

_of_task: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("fp8flax_autocast", default=())
"""The JAX contexts that an asyncio task has entered, and those under which it was created.

Two tasks of one thread, where the second must not run under the first one's recipe::

    event                         settings of the thread    of task 1    of task 2
    task 1 enters a, and awaits   [a]                       (a,)         ()
    task 2 enters autocast        error: the last setting, a, is not of task 2"""

_Ambient: TypeAlias = CustomRecipe | Literal["off"] | None
"""What ``autocast`` sets: a recipe, the end of FP8, or the default of each op."""


class _Autocast(contextlib.ContextDecorator):
    """Sets the ambient recipe of a thread. One object may be entered again, also by another thread.

    Equal recipes share one object, so jit compares its cache keys by identity. To compare recipes would run
    Python code, during which another thread may change the cache of jit that this thread reads.
    """

    def __init__(self, recipe: _Ambient) -> None:
        self.recipe = recipe

    def __call__(self, func: F) -> F:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_of_kind(func) for is_of_kind in kinds):
            raise TypeError(
                f"autocast as a decorator takes functions that compute before they return; got {func!r}, a "
                "generator or coroutine function, whose body runs later. Write the with statement in its "
                "body."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        settings = vars(_entered).setdefault("settings", [])
        if settings and settings[-1] not in _of_task.get():
            raise RuntimeError(
                f"Another asyncio task of this thread is suspended under autocast. {_REMEDY}"
            )
        setting = _jit_key(self)
        setting.__enter__()
        settings.append(setting)
        _of_task.set((*_of_task.get(), setting))

    def __exit__(self, *error: object) -> None:
        settings = vars(_entered).get("settings", [])
        was_last, later = _jit_key.value is self, []
        while settings and _jit_key.value is not self:
            later.append(settings.pop())
            later[-1].__exit__(*error)
        if settings:
            own = settings.pop()
            own.__exit__(*error)
            _of_task.set(tuple(x for x in _of_task.get() if x is not own))
        while later:  # they stay in force
            settings.append(later.pop())
            settings[-1].__enter__()
        if not was_last:
            raise RuntimeError(
                "The autocast that is left is not the last one that this thread has entered. An asyncio "
                "task or a generator was suspended under autocast, while other code of the thread entered "
                f"or left it. {_REMEDY}"
            )


_autocasts: weakref.WeakValueDictionary[_Ambient, _Autocast] = weakref.WeakValueDictionary()
"""The one object for each recipe, as long as a caller or the cache of jit refers to it."""

_REMEDY = "Leave autocast before each await and yield, or give the ops a recipe of their own."


def autocast(enabled: bool = True, recipe: Recipe | None = None) -> contextlib.AbstractContextManager[None]:
    """Sets the recipe of the FP8 ops without a recipe of their own, for the code under it.

    Use it in a ``with`` statement, any number of times, or as a decorator of a function. If several are
    nested, the innermost counts. The recipe is part of the cache key of ``jax.jit``: a jitted function that
    is called under another recipe is traced again. The backward pass uses the recipe of its forward pass,
    wherever it runs.

    ``autocast`` belongs to the thread that enters it. Other threads must enter it themselves. All code that
    the thread runs in the meantime is under it, also that of other asyncio tasks, and of the caller of a
    suspended generator. So leave it before each ``await`` and ``yield``.

    A recipe with scaling state (``DelayedScaling``) needs that state in the variables. Call ``init`` of the
    model, or ``fp8flax.add_fp8_state``, under the recipe.

    Args:
        enabled: False turns FP8 off. Every FP8 op, also one with a recipe of its own, then multiplies in
            the dtype of its operands and leaves its state unchanged.
        recipe: the recipe of ops whose ``recipe`` is None. None takes their default, ``DelayedScaling()``.

    Raises:
        TypeError: ``enabled`` is not a bool; ``recipe`` is neither a frozen recipe nor None; or the
            decorated function is a generator or a coroutine function.
        RuntimeError: on entering, another asyncio task of the thread is suspended under ``autocast``; or a
            thread leaves another context than the last one that it has entered.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> with fp8.autocast(recipe=fp8.MXFP8BlockScaling()):
        ...     list(layer.init(jax.random.key(0), jnp.ones((2, 4))))
        ['params']

    Source: Transformer Engine, ``autocast``.
    """
    check_bool("enabled", enabled)
    gemms = None if recipe is None else check_recipe(recipe)
    ambient: _Ambient = gemms if enabled else "off"
    return _autocasts.setdefault(ambient, _Autocast(ambient))


def _ambient() -> _Ambient:
    return None if _jit_key.value is None else _jit_key.value.recipe


def is_off() -> bool:
    """Returns whether ``autocast`` has switched FP8 off."""
    return _ambient() == "off"


def recipe_in_use(own: Recipe | None, default: Recipe) -> Recipe | None:
    """Returns the recipe that an op uses; None if ``autocast`` has switched FP8 off.

    The op's own recipe comes first, then that of ``autocast``, then the default.
    """
    ambient = _ambient()
    return None if ambient == "off" else own or ambient or default
