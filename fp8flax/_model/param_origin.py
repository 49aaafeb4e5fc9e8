"""Finds the parameters that a value of a model comes from, and how the model moved and cast them.

``ParamOrigins.follow`` is called for each primitive that a call of a model computes. For each value it
records an ``Origin``: the parameters that the value is made of, and a function that makes the value from
other arrays in their places. The function applies casts, slices, transposes and concatenations in any
order. So the kernel of a contraction has a name, and its FP8 codes can replace the parameters.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.state.tree import key_name
from fp8flax._model.program_reads import BIJECTIONS, CAST, CASTS, MOVEMENTS, uses_of

_PARAMETER = "parameter"
"""The ``Move.primitive`` of an unchanged parameter."""
# Linen's transformations pass the flags of a scope on to the scopes that they make.
_MARK = "fp8flax"
"""The flag that holds the ``ParamOrigins`` of the calls that a scope belongs to."""
_MAPPED = "fp8flax_mapped"
"""The flag for two sets of paths: parameters that ``nn.map_variables`` made, and those it made them of."""
_NOTHING: tuple[frozenset[Any], frozenset[Any]] = frozenset(), frozenset()


class Source(NamedTuple):
    """A parameter as a method sees it; inside ``nn.scan`` it is a slice of the caller's array."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


class Move(NamedTuple):
    """The last of the steps that made a value from parameters."""

    primitive: str
    """The name of the primitive; ``_PARAMETER`` for an unchanged parameter."""
    params: dict[str, Any]
    """The parameters of the primitive. ``"of"`` is the shape of its first operand. A cast also has
    ``"from"``, the dtype of its operand."""
    result: int
    """The index of the value among the results of the primitive."""
    operands: tuple[Move, ...]
    """The steps that made the operands of the primitive from parameters."""


class Origin(NamedTuple):
    """The parameters that a value comes from, if it comes from nothing else."""

    sources: tuple[Source, ...]
    """The parameters, in the order of ``rebuild``."""
    rebuild: Callable[[tuple[jax.Array, ...], bool], jax.Array] | None
    """Makes the value from arrays in the places of the parameters; None if arithmetic or
    ``nn.map_variables`` made the value.

    The second argument says whether casts are applied."""
    moves: Move
    """The steps that made the value from the parameters, without arithmetic that keeps the shape."""

    @property
    def is_one_parameter(self) -> bool:
        """Whether the value is one parameter, at most cast."""
        return self._is_parameter_after(lambda move: move.primitive in CASTS)

    @property
    def is_whole_parameter(self) -> bool:
        """Whether the value holds each element of one parameter once, in any order and shape."""
        return self._is_parameter_after(lambda move: move.primitive in BIJECTIONS or _only_adds_dims(move))

    def _is_parameter_after(self, is_allowed: Callable[[Move], bool]) -> bool:
        move = self.moves
        while is_allowed(move):
            (move,) = move.operands
        return move.primitive == _PARAMETER and self.rebuild is not None

    def into_parameter(self, values: jax.Array) -> jax.Array:
        """Moves bytes from the places of the value to the places of the parameter that it was made of.

        This is the inverse of ``rebuild`` for a whole parameter. ``jax.linear_transpose`` needs floats, and
        bfloat16 holds every byte exactly.
        """
        rebuild = self.rebuild
        assert rebuild is not None
        like = jax.ShapeDtypeStruct(self.sources[0].shape, jnp.bfloat16)
        (result,) = jax.linear_transpose(lambda x: rebuild((x,), False), like)(values.astype(jnp.bfloat16))
        return result.astype(jnp.uint8)

    def part(self, summed: Sequence[int]) -> str:
        """Returns the name of the part of a parameter that the value is; the op's state is named with it.

        The name is empty for a whole parameter, ``-1`` for ``w[1]`` and ``-64-128`` for ``w[:, 64:128]``.
        ``-T`` follows if the contraction sums over the last dimension of the parameter, as in ``x @ w.T``.
        A concatenated value counts as whole. After a reshape there is no ``-T``. Equal ranges of different
        dimensions have one name, so ``w[:64]`` and ``w[:, :64]`` share their state.

        Args:
            summed: the dimensions of the value over which a contraction sums.
        """
        chain = [self.moves]
        while chain[-1].primitive != _PARAMETER:
            if len(chain[-1].operands) != 1:
                return ""
            chain.append(chain[-1].operands[0])
        rank = len(chain.pop().params["of"])
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


def _only_adds_dims(move: Move) -> bool:
    """Returns whether a step adds dimensions of size 1, as ``w[None]`` does."""
    shape, of = move.params.get("shape", ()), move.params["of"]
    return move.primitive == "broadcast_in_dim" and math.prod(shape) == math.prod(of)


