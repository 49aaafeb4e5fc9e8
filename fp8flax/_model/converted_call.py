"""Runs one call of a converted model: computes each contraction as the rules decide."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from fp8flax._compat.traces import trace_behind, unwatched
from fp8flax._core.names import BY_OP, NOT_CONVERTED, OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import StateLeaf
from fp8flax._core.state.tree import path_names
from fp8flax._linen.conversion import calls_of
from fp8flax._linen.op import Fp8Op
from fp8flax._linen.ops import OPS
from fp8flax._model.interception import Frame, Interception, Path
from fp8flax._model.param_origin import Origin
from fp8flax._model.rules import Decision, Rules, Site, why_unconverted
from fp8flax._model.state_places import merged, split, swapped


class Call(Interception):
    """One call of a converted model by code outside of the model.

    If there is ``counted``, it gets the contractions and the decisions about them by ``Site.scope``. Each
    contraction is then computed in this scope, and none is converted.
    """

    collections = (PARAMS, OVERWRITE_WITH_GRADIENT)
    """The collections that ``put_in`` and ``take_out`` convert."""
    path: Path = ()
    """The path of the model; it is empty unless a Linen model that is not converted calls it."""
    is_init = False
    """Whether ``init`` makes the call, to make the variables."""
    on_op: Any = None
    """A function that computes the Linen ops of the call in another way; see ``calls_of``."""

    def __init__(
        self, cls: type, rules: Rules, *, counted: dict[str, tuple[Site, Decision]] | None = None
    ) -> None:
        super().__init__()
        self.cls, self.counted = cls, counted
        self.rules = self._rules_here = rules
        self.decided: list[tuple[Site, Decision]] = []
        self.has_ops = False
        """Whether an FP8 op has run."""
        self.frames: list[Frame] = []
        self._made: set[Path] = set()
        """The paths of the arrays that ``init`` has made for ops."""

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the caller as the method sees them: with JAX arrays."""
        return merged(jax.tree.map(as_jax, variables))

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the method as the caller sees them.

        Raises:
            ValueError: the state that ``init`` made for an op in a loop does not come through.
        """
        for path in self._made:
            if _found(variables[PARAMS], path[len(self.path) :]) is None:
                layer = "/".join(path[:-2])
                raise ValueError(
                    f"The scaling state of the FP8 op in {layer} is lost in an nn.map_variables around "
                    "nn.scan or nn.vmap: its functions must return all parameters that they get. Let them "
                    "return the others unchanged, or leave the layer wide: "
                    f"quantize_model(model, exclude={layer!r})."
                )
        return split(variables)

    def finish(self, model: Any, method: str, args: Any, kwargs: Any) -> None:
        """Records a call of a method with these arguments, and checks what ``init`` has computed.

        Raises:
            ValueError: ``init`` called ``__call__``, and a rule matched nothing or nothing is converted.
        """
        if method != "_fp8_run":  # a function may hold tracers
            inputs_of_calls(model)[method] = jax.tree.map(as_struct, (args, kwargs))
        if method == "__call__" and self.is_init:
            self.rules.check_matched(self.decided)
            is_converted = self.has_ops or any(decision.converts for _, decision in self.decided)
            if not is_converted and self.counted is None:
                raise ValueError(why_unconverted(self.decided))

    # How methods run.

    @contextlib.contextmanager
    def in_frame(self, module: Any, method: str | None) -> Iterator[None]:
        """A context in which a method of a module runs."""
        scope = module.scope
        if not any(frame.scope.root is scope.root for frame in self.frames):
            self._add_params(scope.root)
        self.frames.append(Frame(scope.path, module, method, scope, trace_behind()))
        before = vars(scope).get("variables")
        # self.variables of a module has the state where the caller has it.
        scope.variables = lambda: split(_variables_of(scope))
        try:
            with self.watching():
                yield
        finally:
            self.frames.pop()  # JAX may keep the trace alive
            del scope.variables
            if before is not None:
                scope.variables = before

    @property
    def frame(self) -> Frame:  # type: ignore[override]
        """The innermost method that is running."""
        return self.frames[-1]

    def around(self, run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        """Runs one method of a module, whose contractions go to ``contract``; Linen calls it."""
        module, scope = context.module, context.module.scope
        if self.is_passing:
            return run(*args, **kwargs)
        if isinstance(module, Fp8Op) or scope is None:
            self.has_ops = self.has_ops or scope is not None
            with unwatched(), self.having(is_passing=True), jax.named_scope(BY_OP):
                return run(*args, **kwargs)
        if type(module).__module__ == "flax.linen.fp8_ops":  # Flax's own op looks in its collection
            path = OVERWRITE_WITH_GRADIENT, *scope.path[len(scope.root.path) :]
            state = _found(split(_variables_of(scope.root)), path)
            _variables_of(scope).update({OVERWRITE_WITH_GRADIENT: state} if state else {})
        # A method that is called by another method of its module shares the frame of that method.
        if self.frames and self.frame.scope is scope and self.frame.method is not None:
            with self.watching():
                return run(*args, **kwargs)
        is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
        with self.in_frame(module, "" if is_main else context.method_name):
            return run(*args, **kwargs)

    def look_for_params(self) -> None:
        """Records the parameters that the running method has made."""
        frame = self.frame
        if frame.scope.root.is_mutable_collection(PARAMS):
            number = len(_variables_of(frame.scope).get(PARAMS, {}))
            if frame.num_params != number:
                frame.num_params = number
                self._add_params(frame.scope)

    def _add_params(self, scope: Any) -> None:
        """Records the parameters in a scope, if they are those of the model."""
        if self in calls_of(scope):
            params = nn.meta.unbox(_variables_of(scope).get(PARAMS, {}))
            leaves = jax.tree_util.tree_flatten_with_path(params)[0]
            self.origins.add(((*scope.path, *path_names(path)), leaf) for path, leaf in leaves)

    # How a contraction is computed.

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Computes a contraction in FP8 if the rules convert it."""
        scope = self.frame.scope
        name = "0" if kernel is not None and self._is_of_a_layer(kernel) else site.name
        site = site._replace(name=f"{site.op.name}_{name}")
        if isinstance(site.module, nn.WeightNorm | nn.SpectralNorm):
            site = site._replace(impossible="part of a normalization of weights")
        elif self not in calls_of(scope) and site.impossible is None:
            reason = (
                "in a module that is applied to variables of its own, where there is no place for state"
            )
            site = site._replace(impossible=reason)
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(pattern=None)  # it is one of the rules of another model
        site = site._replace(module=type(site.module))  # the scope of a module must not outlive its trace
        self.decided.append((site, decision))
        if self.counted is not None:
            self.counted[site.scope] = site, decision
            return site.scope
        if not decision.converts:
            return NOT_CONVERTED
        options = {"form": self._rules_here.form} if site.op.has_form else {}
        with jax.named_scope(BY_OP):
            parent = scope.push(site.name, reuse=True)
            op = OPS[site.op](recipe=decision.recipe, **options, parent=parent)
            object.__setattr__(op, "has_kernel", kernel is not None)  # a module is frozen
            return by(op)

    def _is_of_a_layer(self, kernel: Origin) -> bool:
        """Returns whether the running module is a Linen layer that takes an op for this kernel.

        The op then has the name that an op given by hand would have.
        """
        module = self.frame.module
        fields = ("dot_general_cls", "conv_general_dilated_cls")
        if not (isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)):
            return False
        is_own = any(x.path == (*self.frame.path, "kernel") for x in kernel.sources)
        return is_own or type(module).__module__.startswith("flax.")  # it has one contraction

    def origin_of(self, value: Any) -> Origin | None:
        """Returns the origin of a value; None if it comes from anything but parameters."""
        self.look_for_params()
        return self.origins.of(value)

    def state_of(self, op: Fp8Op, leaf: StateLeaf) -> jax.Array | None:
        """Returns one array of the state of an op; ``init`` makes it. None if there is none."""
        value, (root, path) = self.stored(op, leaf.name), self._place(op, leaf.name)
        if value is None and op.is_initializing() and root.is_mutable_collection(PARAMS):
            value = jnp.full(leaf.shape, leaf.fill, jnp.float32)
            ((name, below),) = unflatten_dict({path: value}).items()
            root.put_variable(PARAMS, name, below)
            self._made.add((*root.path, *path))
        return value

    def stored(self, op: Fp8Op, name: str) -> jax.Array | None:
        """Returns an array that the parameters hold for an op; None if there is none of this name."""
        root, path = self._place(op, name)
        value: jax.Array | None = _found(_variables_of(root).get(PARAMS, {}), path)
        return value

    def _place(self, op: Fp8Op, name: str) -> tuple[Any, Path]:
        """Returns the root scope whose parameters hold an array of an op, and its path in them.

        It is the outermost root of the running trace: in this one, no ``nn.map_variables`` of the model has
        changed the state.
        """
        here, scope = trace_behind(), cast(Any, op.scope)
        roots = [frame.scope.root for frame in self.frames if frame.trace is here]
        own = (x for x in roots if self in calls_of(x) and op.path[: len(x.path)] == x.path)
        root = next(own, scope.root)
        return root, swapped((*op.path, name))[len(root.path) :]


def inputs_of_calls(model: Any) -> dict[str, Any]:
    """Returns, by the name of each method that was called, the arguments of its last call, without arrays.

    A converted model and its clones share the record.
    """
    found: dict[str, Any] = vars(model).setdefault("_fp8_inputs", {})
    return found


def _variables_of(scope: Any) -> Any:
    """Returns the variables in a scope, also those that ``scope.variables`` hides."""
    return type(scope).variables(scope)


def _found(tree: Any, path: Path) -> Any:
    """Returns the value at a path, or None."""
    for name in path:
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def as_struct(x: Any) -> Any:
    """Returns the shape and the dtype of an array; another value unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns a NumPy array as a JAX array, which keeps its identity in a computation."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
