"""``autocast``: the ambient recipe of a thread, which is part of the cache key of ``jax.jit``."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import weakref
from typing import Any, NamedTuple

import jax

from fp8flax._core.options import check_bool
from fp8flax._core.recipes import Recipe, check_recipe

_OFF = "off"
"""Takes the place of the ambient recipe if FP8 is off."""

_jit_key: Any = jax.make_user_context(None)
"""The ``_Ambient`` that the code of a thread runs under; None outside of ``autocast``."""


class _Ambient:
    """Holds an ambient recipe: a ``CustomRecipe``, None for each op's default, or ``_OFF``.

    Equal values share one ``_Ambient``, so jit compares its cache keys by identity. To compare two recipes
    runs Python code, and Python may then switch to another thread. That thread may change the cache of jit
    while this thread reads it.
    """

    __slots__ = ("__weakref__", "recipe")

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe


_ambients: weakref.WeakValueDictionary[Any, _Ambient] = weakref.WeakValueDictionary()
"""The one ``_Ambient`` of each recipe, as long as an ``autocast`` or the cache of jit refers to it."""


class _Entry(NamedTuple):
    """A ``with`` statement of ``autocast`` that was entered and not left yet."""

    owner: _Autocast
    setting: Any
    """JAX's context manager. When it exits, it restores the ``_Ambient`` from before it was entered."""
    task: asyncio.Task[Any] | None
    """The asyncio task that entered, if any."""


class _Thread(threading.local):
    """Holds, for each thread, the ``autocast`` statements that were entered and not left yet."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_thread = _Thread()


def _current_task() -> asyncio.Task[Any] | None:
    """Returns the asyncio task that runs now; None outside of an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class _Autocast(contextlib.ContextDecorator):
    """Sets the ambient recipe of a thread. One object may be entered again, also by another thread."""

    def __init__(self, recipe: Any) -> None:
        self._ambient = _ambients.setdefault(recipe, _Ambient(recipe))

    def __call__(self, func: Any) -> Any:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_of_kind(func) for is_of_kind in kinds):
            raise TypeError(
                f"autocast as a decorator takes functions that compute before they return; got {func!r}, a "
                "generator or coroutine function, whose body runs later. Write the with statement in its "
                "body."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        entries, task = _thread.entries, _current_task()
        inside = entries[-1].task if entries else None
        if inside is not None and inside is not task:
            who = "Code outside of all tasks" if task is None else f"The asyncio task {task.get_name()!r}"
            raise RuntimeError(
                f"{who} entered autocast while the task {inside.get_name()!r} of the same thread is inside "
                "of autocast. autocast sets one recipe for the whole thread, so each task would change the "
                "recipe of the other. Leave autocast before each await, enter it once around the code that "
                "starts the tasks, or give the ops a recipe of their own."
            )
        setting = _jit_key(self._ambient)
        setting.__enter__()
        entries.append(_Entry(self, setting, task))

    def __exit__(self, *error: object) -> None:
        entries = _thread.entries
        mine = [i for i, entry in enumerate(entries) if entry.owner is self]
        if not mine:
            raise RuntimeError(
                f"autocast was left in the thread {threading.current_thread().name!r}, which had not "
                "entered it. The recipe stays set in the thread that entered. Leave autocast, and close a "
                "generator that is suspended under it, in the thread that entered."
            )
        last = mine[-1]
        left = entries.pop(last)
        if last == len(entries):
            left.setting.__exit__(*error)
        else:
            # An inner entry is still open, so its recipe stays set. The next inner entry must restore, when
            # it is left, what was set before this one.
            entries[last] = entries[last]._replace(setting=left.setting)


def autocast(enabled: bool = True, recipe: Recipe | None = None) -> contextlib.AbstractContextManager[None]:
    """Sets the recipe of the FP8 ops without a recipe of their own, for the code under it.

    Use it in a ``with`` statement, any number of times, or as a decorator of a function. If several are
    nested, the innermost counts. The recipe is part of the cache key of ``jax.jit``: a jitted function that
    is called under another recipe is traced again. The backward pass uses the recipe of its forward pass,
    wherever it runs.

    ``autocast`` belongs to the thread that enters it. Other threads, also those of ``asyncio.to_thread``,
    must enter it themselves. While an asyncio task is inside of ``autocast``, the other tasks of the thread
    compute with its recipe, and get an error if they enter ``autocast``. While a generator is suspended
    under ``autocast``, its caller is under it too, until the generator leaves ``autocast`` or is closed.
    Contexts may be left in any order: the recipe in use is that of the last one entered and not yet left.

    A recipe with scaling state (``DelayedScaling``) needs that state in the variables. Call ``init`` of the
    model, or ``fp8flax.add_fp8_state``, under the recipe.

    Args:
        enabled: False turns FP8 off. Every FP8 op, also one with a recipe of its own, then multiplies in
            the dtype of its operands and leaves its state unchanged.
        recipe: the recipe of ops whose ``recipe`` is None. None takes their default, ``DelayedScaling()``.

    Returns:
        A context manager, which is also a decorator.

    Raises:
        TypeError: ``enabled`` is not a bool; ``recipe`` is neither a frozen recipe nor None; or the
            decorated function is a generator or a coroutine function.
        RuntimeError: ``autocast`` is entered while another asyncio task of the thread is inside of it; or
            is left in a thread that did not enter it.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> with fp8.autocast(recipe=fp8.MXFP8BlockScaling()):
        ...     list(layer.init(jax.random.key(0), jnp.ones((2, 4))))
        ['params']

    Source: Transformer Engine, ``autocast``.
    """
    given: Any = enabled
    if isinstance(given, Recipe):
        raise TypeError(f"enabled must be a bool; got {given!r}. Name the recipe: autocast(recipe=…).")
    check_bool("enabled", enabled)
    gemms = None if recipe is None else check_recipe(recipe)
    return _Autocast(gemms if enabled else _OFF)


def ambient_hint(needs_state: bool = False) -> str:
    """Returns the last sentence of an error that the ambient recipe can cause; empty if it cannot.

    FP8 being off can cause it. With ``needs_state``, a recipe without scaling state can cause it too.
    """
    recipe = None if _jit_key.value is None else _jit_key.value.recipe
    if recipe is _OFF:
        return " FP8 is off here, by autocast(enabled=False): call this outside of it."
    if needs_state and recipe is not None and not recipe.delayed:
        return " The recipe has no scaling state here, by autocast(recipe=…): call this outside of it."
    return ""


def recipe_in_use(own: Recipe | None, default: Recipe) -> Recipe | None:
    """Returns the recipe that an op uses; None if ``autocast`` has switched FP8 off.

    Args:
        own: the recipe that the op was given. It has precedence over that of ``autocast``. None if the op
            was given no recipe.
        default: the recipe of an op that was given no recipe, if ``autocast`` sets none.
    """
    ambient = _jit_key.value
    if ambient is None:
        return default if own is None else own
    if ambient.recipe is _OFF:
        return None
    if own is not None:
        return own
    return default if ambient.recipe is None else ambient.recipe