def _range_of(name: str, params: dict[str, Any], index: int) -> str:
    """Returns the ranges of a slice or a split as text; dimensions that it takes whole are left out."""
    if name == "split":
        start = sum(params["sizes"][:index])
        return f"-{start}-{start + params['sizes'][index]}"
    if name != "slice":
        return ""
    limits, shape = params["limit_indices"], params["of"]
    ranges = [(a, b) for a, b, size in zip(params["start_indices"], limits, shape) if (a, b) != (0, size)]
    return "".join(f"-{a}" if b == a + 1 else f"-{a}-{b}" for a, b in ranges)


class _ByIdentity:
    """Dict by the identity of its keys. It keeps no key alive: a tracer must not outlive its trace."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}

    def get(self, key: Any) -> Any:
        """Returns the value that was set for this object, or None."""
        _, value = self._found.get(id(key), (None, None))
        return value

    def set(self, key: Any, value: Any) -> None:
        """Sets the value of an object; the value must not refer to the object."""
        found, name = self._found, id(key)
        try:
            held: Any = weakref.ref(key, lambda _: found.pop(name, None))
        except TypeError:  # a NumPy scalar has no weak references
            held = key
        found[name] = held, value


class ParamOrigins:
    """Records the origins of all values of one call of a model, in all of its traces."""

    def __init__(self) -> None:
        self._origins = _ByIdentity()
        self._constants = _ByIdentity()
        self._known = _ByIdentity()
        """For each root scope, how many of its parameters were recorded."""
        self._elsewhere = _ByIdentity()
        """For each value from a variable outside of ``params``, the path of the first such variable."""
        self._known_elsewhere = _ByIdentity()
        """For each root scope, how many of these variables were recorded."""
        self.used_otherwise: set[tuple[str, ...]] = set()
        """The parameters that something else than an FP8 op or a movement reads, and those of an op with
        several kernels."""

    def of(self, value: Any, scope: Any) -> Origin | None:
        """Returns the origin of a value in a scope's parameters; None if it comes from anything else."""
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        found: Origin | None = self._origins.get(value)
        if found is None:
            self._look_for_params(scope.root)
            found = self._origins.get(value)
        return found

    def elsewhere(self, value: Any, scope: Any) -> str | None:
        """Returns the path of the first variable outside of ``params`` that a value comes from.

        None if the value comes from no such variable, or from anything that is no variable.
        """
        self._look_elsewhere(scope.root)
        path: str | None = self._elsewhere.get(value)
        return path

    def mark(self, scope: Any) -> None:
        """Marks a scope, and all scopes that Linen makes from it, as scopes of the model."""
        _set_flag(scope, _MARK, (*scope.flags.get(_MARK, ()), self))

    def has_place(self, root: Any) -> bool:
        """Returns whether the variables of a root scope are those of the model, which can hold state."""
        return bool(root.path) or any(one is self for one in root.flags.get(_MARK, ()))

    def _look_for_params(self, root: Any) -> None:
        """Records the parameters of a root scope that are new since the last call."""
        if not self.has_place(root):
            return
        count = len(jax.tree.leaves(root.variables().get(PARAMS, {})))
        # This method is called for every value, so it must return early if there is no new parameter.
        if self._known.get(root) == count:
            return
        self._known.set(root, count)
        mapped, made_of = root.flags.get(_MAPPED, _NOTHING)
        for source, leaf in _params_in(root):
            if self._origins.get(leaf) is None:
                rebuild = None if source.path in mapped else _first
                moves = Move(_PARAMETER, {"of": leaf.shape}, 0, ())
                self._origins.set(leaf, Origin((source,), rebuild, moves))
                if rebuild is None:
                    self.used_otherwise |= made_of

    def _look_elsewhere(self, root: Any) -> None:
        """Records the other variables of a root scope: those before the call; at ``init`` all new ones."""
        collections = root.variables()
        # Only variables from before the call count: a cache that the model writes holds activations.
        known, is_init = self._known_elsewhere.get(root), root.flags.get("initializing", False)
        if (known is not None and not is_init) or not self.has_place(root):
            return
        names = [name for name in collections if name not in (PARAMS, OVERWRITE_WITH_GRADIENT)]
        others = {name: nn.meta.unbox(collections[name]) for name in names}
        leaves = jax.tree_util.tree_flatten_with_path(others)[0]
        if known == len(leaves):
            return
        self._known_elsewhere.set(root, len(leaves))
        for path, leaf in leaves:
            name, *rest = (str(key_name(key)) for key in path)
            self._elsewhere.set(leaf, "/".join((name, *root.path, *rest)))

    def on_map(self, scope: Any, given: Any, mapped: Any) -> None:
        """Records the parameters that ``nn.map_variables`` makes, because ``follow`` may not see how.

        Args:
            scope: the scope whose variables it maps.
            given: the variables that it maps.
            mapped: the scope with the mapped variables.
        """
        before, after = jax.tree.leaves(given), _params_in(mapped.root)
        old, new = {id(leaf) for leaf in before}, {id(leaf) for _, leaf in after}
        paths, made_of = mapped.flags.get(_MAPPED, _NOTHING)
        paths |= {source.path for source, leaf in after if id(leaf) not in old}
        lost = [self.of(leaf, scope) for leaf in before if id(leaf) not in new]
        made_of |= {source.path for found in lost if found is not None for source in found.sources}
        if paths:
            _set_flag(mapped, _MAPPED, (paths, made_of))

    def follow(self, primitive: Any, operands: Any, params: Any, results: Any, scope: Any) -> None:
        """Records the origins of the results of a primitive, and the parameters that it reads."""
        results = results if primitive.multiple_results else [results]
        if all(self._is_constant(x, scope) for x in operands):
            for result in results:
                self._constants.set(result, True)
            return
        origins = [self.of(x, scope) for x in operands]
        self._follow_elsewhere(operands, origins, results, scope)
        made_of = [origin for origin in origins if origin is not None]
        is_moved = primitive.name in MOVEMENTS and len(made_of) == len(operands)
        uses = uses_of(primitive, params, len(operands), len(results))
        for operand, reads in zip(operands, uses.reads):
            if reads and not is_moved:
                self.use(operand, scope)
        for i, (result, returned) in enumerate(zip(results, uses.returns)):
            if returned is not None:
                origin = origins[returned]
            elif is_moved and all(d.rebuild is not None for d in made_of):
                origin = _moved(primitive, params, operands[0], made_of, i)
            elif all(d is not None or self._is_constant(x, scope) for x, d in zip(operands, origins)):
                origin = _computed(primitive, operands, origins, result, i)
            else:
                origin = None
            if origin is not None:
                self._origins.set(result, origin)

    def _follow_elsewhere(
        self, operands: Sequence[Any], origins: Sequence[Origin | None], results: Any, scope: Any
    ) -> None:
        """Records results that come from variables only, if one of these is outside of ``params``."""
        paths = [self.elsewhere(x, scope) for x in operands]
        path = next((path for path in paths if path is not None), None)
        known = zip(operands, paths, origins)
        if path is None or not all(p or d or self._is_constant(x, scope) for x, p, d in known):
            return
        for result in results:
            self._elsewhere.set(result, path)

    def _is_constant(self, value: Any, scope: Any) -> bool:
        """Returns whether a value is a number in the source of the model, or computed from such numbers.

        A parameter is no constant, although ``init`` may compute it from numbers, as ``zeros`` does.
        """
        if not isinstance(value, jax.Array):
            return np.ndim(value) == 0
        return bool(self._constants.get(value)) and self.of(value, scope) is None

    def use(self, value: Any, scope: Any) -> None:
        """Records that an operation other than an FP8 op reads a value."""
        origin = self.of(value, scope)
        if origin is not None:
            self.used_otherwise.update(source.path for source in origin.sources)


