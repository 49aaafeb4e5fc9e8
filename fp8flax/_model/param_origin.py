"""Finds the parameter that a value of a model comes from, and how the model cast and moved the parameter.

A contraction gets a traced value as its kernel, such as the bfloat16 transpose of one index into a
parameter. The way from this value to a path in the variables, and in a file, has four steps:

1. When a method begins, the call passes the arrays that the method sees to ``ParamOrigins.add``, with their
   paths in the variables of the call. Inside of ``nn.scan`` this is the slice of one layer, with the path
   of the whole stack: ``("layers", "Dense_0", "kernel")``.
2. ``ParamOrigins.follow`` is called for each primitive, and records the ``Origin`` of each result. Values
   are known by their identity, because a tracer has no name.
3. ``Interception`` asks ``ParamOrigins.of`` for the origin of each operand. ``Origin.name`` names the op
   after the kernel, so the op has the same state in each trace of the model.
4. ``freeze`` puts the codes of the kernel at ``Origin.sources[0].path`` in the variables. The name in a
   file follows from this path: ``layers.Dense_0.weight``.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from fp8flax._compat.jaxprs import Operands, Params, Primitive
from fp8flax._compat.stand_in import READ
from fp8flax._core.types import Path

# Primitives that leave every value in its place.
CAST = "convert_element_type"
CASTS = (CAST, READ, "copy", "sharding_constraint")
# Primitives after which every value is there exactly once.
BIJECTIONS = (*CASTS, "reshape", "rev", "squeeze", "transpose")
# Primitives that change only the place or the dtype of values.
MOVEMENTS = (*BIJECTIONS, "broadcast_in_dim", "slice", "split", "unstack")


class Source(NamedTuple):
    """A parameter as a method sees it; inside ``nn.scan`` it is a slice of the caller's array."""

    path: Path
    shape: tuple[int, ...]
    part: str = ""
    """The name of the part of the parameter, if the value is joined of several; see ``Origin.part``."""


