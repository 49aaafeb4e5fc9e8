"""Runs one call of a converted Linen model: computes each contraction as the rules decide.

The scaling state is among the parameters while a converted model runs. The author of a model wrote
``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling state in mind. Among the
parameters, the state is stacked, sliced and shared as the kernels are. For a scan of two ``nn.Dense(8)``::

    the caller has                                a method of the scanned layer sees
    --------------                                ----------------------------------
    params/                                       params/
      layers/Dense_0/kernel         (2, 4, 8)       Dense_0/kernel                             (4, 8)
    _overwrite_with_gradient/                       Dense_0/fP8dOTgENERALoP_0/INPUT_SCALE      (1,)
      layers/Dense_0/
        Fp8DotGeneralOp_0/
          input_scale               (2, 1)

Names are written in the other case there. So no parameter of the model has such a name, and the filter
``{"kernel"}`` of ``nn.WeightNorm`` does not match.

When code outside of the model calls a method, ``within_call`` makes a ``Call``. Its methods are called in
this order. Subclasses change some of them: C is ``CountingCall`` (``linen.py``), which lists contractions;
R and S are ``RecordingCall`` and ``ServingCall`` (``_serve/linen.py``), which trace and run frozen models::

    who calls             the method     changed by   which
    ``nn.map_variables``  ``put_in``     R, S         moves the state of all ops among the parameters
    Linen                 ``around``                  runs each method of a module, in the next two contexts
    ``around``            ``in_frame``   C            records which values are parameters
    ``in_frame``          ``watching``                sends the primitives to the call, unless FP8 is off
    ``on_primitive``      ``choose``     C            makes the op of a contraction that the rules convert
    the op                ``on_op``      C, R, S      computes the op in another way, if there is one
    the op                ``state_of``                reads the state of the op; in ``init`` makes the state
    ``nn.map_variables``  ``take_out``   S            moves the state back
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import wraps
from typing import Any, cast

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.module import InterceptorContext
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8flax._compat.flax_internals import (
    call_of,
    having,
    in_call,
    running,
    scope_below,
    showing,
    unwrapped,
    variables_of,
)
from fp8flax._compat.traces import trace_behind, unwatched
from fp8flax._core import names
from fp8flax._core.autocast import is_off
from fp8flax._core.ops.op import StateLeaf
from fp8flax._core.state.tree import path_names
from fp8flax._core.types import Path, PyTree
from fp8flax._linen.op import Fp8Op
from fp8flax._linen.ops import OPS
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.rules import Site

Variables = Mapping[str, PyTree]
"""Collections of variables by their names."""


def within_call(method: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a method or a function of a converted model; it begins a ``Call`` if none is running."""

    @wraps(method, updated=())
    def begin(self: Any, *args: PyTree, **kwargs: PyTree) -> PyTree:
        outer = call_of(self.scope)
        # A converted model inside of another one is a part of its call; a frozen model has its own call.
        is_part = outer is not None and (outer.cls is type(self) or self._fp8_make_call is Call)
        if self.scope is None or is_part:
            return method(self, *args, **kwargs)
        call = self._fp8_make_call(self)

        def run(module: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
            with call.in_frame(module, None):
                return method(module, *args, **kwargs)

        collections = names.PARAMS, names.OVERWRITE_WITH_GRADIENT
        mapped = nn.map_variables(unwrapped(run), collections, call.put_in, call.take_out, mutable=True)
        # The interception is also around setup, which Linen runs before the method.
        with in_call(self.scope, call), running(self), nn.intercept_methods(call.around):
            try:
                result = mapped(self, *args, **kwargs)
            except AssertionError as error:  # nn.scan does not say what is wrong
                error.add_note(
                    "Scaling state is stacked as parameters are. Stack them along axis 0, 1 or -1."
                )
                raise
        if call.is_init and getattr(method, "__name__", "") == "__call__":
            call.rules.check(call.decided.values(), has_ops=call.has_ops)
        return result

    return nn.nowrap(begin)


class Call(Interception):
    """One call of a converted model by code outside of the model."""

    on_op: Callable[..., jax.Array] | None = None
    """A method of subclasses that computes the Linen ops of the call in another way; see ``call_of``."""
    has_ops = False
    """Whether an FP8 op that the user gave to a layer has run."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        # A method of the same class inside of the call begins no other call.
        self.cls, self.rules = type(model), model._fp8_rules
        # The path is empty unless a Linen model that is not converted calls the model.
        self.path, self.is_init = model.scope.path, model.is_initializing()
        self.decided: dict[Hashable, Site] = {}
        """The contractions with the decisions about them, by their keys."""
        self._kernels: dict[Path, str | None] = {}
        """``Site.kernel`` of each op, by the path of the op."""
        self._made: set[Path] = set()
        """The paths among the parameters of the arrays that ``init`` has made for ops."""

    def put_in(self, variables: Variables) -> Variables:
        """Returns the collections of the caller as the method sees them."""
        return state_in_params(as_own_arrays(variables))

    def take_out(self, variables: Variables) -> Variables:
        """Returns the collections of the method as the caller sees them, if no state is lost."""
        for path in self._made:
            if _value_at(variables[names.PARAMS], path[len(self.path) :]) is None:
                layer = "/".join(path[:-2])
                raise ValueError(
                    f"The scaling state of the FP8 op in {layer} is lost in an nn.map_variables around "
                    "nn.scan or nn.vmap: its functions must return all parameters that they get. Let them "
                    "return the others unchanged, or leave the layer wide: "
                    f"quantize_model(model, exclude={layer!r})."
                )
        return state_apart(variables)

    def around(self, run: PyTree, args: PyTree, kwargs: PyTree, context: InterceptorContext) -> PyTree:
        """Runs one method of a module, whose contractions go to ``choose``; Linen calls it."""
        module, scope = context.module, context.module.scope
        if self.is_passing or scope is None:
            return run(*args, **kwargs)
        if isinstance(module, Fp8Op):  # the user gave it to a layer
            self.has_ops = True
            with unwatched(), having(self, is_passing=True), jax.named_scope(names.BY_OP):
                return run(*args, **kwargs)
        if type(module).__module__ == "flax.linen.fp8_ops":  # Flax's own op looks in its collection
            path = names.OVERWRITE_WITH_GRADIENT, *scope.path[len(scope.root.path) :]
            state = _value_at(state_apart(variables_of(scope.root)), path)
            variables_of(scope).update({names.OVERWRITE_WITH_GRADIENT: state} if state else {})
        # A method that is called by another method of its module shares the frame of that method.
        outer = self.frames[-1:]
        is_shared = any(frame.module.scope is scope and frame.method is not None for frame in outer)
        is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
        method = "" if is_main else context.method_name
        with self.watching() if is_shared else self.in_frame(module, method):
            return run(*args, **kwargs)

    @contextlib.contextmanager
    def in_frame(self, module: nn.Module, method: str | None) -> Iterator[None]:
        """A context in which a method of a module runs.

        Code of the model that reads the variables of the scope finds the state where the caller has it.
        """
        scope = cast(flax.core.Scope, module.scope)
        # A transformation such as nn.scan makes a new root, whose variables are slices.
        if not any(frame.module.scope.root is scope.root for frame in self.frames):
            self._record_params(scope.root, variables_of(scope.root))
        frames = [*self.frames, Frame(module, method, trace_behind(), scope.path)]
        shown = showing(scope, state_apart, lambda new: self._record_params(scope, new))
        with having(self, frames=frames), shown, self.watching():
            yield

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which contractions go to ``choose``, unless FP8 is switched off."""
        if is_off() and self.on_op is None and not self.is_init:  # init decides about contractions
            return jax.named_scope(names.SWITCHED_OFF)
        return super().watching()

    def _record_params(self, scope: flax.core.Scope, variables: Variables) -> None:
        """Records the origins of the variables in a scope, if they are those of the model."""
        if call_of(scope) is not self:  # of a module that the model applies to other variables
            return
        # One array may be in two collections; then it is a parameter.
        for collection in sorted(variables, key=lambda x: x != names.PARAMS):
            kind = "" if collection == names.PARAMS else f"a variable of the collection {collection!r}"
            leaves = jax.tree_util.tree_flatten_with_path(variables[collection])[0]
            self.origins.add((((*scope.path, *path_names(path)), leaf) for path, leaf in leaves), kind)

    def choose(self, site: Site) -> Callable[..., jax.Array] | str:
        """Returns the op of a contraction if the rules convert it, or the scope that says why not."""
        module, site = site.module, self.decide(site)
        if not site.converts:
            return names.NOT_CONVERTED
        if self.on_op is None and is_off():
            return names.SWITCHED_OFF
        known = self._kernels.setdefault((*site.path, site.name), site.kernel)
        if known != site.kernel:
            raise ValueError(
                f"{site.place or 'The model'!r} multiplies by {known!r} and by {site.kernel!r}. Both "
                f"would have one FP8 op, {site.name}. Rename a parameter, or leave one of them wide: "
                f"quantize_model(model, exclude={f'^{re.escape(str(site.kernel))}$'!r})."
            )
        scope = scope_below(module.scope, site.name)
        op = OPS[site.op](recipe=site.recipe, **dict(site.options), parent=scope)
        object.__setattr__(op, "has_kernel", site.kernel is not None)  # a module is frozen
        return op._run

    def decide(self, site: Site) -> Site:
        """Returns a contraction with the name of its op and the decision of the rules, and records it."""
        module, impossible = site.module, site.impossible
        if isinstance(module, nn.WeightNorm | nn.SpectralNorm):
            impossible = "part of a normalization of weights"
        elif call_of(module.scope) is not self:
            impossible = impossible or (
                "in a module that is applied to variables of its own, where there is no place for state"
            )
        site = site._replace(name=f"{site.op.name}_{_name_in_layer(site)}", impossible=impossible)
        # A converted model inside of this one has its own rules.
        modules = (frame.module for frame in reversed(self.frames))
        rules = next(module._fp8_rules for module in modules if hasattr(module, "_fp8_rules"))
        # A module has a scope, which must not outlive its trace.
        site = rules.decide(site)._replace(module=type(module))
        if rules is not self.rules:
            site = site._replace(pattern=None)  # the check of the rules takes their own
        self.decided[site.key] = site
        return site

    def state_of(self, op: Fp8Op, name: str, leaf: StateLeaf | None = None) -> jax.Array | None:
        """Returns an array of an op that is among the parameters; None if there is none of this name.

        With ``leaf``, ``init`` makes the array. The array is read from the root of the outermost module
        that runs in the current trace. For an op inside of ``nn.map_variables`` in a layer of ``nn.scan``::

            root of                 trace      the state there
            the model               of apply   of all layers, stacked
            the layer of nn.scan    of a step  of one layer: is read
            nn.map_variables        of a step  perhaps changed by the functions, as if it were a weight
        """
        here, default = trace_behind(), cast(flax.core.Scope, op.scope).root
        roots = (frame.module.scope.root for frame in self.frames if frame.trace is here)
        own = (x for x in roots if call_of(x) is self and op.path[: len(x.path)] == x.path)
        root = next(own, default)
        path = _swapped((*op.path, name))[len(root.path) :]
        value: jax.Array | None = _value_at(variables_of(root), (names.PARAMS, *path))
        if value is None and leaf and op.is_initializing() and root.is_mutable_collection(names.PARAMS):
            value = jnp.full(leaf.shape, leaf.fill, jnp.float32)
            ((name, below),) = unflatten_dict({path: value}).items()
            root.put_variable(names.PARAMS, name, below)
            self._made.add((*root.path, *path))
        return value


def _name_in_layer(site: Site) -> str:
    """Returns the end of the name of an op; in a layer of Flax it is that of an op given by hand.

    This is ``0`` in ``nn.Dense``, whose op is ``Fp8DotGeneralOp_0``, and ``w`` for ``x @ self.w``.
    """
    module, fields = site.module, ("dot_general_cls", "conv_general_dilated_cls")
    is_layer = isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)
    if is_layer and site.sources:
        # A layer of Flax has one contraction. (But other code may have added parameters, such as Qwix's
        # kernel_lora_a.)
        own = [source.path[-1] for source in site.sources if source.path[:-1] == site.path]
        if "kernel" in own or (type(module).__module__.startswith("flax.") and not own):
            return "0"
    return site.name


