"""Finds the contractions that the methods of Linen modules compute, whatever they are written with.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a trace of our own stands in front of the one that was current: it hands every primitive on as
it is, except that contractions go to a handler, together with the module. It also remembers which values
are parameters, and how they were cast, reshaped, transposed and joined since.

Internals: ``jax._src.core``, for the class of traces and how the current one is set;
``jax._src.source_info_util``, for the scopes around a contraction; and what a scope of Flax holds,
``_variables``.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import numpy as np
from jax._src import core, source_info_util

from fp8flax._core.names import BY_OP, NOT_CONVERTED, SITE
from fp8flax._state import key_name

DOT, CONV, RAGGED_DOT = "dot_general", "conv_general_dilated", "ragged_dot_general"
_CONTRACTIONS = (DOT, CONV, RAGGED_DOT)
# What changes the place or the dtype of values, and nothing else.
_MOVEMENTS = (
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "transpose"),
)
# Of these, what leaves every value in its place.
_CASTS = ("convert_element_type", "copy", "copy_p", "sharding_constraint")
# What may return an operand as it is.
_RETURNING = ("jit", "checkpoint", "remat2")  # two names of jax.checkpoint
_PARAMS = "params"
_PARAMETER = "parameter"  # in the place of a primitive, for a parameter as it is
# Flags of scopes, which Linen's transformations pass on: to which interceptions one belongs; the paths of
# what nn.map_variables has made of parameters, and of these parameters.
_MARK, _MAPPED = "fp8flax", "fp8flax_mapped"
_NOTHING: tuple[frozenset[Any], frozenset[Any]] = frozenset(), frozenset()
# Whole elements of a stack of names, where a module's name may only begin alike.
_IN_OP = re.compile(rf"\b{BY_OP}\b")
_OURS = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{SITE}[0-9a-f]{{8}})\b")


class Source(NamedTuple):
    """A parameter as a method sees it: inside ``nn.scan``, a slice of what the variables hold."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


class Derived(NamedTuple):
    """What a value owes to parameters."""

    sources: tuple[Source, ...]
    """The parameters that it is made of, alone."""
    rebuild: Callable[[tuple[jax.Array, ...], bool], jax.Array] | None
    """Makes it from arrays of the shapes of ``sources``, with or without casts; None if it is computed, and
    not only moved."""
    moves: Any
    """What was moved how, to compare: the primitive, its parameters, which of its results it is, and the
    moves of its operands. Arithmetic that keeps the shape does not count."""

    @property
    def is_one_parameter(self) -> bool:
        """Whether it is one parameter, at most cast."""
        move = self.moves
        while move[0] in _CASTS:
            (move,) = move[3]
        return bool(move[0] == _PARAMETER) and self.rebuild is not None

    def part(self, summed: Sequence[int]) -> str:
        """Returns what tells this use of a parameter from others, the same whenever it is computed.

        Args:
            summed: the dimensions over which a contraction sums.

        Nothing for a parameter that is taken whole; ``-1`` for ``w[1]``, ``-64-128`` for ``w[:, 64:128]``;
        and ``-T`` after that where the parameter's last dimension is summed over, as in ``x @ w.T``. What
        was reshaped or joined counts as whole.
        """
        chain = [self.moves]
        while chain[-1][0] != _PARAMETER:
            if len(chain[-1][3]) != 1:
                return ""
            chain.append(chain[-1][3][0])
        rank = len(chain.pop()[1]["of"])
        axes: list[int] | None = list(range(rank))
        text = ""
        for name, params, index, _ in reversed(chain):
            if axes is None or name in ("broadcast_in_dim", "reshape"):
                axes = None
            elif name == "transpose":
                axes = [axes[i] for i in params["permutation"]]
            elif name == "squeeze":
                axes = [axis for i, axis in enumerate(axes) if i not in params["dimensions"]]
            text += _range_of(name, params, index)
        if axes and len(axes) > 1 and rank - 1 in (axes[i] for i in summed):
            text += "-T"
        return text


def _range_of(name: str, params: dict[str, Any], index: int) -> str:
    """Returns what a slice or a split takes, of the dimensions that it does not take whole."""
    if name == "split":
        start = sum(params["sizes"][:index])
        return f"-{start}-{start + params['sizes'][index]}"
    if name != "slice":
        return ""
    limits, shape = params["limit_indices"], params["of"]
    ranges = [(a, b) for a, b, size in zip(params["start_indices"], limits, shape) if (a, b) != (0, size)]
    return "".join(f"-{a}" if b == a + 1 else f"-{a}-{b}" for a, b in ranges)


