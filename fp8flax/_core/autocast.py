"""``autocast``: the ambient recipe, which follows the context and is part of what jit remembers."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import operator
import threading
from collections.abc import Iterator
from typing import Any

import jax

from fp8flax._core.options import check_bool
from fp8flax._core.recipes import Recipe, check_recipe

_OFF = "off"

_jit_key = jax.make_user_context(None)
"""The ambient recipe in jit's key: a ``_Key``, or None in a thread that never entered ``autocast``."""


# A user context belongs to the thread, and nothing tells us when one task of a thread gives way to another.
# So the thread's is a key that looks into a context variable whenever jit compares it with the key of a
# function that it has compiled. Once a cache may have stored a key, for which it is hashed, or an op traced
# under it, the key is fixed, and the thread goes on with a new one. (Python takes an object to equal itself
# without asking, so a key that is never fixed would match whatever it was stored with.)
#
# jit's table breaks if another thread changes it while two keys are compared, and any line of Python may
# let another thread run. So the comparison is put together from functions that are written in C.


class _Entry:
    """A ``with`` statement of ``autocast`` that has been entered, on that which was entered before it."""

    __slots__ = ("below", "compare", "is_open", "value")

    __call__ = property(operator.attrgetter("compare"))
    """Says whether a key is that of the recipe."""

    def __init__(self, value: Any, below: _Entry | None) -> None:
        self.value, self.below, self.is_open = value, below, True
        self.compare: Any = functools.partial(operator.eq, _token(value))

    def __iter__(self) -> Iterator[_Entry]:
        """Yields it and all below."""
        entry: _Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.below

    def lay_on(self, below: _Entry | None) -> None:
        self.below = below
        if not self.is_open:
            self.compare = below

    def close(self) -> None:
        """Lets what is below hold in all contexts that are in it."""
        self.is_open = False
        self.lay_on(self.below)


def _innermost(entry: _Entry) -> _Entry:
    return next(e for e in entry if e.is_open)


_tokens: dict[Any, object] = {None: None}


def _token(value: Any) -> object:
    """Returns an object of its own for each recipe, which C code compares; None for none."""
    return _tokens.setdefault(value, object())


_NOWHERE = _Entry(None, None)
"""Below all others, and always open."""


class _Thread(threading.local):
    """The context variable of one thread, the innermost ``_Entry``; other threads see no such variable."""

    var: contextvars.ContextVar[_Entry] | None = None
    get = staticmethod(
        functools.partial(operator.itemgetter(0), [functools.partial(operator.is_, object())])
    )
    """What they see: a comparison that is never true."""


class _Key:
    __slots__ = ("compare", "thread", "token")

    __eq__ = property(operator.methodcaller("compare"))
    """``compare`` returns the function that is called with the other key."""

    def __init__(self, thread: _Thread) -> None:
        self.thread, self.token = thread, _token(None)
        self.compare = functools.partial(operator.methodcaller("get"), thread)

    def fix(self) -> None:
        if _jit_key.value is self:
            self.token = _token(_ambient())
            self.compare = functools.partial(
                operator.itemgetter(0), [functools.partial(operator.eq, self.token)]
            )
            _jit_key(_Key(self.thread)).__enter__()  # to stay

    def __hash__(self) -> int:
        self.fix()
        return hash(self.token)


def _context_variable() -> contextvars.ContextVar[_Entry] | None:
    """Returns that of the thread; None if the thread never entered ``autocast``."""
    key = _jit_key.value
    return None if key is None else key.thread.var


def _ambient() -> Any:
    """Returns the recipe of ops that were given none, ``_OFF``, or None where nothing was said."""
    var = _context_variable()
    return None if var is None else _innermost(var.get()).value


def _fix_key() -> None:
    """Fixes the key that a function is being traced under, if one is."""
    if _jit_key.value is not None:
        _jit_key.value.fix()


class _Autocast(contextlib.ContextDecorator):
    def __init__(self, value: Any) -> None:
        self._value = value
        self._entries: list[_Entry] = []

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
        var = _context_variable()
        if var is None:
            thread, var = _Thread(), contextvars.ContextVar("autocast", default=_NOWHERE)
            thread.var, thread.get = var, var.get
            _jit_key(_Key(thread)).__enter__()  # to stay
        _fix_key()
        entry = _Entry(self._value, _innermost(var.get()))
        self._entries.append(entry)
        var.set(entry)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _fix_key()
        var = _context_variable()
        here = [] if var is None else list(var.get())
        mine = [entry for entry in here if entry in self._entries]
        entry = mine[0] if mine else self._entries[-1]
        self._entries.remove(entry)
        # Tasks that were started under it go on with it, in their copies of the context. But a generator
        # may be closed in another context than that it was entered in, where it is to end too.
        if not mine or kind is GeneratorExit:
            entry.close()
        if var is not None and mine:
            if entry is here[0]:
                var.set(here[1])
            else:
                here[here.index(entry) - 1].lay_on(entry.below)


def autocast(enabled: bool = True, recipe: Recipe | None = None) -> contextlib.AbstractContextManager[None]:
    """Sets the recipe of the FP8 ops without a recipe of their own, for the code under it.

    Use it in a ``with`` statement, any number of times, or as a decorator of a function. If several are
    nested, the innermost counts. The recipe is part of the cache key of ``jax.jit``: a jitted function that
    is called under another recipe is traced again. The backward pass uses the recipe of its forward pass,
    wherever it runs.

    ``autocast`` holds for the thread that enters it. Threads that are started under it, also by
    ``asyncio.to_thread``, must enter it themselves. An asyncio task starts with the recipe of the code that
    creates it, and keeps it. A generator shares the context of its caller, as with context variables: while
    it is suspended under ``autocast``, the caller is under it too. This ends when the generator leaves
    ``autocast`` or is closed.

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
    return _Autocast(gemms if enabled else _OFF)


def recipe_in_use(own: Recipe | None, default: Recipe) -> Recipe | None:
    """Returns the recipe of an op: its own, else the ambient one, else its default; None if FP8 is off."""
    _fix_key()
    ambient = _ambient()
    if ambient is _OFF:
        return None
    if own is not None:
        return own
    return default if ambient is None else ambient