def _sources_of(made_of: Sequence[Origin]) -> tuple[Source, ...]:
    return tuple(source for d in made_of for source in d.sources)


def _moved(primitive: Any, params: dict[str, Any], first: Any, made_of: list[Origin], index: int) -> Origin:
    """Returns the origin of a result of a movement.

    Args:
        primitive: the movement.
        params: its parameters.
        first: its first operand.
        made_of: the origins of its operands.
        index: the index of the result.
    """

    def rebuild(arrays: tuple[jax.Array, ...], casts: bool) -> jax.Array:
        operands, rest = [], arrays
        for d in made_of:
            assert d.rebuild is not None
            operands.append(d.rebuild(rest[: len(d.sources)], casts))
            rest = rest[len(d.sources) :]
        if primitive.name == CAST and not casts:
            return operands[0]
        result = primitive.bind(*operands, **params)
        return result[index] if primitive.multiple_results else result

    known = {**params, "of": first.shape}
    if primitive.name == CAST:
        known["from"] = first.dtype
    move = Move(primitive.name, known, index, tuple(d.moves for d in made_of))
    return Origin(_sources_of(made_of), rebuild, move)


def _computed(
    primitive: Any, operands: Any, origins: list[Origin | None], result: Any, index: int
) -> Origin:
    """Returns the origin of a result of arithmetic with parameters and numbers.

    Its moves are those of the first operand of the same shape, so that ``Origin.part`` names both alike.
    """
    alike = (d.moves for x, d in zip(operands, origins) if d is not None and np.shape(x) == result.shape)
    move = next(alike, Move(primitive.name, {}, index, ()))
    return Origin(_sources_of([d for d in origins if d is not None]), None, move)


def _first(arrays: tuple[jax.Array, ...], casts: bool) -> jax.Array:
    return arrays[0]


def _set_flag(scope: Any, name: str, value: Any) -> None:
    for one in (scope, scope.root):
        one.flags = flax.core.freeze({**one.flags, name: value})


def _params_in(root: Any) -> list[tuple[Source, Any]]:
    """Returns the parameters in a root scope, each with its array."""
    params = nn.meta.unbox(root.variables().get(PARAMS, {}))
    return [
        (Source((*root.path, *(str(key_name(key)) for key in path)), leaf.shape, leaf.dtype), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if hasattr(leaf, "shape")
    ]