class Frame(NamedTuple):
    """A method of a module that is running."""

    module: nn.Module
    method: str
    """Empty for ``__call__`` and for compact methods."""
    counts: dict[str, int]
    """How many contractions of a kind it has computed."""
    is_apart: bool = False
    """Whether the module is one that a method applies to variables of its own, outside of the model."""

    @property
    def path(self) -> tuple[str, ...]:
        """The module's."""
        scope: Any = self.module.scope
        return scope.path

    def count(self, kind: str) -> int:
        """Returns the number of this contraction of its kind."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return number


class Contraction(NamedTuple):
    """A contraction that a method is about to compute."""

    primitive: str
    operands: tuple[Any, ...]
    params: dict[str, Any]
    derived: tuple[Derived | None, ...]
    """For each of the first two operands, what it owes to parameters."""
    frame: Frame


class Left(NamedTuple):
    """What a handler returns for a contraction to be computed as it is."""

    scope: str = NOT_CONVERTED
    """The ``jax.named_scope`` that it is computed in."""


Handler = Callable[[Contraction], Any]
"""Returns the result of a contraction, or a ``Left``."""


class _ByIdentity:
    """A dict by the identity of objects. It keeps none alive: a tracer must not outlive its trace."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}

    def get(self, key: Any) -> Any:
        """Returns what was set for this very object, or None."""
        _, value = self._found.get(id(key), (None, None))
        return value

    def set(self, key: Any, value: Any) -> None:
        """Sets a value that may not refer to the object."""
        found, name = self._found, id(key)
        try:
            held: Any = weakref.ref(key, lambda _: found.pop(name, None))
        except TypeError:  # a number of NumPy
            held = key
        found[name] = held, value