class Origin(NamedTuple):
    """The parameters and numbers that a value is made of, if it is made of nothing else.

    ``part`` and ``axes`` serve to name the value. ``cut`` and ``steps`` serve to store it in FP8: the value
    is ``cut`` out of the parameter, and the ``steps`` follow. For a parameter ``w`` of shape (16, 8)::

        value                    part            axes    cut        steps
        w                                        (0, 1)  None       ()
        w.T                                      (1, 0)  None       (transpose,)
        w[1]                     -axis0-1        (1,)    (0, 1, 2)  (squeeze,)
        w[:, 4:]                 -axis1-4-8      (0, 1)  (1, 4, 8)  ()
        w[:8:2]                  -axis0-0-8-2    (0, 1)  None       None
        w.reshape(4, 32)                         None    None       (reshape,)
        w.reshape(4, 32)[1]      -4x32-axis0-1   (1,)    None       None
        2 * w, w + v                             (0, 1)  None       None
        jnp.concatenate([w, v])  None            None    None       None
    """

    sources: tuple[Source, ...] = ()
    """The parameters; none if the value comes from numbers in the source of the model."""
    part: str | None = None
    """The name of the part of one parameter; None if the value is joined of several.

    After a reshape, it begins with the shape that is sliced. A result of arithmetic has the name of its
    first operand of the same shape."""
    axes: tuple[int, ...] | None = None
    """For each dimension of the value, that of the parameter; None after a reshape."""
    steps: tuple[tuple[Primitive, Params], ...] | None = None
    """The primitives, each with its parameters, that make the value from the cut.

    None if arithmetic made the value, or it does not hold each element of the cut once. Then no codes in
    the place of the parameter can become the value, and the parameter stays wide."""
    cut: tuple[int, int, int] | None = None
    """The axis of the parameter, the start and the end; None for the whole parameter."""

    def __hash__(self) -> int:
        return hash((self.sources, self.part, self.axes))  # the steps hold dicts

    def name(self, module: Path, summed: Sequence[int]) -> str:
        """Returns the name of the value in a module at this path; the state of the op is named with it.

        It is ``w`` for ``x @ w`` and ``w-axis0-1-T`` for ``x @ w[1].T``. ``summed`` are the dimensions that
        the contraction sums over; with the last one of the parameter among them, ``-T`` is added. The name
        does not depend on what else a method computes. A kernel that is used twice alike has one state.
        """
        own = len(module)
        paths = [x.path[own:] if x.path[:own] == module else x.path for x in self.sources]
        different = dict.fromkeys(name_of(path) + x.part for path, x in zip(paths, self.sources))
        axes, last = self.axes or (), len(self.sources[0].shape) - 1
        is_transposed = len(axes) > 1 and any(axes[i] == last for i in summed)
        return "-".join(different) + (self.part or "") + "-T" * is_transposed

    @property
    def note(self) -> str:
        """What a value is that is computed from this one in another way; empty for numbers."""
        return f"a kernel that is computed from {'/'.join(self.sources[0].path)}" if self.sources else ""

    def moved(self, primitive: Primitive, params: Params, index: int, shape: tuple[int, ...]) -> Origin:
        """Returns the origin of the result with this index of a movement of the value, of this shape."""
        name, part, axes, steps = primitive.name, self.part, self.axes, self.steps
        if part is None:
            return self
        if name == "slice":
            origin, strides = self, params["strides"] or (1,) * len(shape)
            for i, places in enumerate(zip(params["start_indices"], params["limit_indices"], strides)):
                origin = origin._sliced(i, *places, shape)
            return origin
        if name == "split":
            start = sum(params["sizes"][:index])
            return self._sliced(params["axis"], start, start + params["sizes"][index], 1, shape)
        if name == "unstack":  # one index into a dimension, which the result lacks
            origin = self._sliced(params["axis"], index, index + 1, 1, shape)
            return origin.moved(jax.lax.squeeze_p, {"dimensions": (params["axis"],)}, 0, shape)
        if steps is not None:
            # A broadcast may only add dimensions of size 1, as in w[None].
            is_once = name in BIJECTIONS or math.prod(params["shape"]) == math.prod(shape)
            steps = (*steps, (primitive, params)) if is_once else None
        if name == "transpose":
            axes = axes and tuple(axes[i] for i in params["permutation"])
        elif name == "squeeze":
            axes = axes and tuple(axis for i, axis in enumerate(axes) if i not in params["dimensions"])
        elif name in ("broadcast_in_dim", "reshape"):
            part += "-T" * (axes is not None and axes != tuple(sorted(axes)))
            axes = None
        return self._replace(part=part, axes=axes, steps=steps)

    def _sliced(self, i: int, start: int, end: int, stride: int, shape: tuple[int, ...]) -> Origin:
        """Returns the origin of a slice of dimension ``i`` of the value, which has this shape."""
        if (start, end, stride) == (0, shape[i], 1):
            return self
        part, axes = self.part or "", self.axes
        if axes is None:
            part, axes = f"{part}-{'x'.join(map(str, shape))}", tuple(range(len(shape)))
        part += f"-axis{axes[i]}-{start}" + ("" if end == start + 1 else f"-{end}")
        part += "" if stride == 1 or end == start + 1 else f"-{stride}"
        named = Origin(self.sources, part, axes)
        if self.steps is None or self.axes is None or self.cut or stride != 1:
            return named
        # The same slice before the steps gives the same value, so it becomes the cut. (A reversal would
        # exchange its ends, and a sharding may not fit it.)
        is_reversed = any(step.name == "rev" for step, _ in self.steps)
        steps = tuple(step for step in self.steps if step[0].name != "sharding_constraint")
        return named if is_reversed else named._replace(steps=steps, cut=(axes[i], start, end))

    @property
    def is_one_parameter(self) -> bool:
        """Whether the value is one parameter, or one of several along its first axis, at most cast."""
        if self.steps is None:
            return False
        moves = [primitive.name for primitive, _ in self.steps if primitive.name not in CASTS]
        if self.cut is None:
            return not moves
        axis, start, end = self.cut
        return (axis, end) == (0, start + 1) and moves == ["squeeze"]

    def cut_of(self, parameter: jax.Array) -> jax.Array:
        """Returns the cut of a parameter."""
        if self.cut is None:
            return parameter
        axis, start, end = self.cut
        return jax.lax.slice_in_dim(parameter, start, end, axis=axis)

    def after_steps(self, cut: jax.Array, casts: bool = True) -> jax.Array:
        """Returns the value that the steps make from the cut, perhaps without casts."""
        for primitive, params in self.steps or ():
            if primitive.name != CAST or casts:
                cut = primitive.bind(cut, **params)
        return cut

    def into_cut(self, codes: jax.Array) -> jax.Array:
        """Moves codes from the places of the value to the places of the cut, which they fill.

        ``jax.linear_transpose`` of the steps does so. It needs a wide dtype, and bfloat16 holds every code
        exactly.
        """
        like = jax.eval_shape(self.cut_of, jax.ShapeDtypeStruct(self.sources[0].shape, jnp.bfloat16))
        back = jax.linear_transpose(partial(self.after_steps, casts=False), like)
        (result,) = back(codes.astype(jnp.bfloat16))
        return result.astype(codes.dtype)


