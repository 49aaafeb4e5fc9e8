"""Finds the contractions of NNX modules, and computes those that a module writes out by its ops.

NNX has no hook around methods. So a module with an op for a written-out product gets a subclass of its
class, whose methods run in an ``Interception``. Each op is an attribute of its module, so that NNX's
transformations treat its state like the parameters of the module. In a ``DryRun`` all modules of a copy of
the model have such classes.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from contextvars import ContextVar
from typing import Any, cast

import jax
from flax import nnx

from fp8flax._compat.traces import current_handler, unwatched
from fp8flax._core.names import NOT_CONVERTED
from fp8flax._core.ops.row import DOT_GENERAL
from fp8flax._model.interception import Contraction, Interception, Path
from fp8flax.nnx.ops import Fp8Op

dry_run: ContextVar[Any] = ContextVar("dry_run", default=None)
"""The ``DryRun`` that gets all contractions, or None."""


class ModuleCall(Interception):
    """One call of a method of a module. Contractions with an op of the module are computed by it."""

    is_nnx = True
    in_field = False
    """Whether the function in the field of a layer runs, whose contraction an op there can compute."""

    def __init__(self, module: Any, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = "" if method == "__call__" else method
        self.num_products = 0
        self._is_looked_for = False

    def running(self) -> tuple[Path, Any]:
        """Returns the module; parameters are found below it, whatever its path."""
        return (), self.module

    def look_for_params(self) -> None:
        """Records the parameters of the module and of the modules below it."""
        if not self._is_looked_for:
            self._is_looked_for = True
            self.origins.add((tuple(map(str, path)), x.get_value()) for path, x in params_of(self.module))

    def contract(self, found: Contraction) -> tuple[Any, str]:
        """Computes a contraction by the op of the module for it, if there is one."""
        found = found._replace(site=found.site._replace(name=self._name_of(found)))
        if (run := dry_run.get()) is not None:
            return None, run.scope_of(self, found)
        op = getattr(self.module, found.site.name, None)
        if not isinstance(op, Fp8Op):
            return None, NOT_CONVERTED
        return found.restore(op(*found.arguments)), ""

    def _name_of(self, found: Contraction) -> str:
        """Returns the name of the attribute that holds the op of a contraction."""
        site = found.site
        prefix = "fp8" if site.op is DOT_GENERAL else f"fp8_{site.op.nnx_field}"
        if found.kernel is not None:
            return f"{prefix}_{site.name.replace('-', '_')}"
        self.num_products += 1
        return f"{prefix}_{self.method}_{site.kind}_{self.num_products - 1}".replace("__", "_")


def params_of(module: Any) -> list[tuple[Any, Any]]:
    """Returns the parameters in a module and the modules below it, each with its path."""
    return [(path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Param)]


# Graphdefs compare classes, so the modules of equal models must have the same class.
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def watch(node: Any) -> None:
    """Makes the methods of a module run in a ``ModuleCall``."""
    cls = getattr(type(node), "_fp8_base", type(node))
    found = _classes.get(cls) or _watched_class(cls, not jax.tree_util.all_leaves([node]))
    _classes[cls] = found
    object.__setattr__(node, "__class__", found)


def _watched_class(cls: Any, is_pytree: bool) -> Any:
    """Returns a subclass of the class of a module; its methods run in a ``ModuleCall``."""
    body: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": _reduced,
        "_fp8_base": cls,
    }
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, method in vars(base).items():
            if inspect.isfunction(method) and (name == "__call__" or not name.startswith("_")):
                body[name] = _watched(method)
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), body, pytree=is_pytree)


def _watched(method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(current_handler(), "module", None) is self:
            return method(self, *args, **kwargs)
        with unwatched(), ModuleCall(self, method.__name__).watching():
            return method(self, *args, **kwargs)

    return watched


def _reduced(self: Any, protocol: Any) -> Any:
    """Pickles a module with its own class, because the subclass cannot be imported by its name."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
    return _restored, (object.__new__(self._fp8_base),), *state


def _restored(node: Any) -> Any:
    watch(node)
    return node
