"""Checks of the fields of options, on construction."""

from __future__ import annotations

from typing import Any

import numpy as np

_FLOAT32 = np.finfo(np.float32)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises ``ValueError`` where an option is none of these words."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def check_int(name: str, value: Any, smallest: int, largest: int | None = None, why: str = "") -> None:
    """Raises ``TypeError`` where an option is not an int, ``ValueError`` where it is out of range."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}.")
    if value < smallest:
        raise ValueError(f"{name} must be {smallest} or more; got {value}.")
    if largest is not None and value > largest:
        raise ValueError(f"{name} must be {largest} or less; got {value}. {why}")


def check_epsilon(name: str, value: Any) -> None:
    """Raises where an option is neither 0 nor a normal, positive float32."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a float; got {value!r} of type {type(value).__name__}.")
    if not (value == 0 or float(_FLOAT32.tiny) <= value <= float(_FLOAT32.max)):
        raise ValueError(f"{name} must be 0 or a normal, positive float32; got {value}.")


def check_bool(name: str, value: Any) -> None:
    """Raises ``TypeError`` where an option is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")


_APIS = {"flax.linen": ("a Linen module", "fp8flax"), "flax.nnx": ("an NNX module", "fp8flax.nnx")}


def if_of_other_api(model: Any, wanted: str, function: str) -> str:
    """Returns a sentence that names the function for a model of Flax's other API, or nothing.

    Args:
        model: what was given, perhaps a class.
        wanted: the API that is required, ``"flax.linen"`` or ``"flax.nnx"``.
        function: the name of the function, which both APIs have.
    """
    bases = [base.__module__ for base in (model if isinstance(model, type) else type(model)).__mro__]
    for api, (what, package) in _APIS.items():
        if api != wanted and any(name.startswith(f"{api}.") for name in bases):
            return f" It is {what}: use {package}.{function}."
    return ""