class Interception:
    """What all traces of one call of a model share: the handler, and where values come from."""

    def __init__(
        self,
        handler: Handler,
        leave_alone: Callable[[nn.Module], bool],
        model: type[nn.Module],
        state: str,
    ) -> None:
        self.handler = handler
        self._leave_alone = leave_alone
        self._model = model
        self._state = state
        self._derived = _ByIdentity()
        self._constants = _ByIdentity()
        self._known = _ByIdentity()
        self.used_otherwise: set[tuple[str, ...]] = set()
        """Parameters that something reads that is neither a contraction nor a movement."""
        self.is_passing = False
        """Whether a trace has dealt with what reaches those behind it, as under ``nn.vmap``."""
        self.is_apart = False
        """Whether a module runs that a method applies to variables of its own, outside of the model."""

    def derived(self, value: Any, scope: Any) -> Derived | None:
        """Returns what a value owes to a scope's parameters; None if it has anything from elsewhere."""
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        found: Derived | None = self._derived.get(value)
        if found is None:
            self._look_for_params(scope.root)
            found = self._derived.get(value)
        return found

    def mark(self, scope: Any) -> None:
        """Remembers that a scope, and what Linen makes of it, is the model's."""
        _set_flag(scope, _MARK, (*scope.flags.get(_MARK, ()), self))

    def has_place(self, root: Any) -> bool:
        """Tells whether the variables of a root are the model's, with a place for state."""
        return bool(root.path) or any(one is self for one in root.flags.get(_MARK, ()))

    def _look_for_params(self, root: Any) -> None:
        if not self.has_place(root):
            return
        count = len(jax.tree.leaves(root._variables.get(_PARAMS, {})))
        if self._known.get(root) == count:  # this is asked of every value
            return
        self._known.set(root, count)
        mapped, made_of = root.flags.get(_MAPPED, _NOTHING)
        for source, leaf in _params_in(root):
            if self._derived.get(leaf) is None:
                rebuild = None if source.path in mapped else _first
                moves = _PARAMETER, {"of": leaf.shape}, 0, ()
                self._derived.set(leaf, Derived((source,), rebuild, moves))
                if rebuild is None:
                    self.used_otherwise |= made_of

    def on_map(self, scope: Any, given: Any, mapped: Any) -> None:
        """Remembers what ``nn.map_variables`` makes of parameters, for where no trace of ours sees it.

        Args:
            scope: whose variables it maps.
            given: these variables.
            mapped: the scope of what it has made of them.
        """
        before, after = jax.tree.leaves(given), _params_in(mapped.root)
        old, new = {id(leaf) for leaf in before}, {id(leaf) for _, leaf in after}
        paths, made_of = mapped.flags.get(_MAPPED, _NOTHING)
        paths |= {source.path for source, leaf in after if id(leaf) not in old}
        lost = [self.derived(leaf, scope) for leaf in before if id(leaf) not in new]
        made_of |= {source.path for found in lost if found is not None for source in found.sources}
        if paths:
            _set_flag(mapped, _MAPPED, (paths, made_of))

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which all traces hand everything on."""
        before, self.is_passing = self.is_passing, True
        try:
            yield
        finally:
            self.is_passing = before

    @contextlib.contextmanager
    def frame_of(self, module: nn.Module, method: str) -> Iterator[Frame]:
        """A context with the frame of a method that runs in it."""
        root: Any = module.scope.root  # type: ignore[union-attr]
        # The model may apply itself, to all of its variables.
        is_itself = isinstance(module, self._model) and self._state in root._variables
        before = self.is_apart
        self.is_apart |= not (self.has_place(root) or is_itself)
        try:
            yield Frame(module, method, {}, self.is_apart)
        finally:
            self.is_apart = before

    def follow(self, primitive: Any, operands: Any, params: Any, results: Any, scope: Any) -> None:
        """Remembers what the results of a primitive owe to parameters."""
        results = results if primitive.multiple_results else [results]
        if all(map(self._is_constant, operands)):
            for result in results:
                self._constants.set(result, True)
            return
        derived = [self.derived(x, scope) for x in operands if not self._is_constant(x)]
        made_of = [d for d in derived if d is not None]
        sources = tuple(source for d in made_of for source in d.sources)
        is_moved = primitive.name in _MOVEMENTS and len(made_of) == len(operands)
        can_rebuild = is_moved and all(d.rebuild is not None for d in made_of)
        if not is_moved:
            is_read = _read_otherwise(primitive.name, params, len(operands))
            for operand, reads in zip(operands, is_read):
                if reads:
                    self.use(operand, scope)
        passed = _passed_through(primitive.name, params) or [None] * len(results)
        for i, (result, index) in enumerate(zip(results, passed)):
            owes = None
            if index is not None:
                owes = self.derived(operands[index], scope)
            elif can_rebuild:
                known = {**params, "of": operands[0].shape}
                moves = primitive.name, known, i, tuple(d.moves for d in made_of)
                owes = Derived(sources, _rebuilder(primitive, params, made_of, i), moves)
            elif made_of and len(made_of) == len(derived):
                kept = [self.derived(x, scope) for x in operands if np.shape(x) == result.shape]
                moves = next((d.moves for d in kept if d is not None), (primitive.name, {}, i, ()))
                owes = Derived(sources, None, moves)
            if owes is not None:
                self._derived.set(result, owes)

    def _is_constant(self, value: Any) -> bool:
        """Tells whether a value is a number in the model's source, or made of such numbers alone."""
        return bool(self._constants.get(value)) if isinstance(value, jax.Array) else np.ndim(value) == 0

    def use(self, value: Any, scope: Any) -> None:
        """Remembers that something else than an FP8 op reads a value."""
        derived = self.derived(value, scope)
        if derived is not None:
            self.used_otherwise.update(source.path for source in derived.sources)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which contractions of Linen modules' methods go to the handler.

        The handler runs outside of the interception. Methods of modules of which ``leave_alone`` is true
        are not looked into. Nor is what a transformation of JAX makes a program of (a
        ``lax.scan``, a ``jax.checkpoint``, a function with a derivative of its own), unless Linen's form of
        it is used.
        """

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if self._leave_alone(context.module) or context.module.scope is None:
                with _behind(), self.passing(), jax.named_scope(BY_OP):
                    return call(*args, **kwargs)
            is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
            with _in_frame(self, context.module, "" if is_main else context.method_name):
                return call(*args, **kwargs)

        return nn.intercept_methods(around)

    def active_in_setup(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which ``setup`` is looked into, and nothing else."""

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if context.method_name != "setup" or context.module.scope is None:
                return call(*args, **kwargs)
            with _in_frame(self, context.module, "setup"):
                return call(*args, **kwargs)

        return nn.intercept_methods(around)


def _rebuilder(
    primitive: Any, params: dict[str, Any], made_of: list[Derived], index: int
) -> Callable[[tuple[jax.Array, ...], bool], jax.Array]:
    def rebuild(arrays: tuple[jax.Array, ...], casts: bool) -> jax.Array:
        operands, rest = [], arrays
        for d in made_of:
            assert d.rebuild is not None
            operands.append(d.rebuild(rest[: len(d.sources)], casts))
            rest = rest[len(d.sources) :]
        if primitive.name == "convert_element_type" and not casts:
            return operands[0]
        result = primitive.bind(*operands, **params)
        return result[index] if primitive.multiple_results else result

    return rebuild


