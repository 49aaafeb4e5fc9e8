"""Finds the parameters that a value of a model comes from, and how the model moved and cast them.

``ParamOrigins.follow`` is called for each primitive that a call of a model computes. For each value it
records an ``Origin``: the parameters that the value is made of, and the casts, slices, transposes and
reshapes that made the value from one parameter. So the kernel of a contraction has a name, and its FP8
codes can take the place of the parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import PARAMS
from fp8flax._core.state.tree import key_name
from fp8flax._linen.conversion import conversion
from fp8flax._model.program_reads import BIJECTIONS, CAST, CASTS, MOVEMENTS, uses_of

# Linen's transformations pass the flags of a scope on to the scopes that they make.
_MARK = "fp8flax"
"""The flag that holds the ``ParamOrigins`` of the calls that a scope belongs to."""


class Source(NamedTuple):
    """A parameter as a method sees it; inside ``nn.scan`` it is a slice of the caller's array."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any


class Move(NamedTuple):
    """A step that moved or cast a value."""

    primitive: Any
    params: dict[str, Any]
    result: int
    """The index of the value among the results of the primitive."""
    shape: tuple[int, ...]
    """The shape of the operand."""
    dtype: Any
    """The dtype of the operand."""


class Origin(NamedTuple):
    """The parameters that a value comes from, if it comes from nothing else."""

    sources: tuple[Source, ...]
    moves: tuple[Move, ...] | None
    """The steps that made the value from one parameter; None if it is joined of several.

    For a result of arithmetic they are the steps of the first operand that has the shape of the result, or
    None."""
    rank: int = 0
    """The number of dimensions of the parameter that ``moves`` begin with."""
    is_moved: bool = True
    """Whether neither arithmetic nor ``nn.map_variables`` made the value."""

    @property
    def is_one_parameter(self) -> bool:
        """Whether the value is one parameter, at most cast."""
        moves = self.moves
        return self.is_moved and moves is not None and all(m.primitive.name in CASTS for m in moves)

    @property
    def is_whole_parameter(self) -> bool:
        """Whether the value holds each element of one parameter once, in any order and shape."""
        moves = self.moves
        return self.is_moved and moves is not None and all(map(_is_bijection, moves))

    def rebuild(self, array: jax.Array, casts: bool = True) -> jax.Array:
        """Makes the value of a whole parameter from an array in the place of the parameter.

        Args:
            array: the array.
            casts: whether casts are applied.
        """
        assert self.is_whole_parameter
        for move in self.moves or ():
            if move.primitive.name != CAST or casts:
                array = move.primitive.bind(array, **move.params)
        return array

    def into_parameter(self, values: jax.Array) -> jax.Array:
        """Moves bytes from the places of the value to the places of the parameter that it was made of.

        This is the inverse of ``rebuild`` for a whole parameter. ``jax.linear_transpose`` needs floats, and
        bfloat16 holds every byte exactly.
        """
        like = jax.ShapeDtypeStruct(self.sources[0].shape, jnp.bfloat16)
        back = jax.linear_transpose(partial(self.rebuild, casts=False), like)
        (result,) = back(values.astype(jnp.bfloat16))
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
        if self.moves is None:
            return ""
        axes: list[int] | None = list(range(self.rank))
        text = ""
        for move in self.moves:
            name, params = move.primitive.name, move.params
            if axes is None or name in ("broadcast_in_dim", "reshape"):
                axes = None
            elif name == "transpose":
                axes = [axes[i] for i in params["permutation"]]
            elif name == "squeeze":
                axes = [axis for i, axis in enumerate(axes) if i not in params["dimensions"]]
            text += _range_of(move)
        if axes and len(axes) > 1 and self.rank - 1 in (axes[i] for i in summed):
            text += "-T"
        return text


def _is_bijection(move: Move) -> bool:
    """Returns whether a step keeps each value once; ``w[None]`` is a broadcast that does."""
    if move.primitive.name == "broadcast_in_dim":
        return math.prod(move.params["shape"]) == math.prod(move.shape)
    return move.primitive.name in BIJECTIONS


