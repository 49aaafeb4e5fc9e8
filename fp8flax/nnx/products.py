"""Finds the contractions of NNX modules, and computes those that a module writes out by its ops.

NNX has no hook around methods. So the modules of a copy of the model get a subclass of their class, whose
methods run in an ``Interception``. In a dry run all modules have one. In a converted model only the modules
with an op for a written-out product have one; each op is an attribute of its module, so that NNX's
transformations treat its state like the parameters of the module.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from flax import nnx

from fp8flax._compat.traces import current_trace, unwatched
from fp8flax._core.names import BY_OP, NOT_CONVERTED
from fp8flax._core.ops.row import DOT_GENERAL, OpRow
from fp8flax._model.contraction_site import Contraction, contraction
from fp8flax._model.interception import Front, Interception
from fp8flax.nnx.ops import Fp8Op


class ModuleCall(Interception):
    """One call of a method of a module. Contractions with an op of the module are computed by it."""

    is_nnx = True

    def __init__(self, module: Any, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = "" if method == "__call__" else method
        self.num_products = 0
        self._is_looked_for = False

    def look_for_params(self) -> None:
        """Tells ``origins`` of the parameters in the module and the modules below it."""
        if not self._is_looked_for:
            self._is_looked_for = True
            self.origins.add((tuple(map(str, path)), x.get_value()) for path, x in params_of(self.module))

    def contract(self, row: OpRow, operands: Sequence[Any], params: dict[str, Any]) -> tuple[Any, str]:
        """Computes a contraction by the op of the module for it, if there is one."""
        found = contraction(row, operands, params, self.origins)
        op = getattr(self.module, self.name_of(found), None)
        if not isinstance(op, Fp8Op):
            return None, NOT_CONVERTED
        with jax.named_scope(BY_OP):
            return found.restore(op(*found.arguments)), ""

    def name_of(self, found: Contraction) -> str:
        """Returns the name of the attribute that holds the op of a contraction."""
        prefix = "fp8" if found.row is DOT_GENERAL else f"fp8_{found.row.nnx_field}"
        if found.kernel is not None:
            return f"{prefix}_{found.name(()).replace('-', '_')}"
        name = f"{prefix}_{self.method}_{found.kind}_{self.num_products}".replace("__", "_")
        self.num_products += 1
        return name


def params_of(module: Any) -> list[tuple[Any, Any]]:
    """Returns the parameters in a module and the modules below it, each with its path."""
    return [(path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Param)]


MakeCall = Callable[[Any, str], Interception | None]
"""A function of a module and the name of its method. It returns None for an op, whose inside is its own."""


def watched_class(node: Any, make_call: MakeCall) -> Any:
    """Returns a subclass of the class of a module; its methods run in the ``Interception`` of the call."""
    cls: Any = type(node)
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
                body[name] = _watched(method, make_call)
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), body, pytree=_is_pytree(node))


def _is_pytree(node: Any) -> bool:
    return not jax.tree_util.all_leaves([node])


def _watched(method: Any, make_call: MakeCall) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        front = current_trace()
        if isinstance(front, Front) and getattr(front.interception, "module", None) is self:
            return method(self, *args, **kwargs)
        call = make_call(self, method.__name__)
        with unwatched(), jax.named_scope(BY_OP) if call is None else call.watching():
            return method(self, *args, **kwargs)

    return watched


# Graphdefs compare classes, so the modules of equal models must have the same class.
_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def watch(node: Any) -> None:
    """Makes a module compute its written-out products by the ops that are its attributes."""
    cls = type(node)
    found = _classes.get(cls) or watched_class(node, ModuleCall)
    _classes[cls] = found
    object.__setattr__(node, "__class__", found)


def base_of(node: Any) -> Any:
    """Returns the class that a module had before ``watch``, or its class."""
    return getattr(type(node), "_fp8_base", type(node))


def _reduced(self: Any, protocol: Any) -> Any:
    """Pickles a module with its own class, because the subclass cannot be imported by its name."""
    _, _, *state = cast(tuple[Any, ...], object.__reduce_ex__(self, protocol))
    plain = object.__new__(base_of(self))
    return _restored, (plain,), *state


def _restored(node: Any) -> Any:
    watch(node)
    return node
