"""Finds the parameters that a value of a model comes from, and how the model moved and cast them.

``ParamOrigins.follow`` is called for each primitive that a call of a model computes. For each value it
records an ``Origin``: the parameters that the value is made of, and the casts, slices, transposes and
reshapes that made the value from one parameter. So the kernel of a contraction has a name, and its FP8
codes can take the place of the parameter.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Movements that leave every value in its place.
CAST = "convert_element_type"
CASTS = (CAST, "copy", "copy_p", "sharding_constraint")
# Movements after which every value is there exactly once.
BIJECTIONS = (*CASTS, "reshape", "rev", "squeeze", "transpose")
# All movements: primitives that change only the place or the dtype of values.
MOVEMENTS = (*BIJECTIONS, "broadcast_in_dim", "concatenate", "slice", "split")


class Source(NamedTuple):
    """A parameter as a method sees it; inside ``nn.scan`` it is a slice of the caller's array."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    part: str = ""
    """The name of the part of the parameter, if the value is joined of several; see ``Origin.part``."""


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
    is_moved: bool = True
    """Whether no arithmetic made the value."""

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

    def part(self, summed: Sequence[int] = ()) -> str:
        """Returns the name of the part of a parameter that the value is; the op's state is named with it.

        The name is empty for a whole parameter, ``-axis0-1`` for ``w[1]`` and ``-axis1-64-128`` for
        ``w[:, 64:128]``. ``-T`` follows if the contraction sums over the last dimension of the parameter,
        as in ``x @ w.T``. After a reshape, the name of a slice begins with the shape that is sliced:
        ``-4x8-axis0-1`` for ``w.reshape(4, 8)[1]``. A joined value counts as whole.

        Args:
            summed: the dimensions of the value over which a contraction sums.
        """
        if self.moves is None:
            return ""
        rank = len(self.sources[0].shape)
        axes, text, is_reshaped = list(range(rank)), "", False
        for move in self.moves:
            name, params = move.primitive.name, move.params
            ranges = _ranges_of(move)
            if ranges and is_reshaped:
                text += "-" + "x".join(map(str, move.shape))
                axes, is_reshaped = list(range(len(move.shape))), False
            text += "".join(f"-axis{axes[i]}-{a}" + ("" if b == a + 1 else f"-{b}") for i, a, b in ranges)
            if name == "transpose" and not is_reshaped:
                axes = [axes[i] for i in params["permutation"]]
            elif name == "squeeze" and not is_reshaped:
                axes = [axis for i, axis in enumerate(axes) if i not in params["dimensions"]]
            elif name in ("broadcast_in_dim", "reshape"):
                text += "-T" * (not is_reshaped and axes != sorted(axes))
                is_reshaped = True
        if not is_reshaped and len(axes) > 1 and rank - 1 in (axes[i] for i in summed):
            text += "-T"
        return text


def _is_bijection(move: Move) -> bool:
    """Returns whether a step keeps each value once; ``w[None]`` is a broadcast that does."""
    if move.primitive.name == "broadcast_in_dim":
        return math.prod(move.params["shape"]) == math.prod(move.shape)
    return move.primitive.name in BIJECTIONS


def _ranges_of(move: Move) -> list[tuple[int, int, int]]:
    """Returns the dimensions that a slice or a split does not take whole, each with its range."""
    params = move.params
    if move.primitive.name == "split":
        start = sum(params["sizes"][: move.result])
        return [(params["axis"], start, start + params["sizes"][move.result])]
    if move.primitive.name != "slice":
        return []
    limits = zip(params["start_indices"], params["limit_indices"], move.shape)
    return [(i, a, b) for i, (a, b, size) in enumerate(limits) if (a, b) != (0, size)]


class ByIdentity:
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
        self._origins = ByIdentity()
        self._constants = ByIdentity()
        self._computed = ByIdentity()
        """The values that were computed from parameters and other values."""

    def of(self, value: Any) -> Origin | None:
        """Returns the origin of a value; None if it comes from anything but known parameters."""
        if not isinstance(value, jax.Array | np.ndarray):
            return None
        found: Origin | None = self._origins.get(value)
        return found

    def add(self, params: Iterable[tuple[tuple[str, ...], Any]]) -> None:
        """Records arrays as parameters, each with its path, if they are not known yet."""
        for path, leaf in params:
            if hasattr(leaf, "shape") and self._origins.get(leaf) is None:
                # ``nn.map_variables`` may have computed the parameter.
                is_moved = not self._computed.get(leaf)
                self._origins.set(leaf, Origin((Source(path, leaf.shape, leaf.dtype),), (), is_moved))

    def follow(self, primitive: Any, operands: Any, params: Any, results: Any) -> None:
        """Records the origins of the results of a primitive."""
        results = results if primitive.multiple_results else [results]
        if all(map(self._is_constant, operands)):
            for result in results:
                self._constants.set(result, True)
            return
        origins = [self.of(x) for x in operands]
        made_of = [origin for origin in origins if origin is not None]
        if not made_of:
            if any(map(self._computed.get, operands)):
                self._set_computed(results)
            return
        is_moved = primitive.name in MOVEMENTS and len(made_of) == len(operands)
        for i, result in enumerate(results):
            if is_moved:
                origin = _moved(primitive, params, operands[0], made_of, i)
            elif all(d is not None or self._is_constant(x) for x, d in zip(operands, origins)):
                origin = _computed(operands, origins, result)
            else:
                origin = None
                self._set_computed([result])
            if origin is not None:
                self._origins.set(result, origin)

    def call(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Records the results of a function that is not looked into."""
        if any(self.of(x) is not None or self._computed.get(x) for x in operands):
            self._set_computed(results)

    def _set_computed(self, results: Iterable[Any]) -> None:
        for result in results:
            self._computed.set(result, True)

    def _is_constant(self, value: Any) -> bool:
        """Returns whether a value is a number in the source of the model, or computed from such numbers.

        A parameter is no constant, although ``init`` may compute it from numbers, as ``zeros`` does.
        """
        if not isinstance(value, jax.Array):
            return np.ndim(value) == 0
        return bool(self._constants.get(value)) and self.of(value) is None


def _sources_of(made_of: Sequence[Origin]) -> tuple[Source, ...]:
    if len(made_of) == 1:
        return made_of[0].sources
    named = [
        [source if d.moves is None else source._replace(part=d.part()) for source in d.sources]
        for d in made_of
    ]
    return tuple(source for sources in named for source in sources)


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
    return Origin(_sources_of(made_of), moves, all(d.is_moved for d in made_of))


def _computed(operands: Any, origins: list[Origin | None], result: Any) -> Origin:
    """Returns the origin of a result of arithmetic with parameters and numbers.

    Its moves are those of the first operand of the same shape, so that ``Origin.part`` names both alike.
    """
    made_of = [d for d in origins if d is not None]
    alike = [d for x, d in zip(operands, origins) if d is not None and np.shape(x) == result.shape]
    first = alike[0] if alike else None
    sources = _sources_of(made_of)
    if first is not None and first.moves is not None:
        # ``part`` reads the shape of the parameter that the moves begin with from the first source.
        sources = tuple(dict.fromkeys((first.sources[0], *sources)))
    return Origin(sources, first.moves if first is not None else None, is_moved=False)
