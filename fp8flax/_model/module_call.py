"""Runs the methods of NNX modules, whose contractions are computed by attributes of the modules.

NNX has no hook around methods. So ``watch`` gives a module a subclass of its class, whose methods run in a
``ModuleCall``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8flax._compat.flax_internals import change_class, having
from fp8flax._compat.traces import current_handler, running_in, trace_behind, unwatched
from fp8flax._core.autocast import is_off
from fp8flax._core.names import NOT_CONVERTED, SWITCHED_OFF
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.types import Path
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.param_origin import Origin
from fp8flax._model.rules import Site
from fp8flax._model.subclasses import subclass_of
from fp8flax._nnx.ops import Fp8Op


def nodes_of(model: Any, *types: Any) -> dict[Path, Any]:
    """Returns the nodes of these types in a model, by their paths."""
    return {tuple(map(str, path)): node for path, node in nnx.iter_graph(model) if isinstance(node, types)}


@dataclasses.dataclass(frozen=True)
class LeftWide:
    """The function of a contraction that ``quantize_model`` leaves wide, with a name for audits."""

    scope: str
    plain: Callable[..., jax.Array]
    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes the contraction without FP8."""
        with jax.named_scope(self.scope or "model"), jax.named_scope(NOT_CONVERTED):
            return self.plain(*args, **kwargs)


class ModuleCall(Interception):
    """One call of a method of a module, and the methods inside of it that run in the same trace of JAX.

    A contraction is computed by the op that its module has for it. If the model and its layer are watched::

        model(x)                          begins a call
          self.layer(x)                   joins this call, with a frame of its own
          nnx.scan(run)(self.layer, x)    JAX traces ``run`` with new objects for the modules
            layer(x)                      begins a call, hidden from the outer call
    """

    opens = ("jit", "remat2")
    can_be_off = True
    """Whether modules compute without a call while FP8 is switched off."""
    kernels: tuple[type, ...] = (nnx.Param,)
    """The types of the variables that may be kernels."""

    def __init__(self, module: nnx.Module) -> None:
        super().__init__()
        nodes = nodes_of(module, nnx.Module, nnx.Variable)
        self.modules = {id(x) for x in nodes.values() if isinstance(x, nnx.Module)}
        """The identities of the modules that are a part of the call."""
        self.variables = {path: x for path, x in nodes.items() if isinstance(x, nnx.Variable)}
        seen = set[int]()
        for x in self.variables.values():
            value = x.get_raw_value()
            if not isinstance(x, nnx.Param) or isinstance(value, jax.core.Tracer):
                continue
            if isinstance(value, np.ndarray):
                x.set_raw_value(jnp.asarray(value))  # JAX would copy it at each use
            elif id(value) in seen:  # an array of two parameters; origins are known by the identity
                x.set_raw_value(value.copy())
            seen.add(id(value))

    @contextlib.contextmanager
    def in_frame(self, module: nnx.Module, method: str) -> Iterator[None]:
        """A context in which a method of a module runs."""
        places = {id(x): path for path, x in nodes_of(module, nnx.Variable).items()}
        below = {path: places[id(x)] for path, x in self.variables.items() if id(x) in places}
        for path in below:  # transformations may have written a new array into the variable
            x = self.variables[path]
            kind = "" if isinstance(x, self.kernels) else f"a variable of the type {type(x).__name__}"
            self.origins.add([(path, x.get_raw_value())], kind)
        frame = Frame(module, "" if method == "__call__" else method, trace_behind(), below=below)
        with having(self, frames=[*self.frames, frame]):
            yield

    def origin_of(self, value: Any) -> Origin | None:
        """Returns the origin of a value with paths from the running module; None if it is not below it."""
        origin, below = super().origin_of(value), self.frames[-1].below
        if origin is None or any(source.path not in below for source in origin.sources):
            return None
        return origin._replace(sources=tuple(x._replace(path=below[x.path]) for x in origin.sources))

    def choose(self, site: Site) -> Callable[..., jax.Array] | str:
        """Returns the op that the module has for a contraction, or the scope that says why it runs wide."""
        op = getattr(site.module, attribute_of(site), None)
        if op is None or isinstance(op, LeftWide) or site.impossible is not None:
            return NOT_CONVERTED
        if not isinstance(op, Fp8Op):  # of a frozen module
            return op
        if op._is_off:
            return SWITCHED_OFF
        return functools.partial(self._drawing_keys, op) if hasattr(op, "rngs") else op._run

    def _drawing_keys(self, op: Fp8Op, *arguments: Any, **keywords: Any) -> jax.Array:
        """Computes an op, perhaps in ``jax.checkpoint``, where NNX refuses to draw random keys."""
        with having(op, _key=running_in(self.frames[0].trace)(lambda: op.rngs())):
            return op._run(*arguments, **keywords)


def attribute_of(site: Site) -> str:
    """Returns the name of the attribute of a module that computes a contraction that it writes out."""
    return ("fp8_" if site.op is DotGeneral else f"fp8-{site.op.nnx_field}-") + site.name


def has_methods(node: Any) -> bool:
    """Returns whether a module may be watched.

    An attribute of a dict or a list would be an item, and one of ``ToNNX`` a variable of its Linen module.
    """
    return not isinstance(node, nnx.Dict | nnx.List | nnx.bridge.ToNNX | Fp8Op)


def watch(node: Any, make_call: type[ModuleCall] = ModuleCall) -> None:
    """Makes the methods of a module run in a ``ModuleCall``, perhaps of a subclass."""
    cls = getattr(type(node), "_fp8_base", type(node))
    is_pytree = not jax.tree_util.all_leaves([node])
    # Graphdefs compare classes, so the modules of equal models must have the same class.
    change_class(node, subclass_of(cls, _watched_class, is_pytree, make_call))


def _watched_class(cls: Any, is_pytree: bool, make_call: type[ModuleCall]) -> Any:
    """Returns a subclass of the class of a module; its methods run in ``make_call(module)``."""
    body: dict[str, Any] = {"_fp8_make_call": make_call}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, method in vars(base).items():
            # Decorators such as nnx.jit return other callables than functions, which Python binds, too.
            is_method = callable(method) and hasattr(type(method), "__get__")
            is_method &= not isinstance(method, type | staticmethod)
            if is_method and (name == "__call__" or not name.startswith("_")):
                body[name] = _watched(name, method)
    metaclass: Any = type(cls)
    return metaclass(cls.__name__, (cls,), body, pytree=is_pytree)


def _watched(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        run, make_call, call = method.__get__(self, type(self)), self._fp8_make_call, current_handler()
        if make_call.can_be_off and is_off():
            with jax.named_scope(SWITCHED_OFF):
                return run(*args, **kwargs)
        if type(call) is not make_call or id(self) not in call.modules:
            call = make_call(self)
            with unwatched(), call.watching(), call.in_frame(self, name):
                return run(*args, **kwargs)
        is_shared = call.frames[-1].module is self  # the methods of a module share a frame
        with contextlib.nullcontext() if is_shared else call.in_frame(self, name):
            return run(*args, **kwargs)

    return watched
