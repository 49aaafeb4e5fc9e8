"""Checks the values of options, such as the fields of a recipe, and raises errors that name the option."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8flax._core.names import PARAMS

_FLOAT32 = np.finfo(np.float32)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` if the value of an option is not one of the words in ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_int(name: str, value: Any, smallest: int, largest: int | None = None, why: str = "") -> int:
    """Returns an option as a Python int; it may be an integer of NumPy.

    Raises ``TypeError`` if the option is not an integer, and ``ValueError`` if it is out of range.

    Args:
        name: the name of the option.
        value: its value.
        smallest: the smallest valid value.
        largest: the largest valid value; None for no limit.
        why: a sentence that follows the error for a value above ``largest``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be an int; got {reprlib.repr(value)} of type {type(value).__name__}.")
    if number < smallest:
        raise ValueError(f"{name} must be {smallest} or more; got {number}.")
    if largest is not None and number > largest:
        raise ValueError(f"{name} must be {largest} or less; got {number}. {why}")
    return number


def check_epsilon(name: str, value: Any) -> None:
    """Raises ``TypeError`` if an option is not a number; it may be a number of NumPy.

    Raises ``ValueError`` if the option is not 0, and not a positive normal number in float32.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a float; got {value!r} of type {type(value).__name__}.")
    if not (value == 0 or float(_FLOAT32.tiny) <= value <= float(_FLOAT32.max)):
        raise ValueError(f"{name} must be 0 or a normal, positive float32; got {value}.")


def check_bool(name: str, value: Any) -> None:
    """Raises ``TypeError`` if an option is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")


def check_variables(variables: Any) -> None:
    """Raises ``TypeError`` if ``variables`` is not a mapping, but for instance a whole ``TrainState``."""
    if not isinstance(variables, Mapping):
        hint = " Pass state.params of a TrainState." if hasattr(variables, "opt_state") else ""
        hint += other_api_hint(variables, "flax.linen", "")
        raise TypeError(
            f"variables must be the collections of the model; got {type(variables).__name__}.{hint}"
        )


def check_no_train_state(variables: Any) -> None:
    """Raises ``TypeError`` if ``variables``, which may be any tree, is a whole ``TrainState``."""
    if hasattr(variables, "opt_state"):
        check_variables(variables)


def check_params(variables: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if variables lack the parameters, for instance because they are parameters."""
    if PARAMS not in variables:
        raise ValueError(
            f"variables must hold the collection {PARAMS!r}; got the names {sorted(variables)}. Pass "
            f"parameters as {{{PARAMS!r}: …}}, with the other collections beside them."
        )


def check_optimizer(tx: Any) -> None:
    """Raises ``TypeError`` if ``tx`` is no optimizer of Optax, but for instance ``optax.adam`` itself."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", f"a value of type {type(tx).__name__}")
        raise TypeError(f"tx must be an optimizer of Optax, such as optax.adam(1e-3); got {name}.")


_APIS = {"flax.linen": ("a Linen module", "fp8flax"), "flax.nnx": ("an NNX module", "fp8flax.nnx")}
"""For each API of Flax: what its modules are called in errors, and which package of ours takes them."""


def _api_of(value: Any) -> str | None:
    """Returns the API of Flax that a module or a class of modules belongs to; None for other values."""
    bases = (value if isinstance(value, type) else type(value)).__mro__
    modules = [base.__module__ for base in bases if base.__name__ == "Module"]
    return next((api for api in _APIS for name in modules if name.startswith(f"{api}.")), None)


def check_function(name: str, value: Any, example: str) -> None:
    """Raises ``TypeError`` if an argument is not a function, but for instance a model.

    Args:
        name: the name of the argument.
        value: its value.
        example: a function that the argument may be.
    """
    api = _api_of(value)
    if api is not None or not callable(value):
        got = type(value).__name__ if api is None else f"{type(value).__name__}, {_APIS[api][0]}"
        raise TypeError(f"{name} must be a function, such as {example}; got {got}.")


def wrong_model(model: Any, must: str, wanted: str, function: str, more: str = "") -> TypeError:
    """Returns the error for a value that is not a model, or not one that a function takes.

    Args:
        model: the value that was passed as a model.
        must: completes the sentence "model must …".
        wanted: the API that is required, ``"flax.linen"`` or ``"flax.nnx"``.
        function: the name of our function for the other API; empty if there is none.
        more: what to do, as a sentence that begins with a space.
    """
    if isinstance(model, type):
        more = more or " Pass an instance, not the class."
    hint = other_api_hint(model, wanted, function)
    return TypeError(f"model must {must}; got {type(model).__name__}.{more}{hint}")


def other_api_hint(model: Any, wanted: str, function: str) -> str:
    """Returns the last sentence of an error: it names our function for the API of the model.

    For an NNX module that was passed to ``fp8flax.freeze``, the sentence names ``fp8flax.nnx.freeze``. It
    is empty if the model does not belong to the other API of Flax.

    Args:
        model: the value that was passed as a model: an instance or a class.
        wanted: the API that is required, ``"flax.linen"`` or ``"flax.nnx"``.
        function: the name of our function in that package; empty if it has none for this.
    """
    api = _api_of(model)
    if api is None or api == wanted:
        return ""
    what, package = _APIS[api]
    return f" It is {what}: use {package}.{function}." if function else f" It is {what}: see {package}."
