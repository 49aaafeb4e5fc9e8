"""Finds the contractions of NNX modules, and computes those that a module writes out by its ops.

NNX has no hook around methods. So a module with an op for a written-out product gets a subclass of its
class, whose methods run in an ``Interception``. Each op is an attribute of its module, so that NNX's
transformations treat its state like the parameters of the module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import jax
from flax import nnx

from fp8flax._compat.traces import current_handler, unwatched
from fp8flax._core.names import NOT_CONVERTED
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.param_origin import Origin
from fp8flax._model.rules import Site
from fp8flax._model.wrapped_module import made_once
from fp8flax.nnx.ops import Fp8Op


class ModuleCall(Interception):
    """One call of a method of a module. Contractions with an op of the module are computed by it."""

    is_nnx = True

    def __init__(self, module: Any, method: str) -> None:
        super().__init__()
        self.frame = Frame((), module, "" if method == "__call__" else method)
        self._dry_run = getattr(module, "_fp8_dry_run", None)
        """The ``DryRun`` that gets the contractions, or None."""
        if self._dry_run is not None:
            self.custom_vjps = self._dry_run.custom_vjps

    def look_for_params(self) -> None:
        """Records the parameters of the module and of the modules below it."""
        if self.frame.num_params < 0:
            params = params_of(self.frame.module)
            self.frame.num_params = len(params)
            self.origins.add((tuple(map(str, path)), x.get_value()) for path, x in params)

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Computes a contraction by the op of the module for it, if there is one."""
        prefix = "fp8" if site.op is DotGeneral else f"fp8_{site.op.nnx_field}"
        name = f"{prefix}_{site.name.replace('-', '_')}"
        if self._dry_run is not None:
            return self._dry_run.scope_of(site._replace(name=name), kernel)
        op = getattr(site.module, name, None)
        return by(op) if isinstance(op, Fp8Op) else NOT_CONVERTED


def params_of(module: Any) -> list[tuple[Any, Any]]:
    """Returns the parameters in a module and the modules below it, each with its path."""
    return [(path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Param)]


def watch(node: Any) -> None:
    """Makes the methods of a module run in a ``ModuleCall``."""
    cls = getattr(type(node), "_fp8_base", type(node))
    is_pytree = not jax.tree_util.all_leaves([node])
    # Graphdefs compare classes, so the modules of equal models must have the same class.
    object.__setattr__(node, "__class__", _watched_class(cls, is_pytree))


@made_once
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
        call = current_handler()
        if isinstance(call, ModuleCall) and call.frame.module is self:
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