def state_in_params(variables: Variables) -> dict[str, PyTree]:
    """Returns variables as the model sees them: with the state among the parameters."""
    return _moved(variables, names.OVERWRITE_WITH_GRADIENT, names.PARAMS)


def state_apart(variables: Variables) -> dict[str, PyTree]:
    """Returns variables as the caller sees them: with the state in its own collection."""
    return _moved(variables, names.PARAMS, names.OVERWRITE_WITH_GRADIENT)


def _moved(variables: Variables, here: str, there: str) -> dict[str, PyTree]:
    """Returns variables with the arrays of ops moved to another collection."""
    leaves = {*names.STATE_LEAF_NAMES, names.KERNEL_TENSOR_SCALE}
    if here == names.PARAMS:
        leaves = {name.swapcase() for name in leaves}
    flat: dict[Path, PyTree] = {}
    for path, x in flatten_dict(dict(variables), keep_empty_nodes=True).items():
        is_of_op = path[0] == here and path[-1] in leaves
        flat[(there, *_swapped(path[1:])) if is_of_op else path] = x
    return {**{name: {} for name in variables}, **unflatten_dict(flat)}


def _swapped(path: Path) -> Path:
    """Returns the path of an array of an op in the parameters, given that in its collection, or back."""
    *module, op, leaf = path
    return (*module, op.swapcase(), leaf.swapcase())


def _value_at(tree: PyTree, path: Path) -> PyTree:
    """Returns the value at a path, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def as_own_arrays(tree: PyTree) -> PyTree:
    """Returns a tree in which each array is a JAX array with an identity of its own.

    A NumPy array does not keep its identity in a computation, and the caller may have put one array in two
    places.
    """
    seen = set[int]()

    def own(x: PyTree) -> PyTree:
        if isinstance(x, np.ndarray):
            return jnp.asarray(x)
        if isinstance(x, jax.Array) and id(x) in seen:
            return x.copy()
        seen.add(id(x))
        return x

    return jax.tree.map(own, tree)