class _Trace(core.Trace):
    """Hands everything to the trace behind it, but contractions."""

    def __init__(self, behind: Any, interception: Interception) -> None:
        super().__init__()
        self.parent_trace = behind
        self.interception = interception
        self.frames: list[Frame] = []
        self.requires_low = behind.requires_low

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        frame, interception = self.frames[-1], self.interception
        if interception.is_passing:
            return self.parent_trace.process_primitive(primitive, operands, params)
        if primitive.name in _CONTRACTIONS and not _was_dealt_with(source_info_util.current_name_stack()):
            derived = tuple(interception.derived(x, frame.module.scope) for x in operands[:2])
            with core.set_current_trace(self.parent_trace), interception.passing():
                result = interception.handler(
                    Contraction(primitive.name, tuple(operands), params, derived, frame)
                )
            if not isinstance(result, Left):
                return result
            with jax.named_scope(result.scope), interception.passing():
                results = self.parent_trace.process_primitive(primitive, operands, params)
            interception.follow(primitive, operands, params, results, frame.module.scope)
            return results
        if primitive.name == "jit" and self._should_open(operands, params, frame):
            with core.set_current_trace(self):
                return core.eval_jaxpr(params["jaxpr"].jaxpr, params["jaxpr"].consts, *operands)
        with interception.passing():
            results = self.parent_trace.process_primitive(primitive, operands, params)
        interception.follow(primitive, operands, params, results, frame.module.scope)
        return results

    def _should_open(self, operands: Any, params: Any, frame: Frame) -> bool:
        """Tells whether to look into a jitted function, such as those that ``jax.numpy`` consists of."""
        specified = (*params["in_shardings"], *params["out_shardings"])
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in specified):
            return False
        if _was_traced(params["jaxpr"].jaxpr):
            return False
        return _has_contraction(params["jaxpr"].jaxpr) or any(
            self.interception.derived(x, frame.module.scope) is not None for x in operands
        )

    def _hand_on(self, method: str, args: Any, kwargs: Any) -> Any:
        """Lets the trace behind do what has no jaxpr to look into; reads what is given to it."""
        for values in () if self.interception.is_passing else args:
            for value in values if isinstance(values, list | tuple) else ():
                self.interception.use(value, self.frames[-1].module.scope)
        return getattr(self.parent_trace, method)(*args, **kwargs)

    # With the signatures of the JAX version at hand.
    def process_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_call", args, kwargs)

    def process_map(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_map", args, kwargs)

    def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_custom_jvp_call", args, kwargs)

    def process_custom_vjp_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_custom_vjp_call", args, kwargs)

    def stage_value(self, *args: Any, **kwargs: Any) -> Any:
        return self.parent_trace.stage_value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)


def _was_traced(jaxpr: core.Jaxpr) -> bool:
    """Tells whether a jaxpr is that of ``nn.jit``, whose modules were looked into when it was made."""
    return any(_was_dealt_with(eqn.source_info.name_stack) for eqn in jaxpr.eqns)


def _was_dealt_with(stack: Any) -> bool:
    """Tells whether what is computed in these scopes is a contraction that was seen, or its derivative."""
    return _OURS.search(str(stack)) is not None


def _first(arrays: tuple[jax.Array, ...], casts: bool) -> jax.Array:
    return arrays[0]


def _set_flag(scope: Any, name: str, value: Any) -> None:
    for one in (scope, scope.root):
        one.flags = flax.core.freeze({**one.flags, name: value})


