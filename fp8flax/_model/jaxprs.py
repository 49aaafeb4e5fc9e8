"""Says what a program that JAX has traced does: which of its inputs it reads, which contractions it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8flax._compat.interpreter import Set, Sets, results_within
from fp8flax._compat.jaxprs import programs_in
from fp8flax._core.names import BY_OP

# What changes the place or the dtype of values, and nothing else.
CAST = "convert_element_type"
MOVEMENTS = (
    *("broadcast_in_dim", "concatenate", CAST, "copy", "copy_p", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "transpose"),
)
# Of these, what leaves every value in its place.
CASTS = (CAST, "copy", "copy_p", "sharding_constraint")
# What leaves every value somewhere, once.
BIJECTIONS = (*CASTS, "reshape", "rev", "squeeze", "transpose")
# A whole element of a stack of names, where a module's name may only begin alike.
IN_OP = re.compile(rf"\b{BY_OP}\b")


class Moved(NamedTuple):
    """A part of an input, or an input that was moved or cast."""

    input: int


ELSE = None
"""Stands for everything else: a constant, or a value that was computed."""


class Reads(Sets):
    """Finds which inputs a program reads. A value is the set of what it may be.

    The elements of such a set are ``i`` for the input ``i`` as it is, ``Moved(i)``, and ``ELSE``. An input
    that is only moved, returned, or given to an FP8 op is not read.
    """

    def __init__(self) -> None:
        self.read: set[int] = set()

    def is_op(self, eqn: Any) -> bool:
        """Tells whether an equation is part of an FP8 op, which may read the inputs."""
        return IN_OP.search(str(eqn.source_info.name_stack)) is not None

    def move(self, eqn: Any, operands: list[Set]) -> Set | None:
        """Returns the value of the results of a movement; None for an equation that is none."""
        if eqn.primitive.name in MOVEMENTS and not any(ELSE in operand for operand in operands):
            return self.part_of(frozenset().union(*operands))
        return None

    def constant(self, value: Any) -> Set:
        return frozenset([ELSE])

    def inside(self, eqn: Any) -> Reads | None:
        return None if self.is_op(eqn) else self

    def equation(self, eqn: Any, operands: list[Set]) -> list[Set]:
        result = None
        if not self.is_op(eqn):
            result = self.move(eqn, operands)
            if result is None:
                for operand in operands:
                    self.use(operand)
        return [frozenset([ELSE]) if result is None else result] * len(eqn.outvars)

    def decide(self, condition: Set) -> None:
        self.use(condition)

    def part_of(self, whole: Set) -> Set:
        return frozenset(ELSE if one is ELSE else Moved(_input_of(one)) for one in whole)

    def use(self, value: Set) -> None:
        """Remembers that something reads a value."""
        self.read.update(_input_of(one) for one in value if one is not ELSE)


def _input_of(element: int | Moved) -> int:
    return element.input if isinstance(element, Moved) else element


class Uses(NamedTuple):
    """What a primitive does with its operands."""

    reads: list[bool]
    """For each operand whether the primitive reads it, other than by an FP8 op inside of it."""
    returns: list[int | None]
    """For each result the operand that it is; None if it is another value."""


def uses_of(primitive: Any, params: Mapping[str, Any], num_operands: int, num_results: int) -> Uses:
    """Returns what a primitive does with its operands.

    Linen's transformations give all parameters to their bodies, whatever these do with them, and return the
    variables that a method might have changed.
    """
    rules, results = Reads(), None
    if programs_in(params):
        operands: list[Set] = [frozenset([i]) for i in range(num_operands)]
        results = results_within(primitive, params, operands, num_results, rules)
    if results is None:
        return Uses([True] * num_operands, [None] * num_results)
    returns: list[int | None] = []
    for result in results:
        only = next(iter(result)) if len(result) == 1 else None
        returns.append(only if isinstance(only, int) else None)
        if returns[-1] is None:
            rules.use(result)
    return Uses([i in rules.read for i in range(num_operands)], returns)
