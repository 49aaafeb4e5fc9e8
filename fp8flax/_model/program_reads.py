"""Finds which inputs a program that JAX has traced reads, and which inputs it only moves or returns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from fp8flax._compat.interpreter import Set, Sets, results_within
from fp8flax._compat.jaxprs import programs_in
from fp8flax._core.names import BY_OP

# Primitives that return their operand unchanged.
SAME = ("copy", "copy_p", "sharding_constraint")
# Movements that leave every value in its place.
CAST = "convert_element_type"
CASTS = (CAST, *SAME)
# Movements after which every value is there exactly once.
BIJECTIONS = (*CASTS, "reshape", "rev", "squeeze", "transpose")
# All movements: primitives that change only the place or the dtype of values.
MOVEMENTS = (*BIJECTIONS, "broadcast_in_dim", "concatenate", "slice", "split")
# Matches a whole element of a stack of names, because a module's name may begin with the same text.
IN_OP = re.compile(rf"\b{BY_OP}\b")


class Moved(NamedTuple):
    """A part of an input, or an input that was moved or cast."""

    input: int


ELSE = None
"""Stands for every other value: a constant, or a result of arithmetic."""


class Reads(Sets):
    """Finds which inputs a program reads.

    Each value is described by the set of what it may be: ``i`` is the unchanged input ``i``, ``Moved(i)``
    is that input after a movement, and ``ELSE`` is any other value. An input that is only moved, returned,
    or passed to an FP8 op is not read.
    """

    movements: tuple[str, ...] = MOVEMENTS
    """The primitives whose results are parts of inputs, if all operands are."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def is_op(self, eqn: Any) -> bool:
        """Returns whether an equation is part of an FP8 op. What an op reads is not counted."""
        return IN_OP.search(str(eqn.source_info.name_stack)) is not None

    def move(self, eqn: Any, operands: list[Set]) -> Set | None:
        """Returns the value of the results of a movement; None if the equation is not a movement."""
        if eqn.primitive.name in self.movements and not any(ELSE in operand for operand in operands):
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
        """Records that an equation reads a value."""
        self.read.update(_input_of(one) for one in value if one is not ELSE)


def _input_of(element: int | Moved) -> int:
    return element.input if isinstance(element, Moved) else element


class Uses(NamedTuple):
    """How a primitive uses its operands."""

    reads: list[bool]
    """For each operand, whether the primitive reads it outside of FP8 ops."""
    returns: list[int | None]
    """For each result, the index of the operand that is returned there; None for any other value."""


def uses_of(primitive: Any, params: Mapping[str, Any], num_operands: int, num_results: int) -> Uses:
    """Returns how a primitive uses its operands, after looking into the programs inside of it.

    This matters for Linen's transformations. They pass all parameters to their bodies, which may read only
    some of them, and return all variables that a method might have changed.
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