def _params_in(root: Any) -> list[tuple[Source, Any]]:
    """Returns the parameters in a root scope."""
    params = nn.meta.unbox(root._variables.get(_PARAMS, {}))
    return [
        (Source((*root.path, *(str(key_name(key)) for key in path)), leaf.shape, leaf.dtype), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if hasattr(leaf, "shape")
    ]


def _read_otherwise(primitive: str, params: dict[str, Any], count: int) -> list[bool]:
    """Tells of each operand of a primitive whether it reads it, other than by an FP8 op inside of it.

    Linen's transformations give all parameters to their bodies, whatever these do with them.
    """
    if "branches" in params:
        inside = [_invars_read(branch.jaxpr, may_return=True) for branch in params["branches"]]
        return [True, *(any(reads) for reads in zip(*inside))]
    if primitive == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = (_invars_read(params[name].jaxpr) for name in ("cond_jaxpr", "body_jaxpr"))
        carry = (a or b for a, b in zip(cond[of_cond:], body[of_body:]))
        return [*cond[:of_cond], *body[:of_body], *carry]
    jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if isinstance(jaxpr, core.Jaxpr) and len(jaxpr.invars) == count:
        return _invars_read(jaxpr, may_return=primitive in _RETURNING)
    return [True] * count


def _passed_through(primitive: str, params: dict[str, Any]) -> list[int | None] | None:
    """Tells of each result of a primitive which operand it is, where it is one.

    Linen's transformations return the variables that a method might have changed.
    """
    if "branches" in params:
        jaxprs, first = [branch.jaxpr for branch in params["branches"]], 1
    elif primitive in _RETURNING and "jaxpr" in params:
        jaxprs, first = [getattr(params["jaxpr"], "jaxpr", params["jaxpr"])], 0
    else:
        return None
    passed: list[int | None] = []
    for outvars in zip(*(jaxpr.outvars for jaxpr in jaxprs)):
        found = {
            jaxpr.invars.index(var) if var in jaxpr.invars else None for jaxpr, var in zip(jaxprs, outvars)
        }
        index = found.pop() if len(found) == 1 else None
        passed.append(None if index is None else index + first)
    return passed


def _invars_read(jaxpr: core.Jaxpr, may_return: bool = False) -> list[bool]:
    """Tells of each input of a jaxpr whether anything reads or returns it that is not part of an FP8 op."""
    owes = {var: {i} for i, var in enumerate(jaxpr.invars)}
    read: set[int] = set()
    for eqn in jaxpr.eqns:
        inputs = [owes.get(var, set()) if isinstance(var, core.Var) else set() for var in eqn.invars]
        if not any(inputs) or _IN_OP.search(str(eqn.source_info.name_stack)):
            continue
        if eqn.primitive.name in _MOVEMENTS and all(inputs):
            owes.update((var, set().union(*inputs)) for var in eqn.outvars if isinstance(var, core.Var))
            continue
        for indices, reads in zip(inputs, _read_otherwise(eqn.primitive.name, eqn.params, len(inputs))):
            if reads:
                read |= indices
    for var in jaxpr.outvars:
        if isinstance(var, core.Var) and not (may_return and var in jaxpr.invars):
            read |= owes.get(var, set())
    return [i in read for i in range(len(jaxpr.invars))]


def _has_contraction(jaxpr: Any) -> bool:
    """Tells whether a jaxpr computes a contraction where opening jitted functions finds it."""
    return any(
        eqn.primitive.name in _CONTRACTIONS
        or (eqn.primitive.name == "jit" and _has_contraction(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )


@contextlib.contextmanager
def _behind() -> Iterator[None]:
    """Lets what is inside pass by the interception."""
    trace = core.trace_ctx.trace
    with core.set_current_trace(trace.parent_trace if isinstance(trace, _Trace) else trace):
        yield


@contextlib.contextmanager
def _in_frame(interception: Interception, module: nn.Module, method: str) -> Iterator[None]:
    trace = core.trace_ctx.trace
    if isinstance(trace, _Trace) and trace.interception is interception:
        if trace.frames[-1].module.scope is module.scope:  # a method that another one calls
            yield
            return
        with interception.frame_of(module, method) as frame:
            trace.frames.append(frame)
            try:
                yield
            finally:
                trace.frames.pop()
        return
    # Inside nn.scan, nn.remat, jax.vmap and the like another trace is current than outside.
    trace = _Trace(trace, interception)
    with interception.frame_of(module, method) as frame, core.set_current_trace(trace):
        trace.frames.append(frame)
        try:
            yield
        finally:
            trace.frames.clear()  # JAX may hold the trace for longer


class Found(NamedTuple):
    """A contraction in a jaxpr."""

    stack: str
    """The scopes that it is in."""
    primitive: str
    params: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    """Of the two operands and the result."""
    times: int
    """How often it is computed: the product of the lengths of the scans around it."""


def contractions_in(jaxpr: Any, stack: str = "", times: int = 1) -> Iterator[Found]:
    """Yields the contractions that a jaxpr computes, but those inside of FP8 ops."""
    for eqn in jaxpr.eqns:
        here = f"{stack}/{eqn.source_info.name_stack}".strip("/")
        if _IN_OP.search(here):
            continue
        if eqn.primitive.name in _CONTRACTIONS:
            shapes = tuple(v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars[:1]))
            yield Found(here, eqn.primitive.name, eqn.params, shapes, times)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, core.Jaxpr):
                    length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                    yield from contractions_in(inner, here, times * length)