def hold_each_once(origins: Sequence[Origin]) -> bool:
    """Returns whether the values of a parameter, in the order of their cuts, hold each element once.

    ``w[:4]`` and ``w[4:]`` do; ``w[:4]`` and ``w[2:]`` do not.
    """
    if any(origin.steps is None for origin in origins):
        return False
    shape = origins[0].sources[0].shape
    axes, starts, ends = zip(*(origin.cut or (0, 0, shape[0]) for origin in origins))
    return len({*axes}) == 1 and [0, *ends] == [*starts, shape[axes[0]]]


# The grammar of ``Origin.name``, which ``kernel_named`` reads:
#
#     name   = value *("-" value) *part    several values if the kernel is computed from several parameters
#     value  = ["~"] key *("-" key) *part  the path of a parameter, from the module on
#     part   = "-axis0-3"                  index 3 into axis 0
#            / "-axis0-4-8"                the slice 4:8 of axis 0; "-axis0-0-8-2" is 0:8:2
#            / "-4x32" / "-T"              reshaped to (4, 32) before an index; transposed
#
# In a key, ``~-``, ``~~`` and ``~.`` are ``-``, ``~`` and ``/``. A ``~`` is in front of a path that begins
# like a part or like the name of a product: ``axis0``, ``product_0``.


def name_of(path: Path) -> str:
    """Returns the path of a parameter as a text for the name of an op; no other path has this text."""
    text = "-".join(re.sub("[-~]", r"~\g<0>", key).replace("/", "~.") for key in path)
    return f"~{text}" if re.match(r"(T|axis\d+|\d+(x\d+)*|(\w+_)?product_\d+)(-|$)", text) else text


def kernel_named(name: str) -> tuple[Path, int | None]:
    """Returns the path of a parameter and the index into it, from what ``Origin.name`` has returned.

    ``mlp-w`` is the parameter ``mlp/w``, and ``w-axis0-3-T`` is a transpose of ``w[3]``. The index is None
    for a whole parameter. No other kernel becomes a weight in a file.
    """
    keys, index = re.findall(r"(?:~.|[^~-])+", name), None
    while keys[-1] == "T":
        keys.pop()
    if keys[-2:-1] == ["axis0"] and keys[-1].isdecimal():
        index = int(keys[-1])
        keys = keys[:-2]
    return tuple(re.sub("~(.)", lambda x: "/" if x[1] == "." else x[1], key) for key in keys), index


NUMBER = Origin(part="")
"""The origin of a number in the source of the model, and of what is computed from numbers."""


class NoKernel(NamedTuple):
    """What is known of a value that cannot be a kernel, such as ``x @ w``: ``NoKernel("", True)``."""

    note: str
    """What the value is, for reasons in reports; empty if an input of the model is in it."""
    has_params: bool = False
    """Whether a parameter is in it."""


CONSTANT = NoKernel("a constant")
"""An array in the source of the model."""

Known: TypeAlias = Origin | NoKernel | None
"""What is known of a value; None if an input of the model may be in it, and no parameter is.

For a parameter ``w``, an input ``x``, and a NumPy array ``mask`` in the source of the model::

    w[1], 2 * w           an Origin, with the source w
    2, 2 * 3.0            NUMBER
    mask                  CONSTANT
    w + mask              NoKernel("a kernel that is computed from w", True)
    x @ w                 NoKernel("", True)
    x, x + mask           None
"""