def _range_of(move: Move) -> str:
    """Returns the ranges of a slice or a split as text; dimensions that it takes whole are left out."""
    params = move.params
    if move.primitive.name == "split":
        start = sum(params["sizes"][: move.result])
        return f"-{start}-{start + params['sizes'][move.result]}"
    if move.primitive.name != "slice":
        return ""
    limits = zip(params["start_indices"], params["limit_indices"], move.shape)
    ranges = [(a, b) for a, b, size in limits if (a, b) != (0, size)]
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
        self.used_otherwise: set[tuple[str, ...]] = set()
        """The parameters that something else than an FP8 op or a movement reads."""

    def of(self, value: Any, scope: Any) -> Origin | None:
        """Returns the origin of a value in a scope's parameters; None if it comes from anything else."""
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        found: Origin | None = self._origins.get(value)
        if found is None:
            self._look_for_params(scope.root)
            found = self._origins.get(value)
        return found

    def mark(self, scope: Any) -> None:
        """Marks a scope, and all scopes that Linen makes from it, as scopes of the model."""
        marks = (*scope.flags.get(_MARK, ()), self)
        for one in (scope, scope.root):
            one.flags = flax.core.freeze({**one.flags, _MARK: marks})

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
        # ``follow`` may not have seen how ``nn.map_variables`` made a parameter. So nothing is known of it.
        is_moved = not conversion().in_map
        for source, leaf in _params_in(root):
            if self._origins.get(leaf) is None:
                self._origins.set(leaf, Origin((source,), (), leaf.ndim, is_moved))

    def follow(self, primitive: Any, operands: Any, params: Any, results: Any, scope: Any) -> None:
        """Records the origins of the results of a primitive, and the parameters that it reads."""
        results = results if primitive.multiple_results else [results]
        if all(self._is_constant(x, scope) for x in operands):
            for result in results:
                self._constants.set(result, True)
            return
        origins = [self.of(x, scope) for x in operands]
        made_of = [origin for origin in origins if origin is not None]
        is_moved = primitive.name in MOVEMENTS and len(made_of) == len(operands)
        uses = uses_of(primitive, params, len(operands), len(results))
        for operand, reads in zip(operands, uses.reads):
            if reads and not is_moved:
                self.use(operand, scope)
        for i, (result, returned) in enumerate(zip(results, uses.returns)):
            if returned is not None:
                origin = origins[returned]
            elif is_moved and all(d.is_moved for d in made_of):
                origin = _moved(primitive, params, operands[0], made_of, i)
            elif all(d is not None or self._is_constant(x, scope) for x, d in zip(operands, origins)):
                origin = _computed(operands, origins, result)
            else:
                origin = None
            if origin is not None:
                self._origins.set(result, origin)

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
    moves = made_of[0].moves if len(made_of) == 1 else None
    if moves is not None:
        moves = (*moves, Move(primitive, params, index, first.shape, first.dtype))
    return Origin(_sources_of(made_of), moves, made_of[0].rank)


def _computed(operands: Any, origins: list[Origin | None], result: Any) -> Origin:
    """Returns the origin of a result of arithmetic with parameters and numbers.

    Its moves are those of the first operand of the same shape, so that ``Origin.part`` names both alike.
    """
    made_of = [d for d in origins if d is not None]
    alike = [d for x, d in zip(operands, origins) if d is not None and np.shape(x) == result.shape]
    moves, rank = (alike[0].moves, alike[0].rank) if alike else (None, 0)
    return Origin(_sources_of(made_of), moves, rank, is_moved=False)


def _params_in(root: Any) -> list[tuple[Source, Any]]:
    """Returns the parameters in a root scope, each with its array."""
    params = nn.meta.unbox(root.variables().get(PARAMS, {}))
    return [
        (Source((*root.path, *(str(key_name(key)) for key in path)), leaf.shape, leaf.dtype), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if hasattr(leaf, "shape")
    ]
