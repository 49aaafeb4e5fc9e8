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
    part: str = ""
    """The name of the part of the parameter, if the value is joined of several; see ``Origin.part``."""


class Move(NamedTuple):
    """A step that moved or cast a value of this shape; ``result`` is the index of the new value."""

    primitive: Any
    params: dict[str, Any]
    result: int
    shape: tuple[int, ...]

    @property
    def is_bijection(self) -> bool:
        """Whether the step keeps each value once; ``w[None]`` is a broadcast that does."""
        if self.primitive.name == "broadcast_in_dim":
            return math.prod(self.params["shape"]) == math.prod(self.shape)
        return self.primitive.name in BIJECTIONS

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """The dimensions that a slice or a split does not take whole, each with its range."""
        params = self.params
        if self.primitive.name == "split":
            start = sum(params["sizes"][: self.result])
            return [(params["axis"], start, start + params["sizes"][self.result])]
        if self.primitive.name != "slice":
            return []
        limits = zip(params["start_indices"], params["limit_indices"], self.shape)
        return [(i, a, b) for i, (a, b, size) in enumerate(limits) if (a, b) != (0, size)]


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
        return self.is_whole_parameter and all(m.primitive.name in CASTS for m in self.moves or ())

    @property
    def is_whole_parameter(self) -> bool:
        """Whether the value holds each element of one parameter once, in any order and shape."""
        return self.is_moved and self.moves is not None and all(m.is_bijection for m in self.moves)

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

    def name(self, module: tuple[str, ...], summed: Sequence[int]) -> str:
        """Returns the name of the value in a module at this path; the state of the op is named with it.

        The name does not depend on what else a method computes. Different kernels of a module have
        different names, but for those that ``part`` names alike. A kernel that is used twice in the same
        way has one state, as a layer that is called twice has.

        Args:
            module: the path of the module.
            summed: the dimensions of the value over which a contraction sums.
        """
        own = len(module)
        paths = [x.path[own:] if x.path[:own] == module else x.path for x in self.sources]
        names = ["-".join(key.replace("/", "-") for key in path) for path in paths]
        different = dict.fromkeys(name + source.part for name, source in zip(names, self.sources))
        return "-".join(different) + self.part(summed)

    def part(self, summed: Sequence[int] = ()) -> str:
        """Returns the name of the part of a parameter that the value is.

        The name is empty for a whole parameter, ``-axis0-1`` for ``w[1]`` and ``-axis1-64-128`` for
        ``w[:, 64:128]``. ``-T`` follows if the contraction sums over the last dimension of the parameter,
        as in ``x @ w.T``. After a reshape, the name of a slice begins with the shape that is sliced:
        ``-4x8-axis0-1`` for ``w.reshape(4, 8)[1]``. A joined value counts as whole.
        """
        if self.moves is None:
            return ""
        rank = len(self.sources[0].shape)
        axes, text, is_reshaped = list(range(rank)), "", False
        for move in self.moves:
            name, params = move.primitive.name, move.params
            if move.ranges and is_reshaped:
                text += "-" + "x".join(map(str, move.shape))
                axes, is_reshaped = list(range(len(move.shape))), False
            for i, start, end in move.ranges:
                text += f"-axis{axes[i]}-{start}" + ("" if end == start + 1 else f"-{end}")
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


CONSTANT = "constant"
"""Stands for a number in the source of the model, or a value that is computed from such numbers."""
COMPUTED = "computed"
"""Stands for a value that is computed from parameters and other values."""


class ParamOrigins:
    """Records the origins of all values of one call of a model, in all of its traces."""

    def __init__(self) -> None:
        self._known = ByIdentity()

    def of(self, value: Any) -> Origin | None:
        """Returns the origin of a value; None if it comes from anything but known parameters."""
        found = self._known.get(value)
        return found if isinstance(found, Origin) else None

    def _what_is(self, value: Any) -> Any:
        """Returns the origin of a value, ``CONSTANT``, ``COMPUTED``, or None."""
        found = self._known.get(value)
        is_number = found is None and not isinstance(value, jax.Array) and np.ndim(value) == 0
        return CONSTANT if is_number else found

    def add(self, params: Iterable[tuple[tuple[str, ...], Any]]) -> None:
        """Records arrays as parameters, each with its path, if they are not known yet."""
        for path, leaf in params:
            if hasattr(leaf, "shape") and self.of(leaf) is None:
                # ``nn.map_variables`` may have computed the parameter.
                is_moved = self._known.get(leaf) != COMPUTED
                self._known.set(leaf, Origin((Source(path, leaf.shape),), (), is_moved))

    def follow(self, primitive: Any, operands: Any, params: Any, results: Any) -> None:
        """Records the origins of the results of a primitive."""
        results = results if primitive.multiple_results else [results]
        known = [self._what_is(x) for x in operands]
        made_of = [one for one in known if isinstance(one, Origin)]
        is_moved = bool(made_of) and primitive.name in MOVEMENTS and len(made_of) == len(operands)
        for i, result in enumerate(results):
            if all(one == CONSTANT for one in known):
                self._known.set(result, CONSTANT)
            elif is_moved:
                self._known.set(result, _moved(primitive, params, operands[0], made_of, i))
            elif made_of and all(isinstance(one, Origin) or one == CONSTANT for one in known):
                self._known.set(result, _computed(operands, known, result))
            elif made_of or COMPUTED in known:
                self._known.set(result, COMPUTED)

    def call(self, operands: Sequence[Any], results: Sequence[Any]) -> None:
        """Records the results of a function that is not looked into."""
        if any(isinstance(one := self._what_is(x), Origin) or one == COMPUTED for x in operands):
            for result in results:
                self._known.set(result, COMPUTED)


def _sources_of(made_of: Sequence[Origin]) -> tuple[Source, ...]:
    """Returns the parameters of a value that is made of several; each has the name of its part."""
    if len(made_of) == 1:
        return made_of[0].sources
    named = [(one, source) for one in made_of for source in one.sources]
    return tuple(x if one.moves is None else x._replace(part=one.part()) for one, x in named)


def _moved(primitive: Any, params: dict[str, Any], first: Any, made_of: list[Origin], index: int) -> Origin:
    """Returns the origin of one result of a movement; ``first`` is the first operand."""
    moves = made_of[0].moves if len(made_of) == 1 else None
    if moves is not None:
        moves = (*moves, Move(primitive, params, index, first.shape))
    return Origin(_sources_of(made_of), moves, all(d.is_moved for d in made_of))


def _computed(operands: Any, known: list[Any], result: Any) -> Origin:
    """Returns the origin of a result of arithmetic with parameters and numbers.

    Its moves are those of the first operand of the same shape, so that ``Origin.part`` names both alike.
    """
    made_of = [(one, x) for one, x in zip(known, operands) if isinstance(one, Origin)]
    alike = [one for one, x in made_of if np.shape(x) == result.shape and one.moves is not None]
    sources = _sources_of([one for one, _ in made_of])
    if not alike:
        return Origin(sources, None, is_moved=False)
    # ``part`` reads the shape of the parameter that the moves begin with from the first source.
    return Origin(tuple(dict.fromkeys((alike[0].sources[0], *sources))), alike[0].moves, is_moved=False)