class ParamOrigins:
    """Records what the values of one call of a model are made of, in all of its traces."""

    def __init__(self) -> None:
        # By the identity of a value: a weak reference, since a tracer must not outlive its trace.
        self._known: dict[int, tuple[weakref.ref[object], Origin | NoKernel]] = {}

    def of(self, value: object) -> Origin | None:
        """Returns the origin of a value that is made of parameters and numbers; None for others."""
        known = self._recorded(value)
        return known if isinstance(known, Origin) and known.sources else None

    def note(self, *operands: ArrayLike) -> str:
        """Returns what the first operand is that no input of the model is in; empty if there is none."""
        is_traced = any(isinstance(x, jax.core.Tracer) for x in operands)
        for known in (self._what_is(x, is_traced) for x in operands):
            if known == NUMBER:
                return CONSTANT.note
            if isinstance(known, NoKernel) and known.note:
                return known.note
        return ""

    def add(self, arrays: Iterable[tuple[Path, object]], kind: str = "") -> None:
        """Records arrays as parameters, or variables of another kind, by their paths, if not known yet."""
        for path, leaf in arrays:
            if isinstance(leaf, jax.Array | np.ndarray) and self.of(leaf) is None:
                known = self._recorded(leaf)
                # ``nn.map_variables`` may have computed the parameter.
                steps = None if isinstance(known, NoKernel) and known.has_params else ()
                param = Origin((Source(path, leaf.shape),), "", tuple(range(len(leaf.shape))), steps)
                self._record(leaf, NoKernel(f"{'/'.join(path)}, {kind}") if kind else param)

    def pass_on(self, values: Sequence[object], others: Sequence[object]) -> None:
        """Records other values as these, as a function gets its operands as inputs."""
        for value, other in zip(values, others):
            if (known := self._recorded(value)) is not None:
                self._record(other, known)

    def follow(
        self, operands: Operands, results: Operands, primitive: Primitive = None, params: Params = None
    ) -> None:
        """Records the results of a primitive, or of a function that is not looked into."""
        is_traced = any(isinstance(x, jax.core.Tracer) for x in results)
        known = [self._what_is(x, is_traced) for x in operands]
        origins = [x for x in known if isinstance(x, Origin)]
        for i, result in enumerate(results):
            if any(result is x for x in operands):
                continue  # stays what it is
            made: Known
            if primitive is None or len(origins) < len(known):
                made = _computed(known)
            elif primitive.name in MOVEMENTS and len(origins) == 1 and origins[0].sources:
                made = origins[0].moved(primitive, params, i, operands[0].shape)
            else:
                made = _arithmetic([*zip(origins, map(np.shape, operands))], result.shape)
            if made is not None:
                self._record(result, made)

    def _record(self, value: object, known: Origin | NoKernel) -> None:
        records, key = self._known, id(value)
        records[key] = weakref.ref(value, lambda _: records.pop(key, None)), known

    def _recorded(self, value: object) -> Known:
        _, known = self._known.get(id(value), (None, None))
        return known

    def _what_is(self, value: ArrayLike, is_traced: bool) -> Known:
        """Returns what an operand is. One that is no tracer, beside tracers, is no input of the model."""
        known = self._recorded(value)
        if known is None and not (isinstance(value, jax.Array) or np.ndim(value)):
            return NUMBER
        is_constant = known is None and is_traced and not isinstance(value, jax.core.Tracer)
        return CONSTANT if is_constant else known


def _computed(known: Sequence[Known]) -> NoKernel | None:
    """Returns what a value is that is computed from these and cannot be a kernel."""
    params = [x for x in known if x and (x.has_params if isinstance(x, NoKernel) else x.sources)]
    notes = [x.note for x in (*params, *known) if x and x.note]
    has_input = any(x is None or x == NoKernel("", has_params=True) for x in known)
    note = "" if has_input or not notes else notes[0]
    return NoKernel(note, bool(params)) if params or note else None


def _arithmetic(operands: Sequence[tuple[Origin, tuple[int, ...]]], shape: tuple[int, ...]) -> Origin:
    """Returns the origin of a result of this shape, given those of the operands with their shapes."""
    made_of = [(origin, of_operand) for origin, of_operand in operands if origin.sources]
    if not made_of:
        return NUMBER
    alike = (origin for origin, of_operand in made_of if of_operand == shape and origin.part is not None)
    first = next(alike, Origin())
    named = [
        source if origin.part is None or len(made_of) == 1 else source._replace(part=origin.part)
        for origin, _ in made_of
        for source in origin.sources
    ]
    # The axes are those of the first source.
    return Origin(tuple(dict.fromkeys((*first.sources[:1], *named))), first.part, first.axes)
