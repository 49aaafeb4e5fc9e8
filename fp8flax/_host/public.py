"""Sets what users see of a package: ``__all__``, ``dir``, ``__module__``, docstrings, and moved names."""

from __future__ import annotations

import importlib
import inspect
import typing
import warnings
from typing import Any

from fp8flax._host.shared_text import insert_shared_text


def publish(namespace: dict[str, Any], *others: str) -> None:
    """Sets ``__all__`` and ``__dir__`` of a package, and ``__module__`` of its classes and functions.

    Every name without a leading underscore is public, unless it is a module. Classes and functions then
    print, pickle and document themselves as ``package.name``, and not with the private file that defines
    them. Their docstrings get the text that they share with others. One thing is lost:
    ``inspect.getsource`` looks for a class in the file of its ``__module__`` and raises OSError. It does
    find functions and methods.

    Args:
        namespace: ``globals()`` of the package, after all of its imports.
        others: names that only ``dir`` lists, and only if they exist. A public subpackage exists after it
            is imported.
    """
    package = namespace["__name__"]
    names = [n for n, value in namespace.items() if n[0] != "_" and not inspect.ismodule(value)]
    for name in names:
        insert_shared_text(namespace[name])
        _move(namespace[name], package)
    namespace["__all__"] = names
    namespace["__dir__"] = lambda: [*names, *(name for name in others if name in namespace)]


def warn_of_moved(namespace: dict[str, Any], home: str, *moved: str) -> None:
    """Sets ``__getattr__`` of a package: names that moved to another package work, with a warning.

    Type checkers do not see this function, so they report the names as missing.

    Args:
        namespace: ``globals()`` of the package.
        home: the package that has the names now.
        moved: the names, which the package itself does not define.
    """
    package = namespace["__name__"]

    def find(name: str) -> Any:
        if name not in moved:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(
            f"{package}.{name} will be removed in the next release. Use {home}.{name}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(home), name)

    namespace["__getattr__"] = find


def _move(value: Any, package: str) -> None:
    """Sets ``__module__`` of a class or function that a private file of the package defines."""
    origin = getattr(value, "__module__", None) or ""
    if not origin.startswith(f"{package}.") or not hasattr(value, "__qualname__"):
        return
    value.__module__ = package
    if not inspect.isclass(value):
        return
    annotations = inspect.get_annotations(value)
    if any(isinstance(hint, str) for hint in annotations.values()):
        # typing.get_type_hints evaluates string annotations in the namespace of __module__.
        value.__annotations__ = {name: _within(origin, hint) for name, hint in annotations.items()}
    for member in vars(value).values():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__module__ == origin:
            function.__module__ = package  # doctest runs only examples of methods of the same module


def _within(module: str, hint: Any) -> Any:
    """Returns an annotation; one that is a string will be evaluated in the namespace of ``module``."""
    if not isinstance(hint, str):
        return hint
    return typing.ForwardRef(hint, is_argument=False, module=module, is_class=True)
