"""Runs one call of a converted model: computes each contraction as the rules decide."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.traces import trace_behind, unwatched
from fp8flax._core.names import BY_OP, NOT_CONVERTED, OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import StateLeaf
from fp8flax._core.state.tree import path_names
from fp8flax._linen.op import Fp8Op
from fp8flax._linen.ops import OPS
from fp8flax._model.interception import Contraction, Interception, Path
from fp8flax._model.param_origin import ByIdentity, Origin
from fp8flax._model.record import seen_of
from fp8flax._model.rules import Decision, Rules, Site, why_unconverted
from fp8flax._model.state_places import STATE, merged, placed, split, state_at

# Linen's transformations pass the flags of a scope on to the scopes that they make.
_MARK = "fp8flax"
"""The flag that holds the calls that a scope belongs to."""


class Frame(NamedTuple):
    """A method of a module that is running."""

    module: Any
    method: str
    """The name of the method; empty for ``__call__`` and for compact methods."""
    counts: Counter[str]
    """The number of contractions without a kernel that the method has computed, by their names."""
    trace: Any
    """The trace of JAX that the method runs in."""

    @property
    def root(self) -> Any:
        """The root of the scope of the module."""
        return self.module.scope.root


class Call(Interception):
    """One call of a converted model by code outside of the model."""

    collections = (PARAMS, STATE, OVERWRITE_WITH_GRADIENT)
    """The collections that ``put_in`` and ``take_out`` convert."""
    is_init = False
    """Whether ``init`` makes the call, to make the variables."""
    on_op: Any = None
    """A function that computes the Linen ops of the call in another way; see ``running_calls``."""
    is_counting = False
    """Whether no contraction is converted, and each is computed in its ``Site.scope``."""

    def __init__(self, cls: type, rules: Rules) -> None:
        super().__init__()
        self.cls = cls
        self.rules = self._rules_here = rules
        self.decided: list[tuple[Site, Decision]] = []
        self.has_ops = False
        """Whether an FP8 op has run."""
        self.frames: list[Frame] = []
        self.is_apart = False
        """Whether the running module is applied to other variables than those of the model."""
        self._converts = rules.include != ()
        """Whether any contraction can be converted; otherwise all ops of the model were given by hand."""
        self._outer: Mapping[str, Any] = {}
        """The shapes of the variables that the caller has or gets, with the state among them."""
        self._made: set[Path] = set()
        """The ops for which ``init`` has made variables."""
        self._depth = 0
        """The length of the path of the model."""
        self._num_params = ByIdentity()
        """How many parameters, or modules with parameters, ``origins`` knows of each scope."""

    # How a call begins and ends.

    def mark(self, scope: Any) -> None:
        """Marks the scope of the model: the scopes in it belong to this call."""
        self._depth = len(scope.path)
        marks = (*scope.flags.get(_MARK, ()), self)
        for one in (scope, scope.root):
            one.flags = flax.core.freeze({**one.flags, _MARK: marks})

    def owns(self, root: Any) -> bool:
        """Returns whether the variables of a root scope are those of the model, which can hold state."""
        return bool(root.path) or any(one is self for one in root.flags.get(_MARK, ()))

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the caller as the method sees them: with JAX arrays."""
        variables = jax.tree.map(as_jax, variables)
        with_state = merged(variables)
        self._outer = jax.tree.map(as_struct, with_state)
        return with_state if self._converts else variables

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the method as the caller sees them."""
        if self.is_init:
            self._outer = jax.tree.map(as_struct, merged(variables))
            for path in self._made:
                if not state_at(self._outer, path[self._depth :]):
                    raise _lost(path)
        return split(variables)

    def finish(self, model: Any, method: str, args: Any, kwargs: Any, result: Any) -> None:
        """Records a call of a method with these arguments, and what it has computed.

        Raises:
            ValueError: ``init`` called ``__call__``, and a rule matched nothing or nothing is converted.
        """
        del result
        seen = seen_of(model)
        seen.decided = self.decided
        if method != "_fp8_run" and not self.is_counting:  # a function may hold tracers
            seen.calls[method] = jax.tree.map(as_struct, (args, kwargs))
        if method == "__call__" and model.is_initializing():
            self.rules.check_matched(self.decided)
            is_converted = self.has_ops or any(decision.converts for _, decision in self.decided)
            if self._converts and not (is_converted or self.is_counting):
                raise ValueError(why_unconverted(self.decided))

    # How methods run.

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
            arrays = state_at(_variables_of(scope.root), scope.path[len(scope.root.path) :])
            state = {name.swapcase(): x for name, x in arrays.items()}
            _variables_of(scope).update({OVERWRITE_WITH_GRADIENT: state} if state else {})
        # A method that is called by another method of its module shares the frame of that method.
        if self.frames and self.frames[-1].module.scope is scope:
            with self.watching():
                return run(*args, **kwargs)
        is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
        method = "" if is_main else context.method_name
        frame = Frame(module, method, Counter(), trace_behind())
        self.frames.append(frame)
        self._num_params.set(scope, None)  # a transformation may have replaced them
        try:
            is_apart = self.is_apart or not self.owns(scope.root)
            with self.having(is_apart=is_apart), self.watching(), _without_state_in_variables(scope):
                return run(*args, **kwargs)
        finally:
            self.frames.pop()  # JAX may keep the trace alive

    def look_for_params(self) -> None:
        """Records the parameters of the model that are new; only a running method makes parameters."""
        frame = self.frames[-1]
        scope: Any = frame.module.scope
        if self._num_params.get(frame.root) is None:
            self._num_params.set(frame.root, 0)
            self._add_params(frame.root)
        if frame.root.is_mutable_collection(PARAMS):
            number = len(_params_of(scope))
            if self._num_params.get(scope) != number:
                self._num_params.set(scope, number)
                self._add_params(scope)

    def _add_params(self, scope: Any) -> None:
        """Records the parameters in a scope."""
        if self.owns(scope.root):
            leaves = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(_params_of(scope)))[0]
            self.origins.add(((*scope.path, *path_names(path)), leaf) for path, leaf in leaves)

    # How a contraction is computed.

    def running(self) -> tuple[Path, Any]:
        """Returns the module whose method runs, after its path in the model."""
        module = self.frames[-1].module
        return module.scope.path, module

    def contract(self, found: Contraction) -> tuple[Any, str]:
        """Computes a contraction in FP8 if the rules convert it."""
        site, scope = found.site, self.frames[-1].module.scope
        site = site._replace(name=self._name_of(found), impossible=site.impossible or self._why_no_op())
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(pattern=None)  # it is one of the rules of another model
        bare = site._replace(module=type(site.module))  # the scope of a module must not outlive its trace
        self.decided.append((bare, decision))
        if self.is_counting:
            return None, site.scope
        if not decision.converts:
            return None, NOT_CONVERTED
        options = {"form": self._rules_here.form} if site.op.has_form else {}
        parent = scope.push(site.name, reuse=True)
        with jax.named_scope(BY_OP):
            op = OPS[site.op](recipe=decision.recipe, **options, parent=parent)
            return found.restore(op(*found.arguments)), ""

    def _name_of(self, found: Contraction) -> str:
        """Returns the name of the op of a contraction.

        In a Linen layer that takes ops, the op has the name that an op given by hand would have. Products
        of activations have no kernel to be named by; they are numbered.
        """
        site, frame = found.site, self.frames[-1]
        if found.kernel is None:
            product = f"{frame.method}_{site.kind}".lstrip("_")
            frame.counts[product] += 1
            return f"{site.op.name}_{product}_{frame.counts[product] - 1}"
        fields = ("dot_general_cls", "conv_general_dilated_cls")
        takes_ops = isinstance(site.module, nn.Einsum) or any(hasattr(site.module, one) for one in fields)
        is_of_kernel = any(x.path == (*site.module.scope.path, "kernel") for x in found.kernel.sources)
        # A layer of Linen has one contraction.
        if takes_ops and (is_of_kernel or type(site.module).__module__.startswith("flax.")):
            return f"{site.op.name}_0"
        return f"{site.op.name}_{site.name}"

    def _why_no_op(self) -> str | None:
        """Returns the reason why the running method can have no op; None if it can."""
        if isinstance(self.frames[-1].module, nn.WeightNorm | nn.SpectralNorm):
            return "part of a normalization of weights"
        if self.is_apart:
            return "in a module that is applied to variables of its own, where there is no place for state"
        return None

    def origin_of(self, value: Any) -> Origin | None:
        """Returns the origin of a value; None if it comes from anything but parameters."""
        self.look_for_params()
        return self.origins.of(value)

    def state_of(self, op: Fp8Op, leaf: StateLeaf) -> jax.Array | None:
        """Returns one array of the state of an op; ``init`` makes it. None if there is none."""
        if self.is_apart or not self._converts:
            return None
        value = self.stored(op, leaf.name)
        if value is None and op.is_initializing():
            value = jnp.full(leaf.shape, leaf.fill, jnp.float32)
            self._put(op, {leaf.name: value})
        if value is None and leaf.name.swapcase() in state_at(self._outer, op.path[self._depth :]):
            raise _lost(op.path)
        return value

    def stored(self, op: Fp8Op, name: str) -> jax.Array | None:
        """Returns an array that the variables hold for an op; None if there is none of this name."""
        same, others = self._roots_of(op.path)
        for root in (*same, *others):
            variables = _variables_of(root)
            if root in others:  # another trace, in which the parameters of a loop are stacked
                variables = {STATE: variables.get(STATE, {})}
            found = state_at(variables, op.path[len(root.path) :])
            if name.swapcase() in found:
                value: jax.Array = found[name.swapcase()]
                return value
        return None

    def _put(self, op: Fp8Op, arrays: Mapping[str, jax.Array]) -> None:
        """Puts arrays of an op into the variables, among the parameters if the op is in a loop."""
        root = self._roots_of(op.path)[0][0]
        collection = STATE if root.is_mutable_collection(STATE) else PARAMS
        if root.is_mutable_collection(collection):
            self._made.add(op.path)
            for name, below in placed(op.path[len(root.path) :], arrays).items():
                root.put_variable(collection, name, below)

    def _roots_of(self, path: Path) -> tuple[list[Any], list[Any]]:
        """Returns the root scopes of the running methods that hold the variables of an op.

        First those of the running trace, from the outermost: in this one, no ``nn.map_variables`` of the
        model has changed the state. Then those of other traces, from the innermost.
        """
        here = trace_behind()
        same, others = list[Any](), list[Any]()
        for frame in reversed(self.frames):
            if path[: len(frame.root.path)] == frame.root.path and self.owns(frame.root):
                if frame.trace is here and not others:
                    same.insert(0, frame.root)
                else:
                    others.append(frame.root)
        return same, others


class CountingCall(Call):
    """A call in which no contraction is converted, and each is computed in its ``Site.scope``."""

    is_counting = True


def _variables_of(scope: Any) -> Any:
    """Returns the variables in a scope, also those that ``scope.variables`` hides."""
    return type(scope).variables(scope)


def _params_of(scope: Any) -> Any:
    return _variables_of(scope).get(PARAMS, {})


def _lost(path: Path) -> ValueError:
    """Returns the error for an op in a loop whose state does not come through to it."""
    layer = "/".join(path[:-1])
    return ValueError(
        f"The scaling state of the FP8 op at {'/'.join(path)} is lost in an nn.map_variables around "
        "nn.scan or nn.vmap: its functions must return all parameters that they get. Let them return the "
        f"others unchanged, or leave the layer wide: quantize_model(model, exclude={layer!r})."
    )


@contextlib.contextmanager
def _without_state_in_variables(scope: Any) -> Iterator[None]:
    """A context in which ``self.variables`` of a module has the state where the caller has it."""
    before = vars(scope).get("variables")
    scope.variables = lambda: split(_variables_of(scope))
    try:
        yield
    finally:
        del scope.variables
        if before is not None:
            scope.variables = before


def as_struct(x: Any) -> Any:
    """Returns the shape and the dtype of an array; another value unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns a NumPy array as a JAX array, which keeps its identity in a computation."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
