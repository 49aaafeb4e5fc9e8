"""Checks the values of options, such as the fields of a recipe, and raises errors that name the option."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

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
    """Raises ``TypeError`` if an option is not a number.

    Raises ``ValueError`` if the option is not 0, and not a positive normal number in float32.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
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
        raise TypeError(
            f"variables must be the collections of the model; got {type(variables).__name__}.{hint}"
        )


def check_optimizer(tx: Any) -> None:
    """Raises ``TypeError`` if ``tx`` is no optimizer of Optax, but for instance ``optax.adam`` itself."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", f"a value of type {type(tx).__name__}")
        raise TypeError(f"tx must be an optimizer of Optax, such as optax.adam(1e-3); got {name}.")


_APIS = {"flax.linen": ("a Linen module", "fp8flax"), "flax.nnx": ("an NNX module", "fp8flax.nnx")}
"""For each API of Flax: what its modules are called in errors, and which package of ours takes them."""


def wrong_model(model: Any, must: str, wanted: str, function: str, more: str = "") -> TypeError:
    """Returns the error for a value that is not a model, or not one that a function takes.

    Args:
        model: the value that was passed as a model.
        must: completes the sentence "model must …".
        wanted: the API that is required, ``"flax.linen"`` or ``"flax.nnx"``.
        function: the name of our function, which exists in ``fp8flax`` and in ``fp8flax.nnx``.
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
        function: the name of our function, which exists in ``fp8flax`` and in ``fp8flax.nnx``.
    """
    bases = [base.__module__ for base in (model if isinstance(model, type) else type(model)).__mro__]
    for api, (what, package) in _APIS.items():
        if api != wanted and any(name.startswith(f"{api}.") for name in bases):
            return f" It is {what}: use {package}.{function}."
    return ""
