"""Checks the values of options, such as the fields of a recipe, and raises errors that name the option."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8flax._core.names import PARAMS


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` if the value of an option is not one of the words in ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_int(name: str, value: Any, smallest: int, largest: int | None = None) -> int:
    """Returns an option as a Python int; it may be an integer of NumPy.

    Raises ``TypeError`` if the option is not an integer, and ``ValueError`` if it is out of range.
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
        raise ValueError(f"{name} must be {largest} or less; got {number}.")
    return number


def check_bool(name: str, value: object) -> None:
    """Raises ``TypeError`` if an option is not a bool; it may be one of NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")


def check_variables(variables: object) -> None:
    """Raises ``TypeError`` if ``variables`` is not a mapping, but for instance a whole ``TrainState``."""
    if not isinstance(variables, Mapping):
        hint = " Pass state.params of a TrainState." if hasattr(variables, "opt_state") else ""
        raise TypeError(
            f"variables must be the collections of the model; got {type(variables).__name__}.{hint}"
        )


def check_no_train_state(variables: object) -> None:
    """Raises ``TypeError`` if ``variables``, which may be any tree, is a whole ``TrainState``."""
    if hasattr(variables, "opt_state"):
        check_variables(variables)


def check_params(variables: Mapping[str, object]) -> None:
    """Raises ``ValueError`` if variables lack the parameters, for instance because they are parameters."""
    if PARAMS not in variables:
        raise ValueError(
            f"variables must hold the collection {PARAMS!r}; got the names {sorted(variables)}. Pass "
            f"parameters as {{{PARAMS!r}: …}}, with the other collections beside them."
        )


def check_optimizer(tx: object) -> None:
    """Raises ``TypeError`` if ``tx`` is no optimizer of Optax, but for instance ``optax.adam`` itself."""
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        name = getattr(tx, "__name__", f"a value of type {type(tx).__name__}")
        raise TypeError(f"tx must be an optimizer of Optax, such as optax.adam(1e-3); got {name}.")


def check_function(name: str, value: object, example: str) -> None:
    """Raises ``TypeError`` if an argument is not a function, but for instance a model of Flax."""
    is_model = any(x.__name__ == "Module" and x.__module__.startswith("flax.") for x in type(value).__mro__)
    if is_model or not callable(value):
        raise TypeError(f"{name} must be a function, such as {example}; got {type(value).__name__}.")


def wrong_model(model: object, must: str, more: str = "") -> TypeError:
    """Returns the error for a value that is not a model, or not one that a function takes.

    ``must`` completes the sentence "model must …"; ``more`` is a sentence that begins with a space.
    """
    if isinstance(model, type):
        more = more or " Pass an instance, not the class."
    return TypeError(f"model must {must}; got {type(model).__name__}.{more}")
