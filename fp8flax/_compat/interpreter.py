"""Interprets a program that JAX has traced (a jaxpr): evaluates its equations on values of any kind.

``interpret`` loops over the equations and keeps the value of each variable. ``Rules`` define what a value
is, and how to evaluate an equation, a loop and a branch. In the rules of this file, ``Sets``, a value is a
set that says where a variable comes from. A loop is repeated until no set grows.

Why: ``freeze`` and ``quantize_model`` find out which parameters a program reads. JAX has no public way to
do that.

Internals: the classes of ``jaxprs``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from fp8flax._compat.jaxprs import is_literal, jaxpr_of, num_consts_and_carry, programs_in

RUNS_ONCE = (
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
)
"""The primitives that run one program, once, on their unchanged operands, and return its results."""

V = TypeVar("V")


class Rules(ABC, Generic[V]):
    """Rules to interpret a program: one method for each kind of equation.

    ``V`` is the type of the values that stand for the variables of the program.
    """

    @abstractmethod
    def constant(self, value: Any) -> V:
        """Returns the value of a number or an array that is part of the program."""

    @abstractmethod
    def equation(self, eqn: Any, operands: list[V]) -> list[V]:
        """Returns the results of an equation without programs, or whose programs are not interpreted."""

    def inside(self, eqn: Any) -> Self | None:
        """Returns the rules for the programs inside an equation; None if these are not to be interpreted.

        If the result is None, the method ``equation`` evaluates the whole equation.
        """
        return self

    def call(self, primitive: Any, program: Any, operands: list[V], params: Mapping[str, Any]) -> list[V]:
        """Returns the results of a primitive that runs one program, such as those in ``RUNS_ONCE``."""
        return interpret(program, operands, self)

    @abstractmethod
    def branch(self, programs: Sequence[Any], index: V, operands: list[V]) -> list[V]:
        """Returns the results of ``lax.cond`` and ``lax.switch``."""

    @abstractmethod
    def scan(
        self, program: Any, consts: list[V], carry: list[V], xs: list[V], params: Mapping[str, Any]
    ) -> list[V]:
        """Returns the carry and the stacked results of ``lax.scan``."""

    @abstractmethod
    def while_loop(
        self, cond: Any, cond_consts: list[V], body: Any, body_consts: list[V], carry: list[V]
    ) -> list[V]:
        """Returns the carry of ``lax.while_loop``."""


def interpret(program: Any, operands: Sequence[V], rules: Rules[V]) -> list[V]:
    """Returns the values of a program's results, given those of its inputs.

    Args:
        program: a jaxpr, closed or not.
        operands: a value for each input.
        rules: the rules that evaluate each equation.
    """
    jaxpr = jaxpr_of(program)
    values = dict(zip(jaxpr.invars, operands, strict=True))
    constants = getattr(program, "consts", ())
    values.update(zip(jaxpr.constvars, map(rules.constant, constants), strict=True))

    def read(atom: Any) -> V:
        return rules.constant(atom.val) if is_literal(atom) else values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        inner = rules.inside(eqn) if programs_in(eqn.params) else None
        results = None
        if inner is not None:
            results = results_within(eqn.primitive, eqn.params, given, len(eqn.outvars), inner)
        if results is None:
            results = rules.equation(eqn, given)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def results_within(
    primitive: Any, params: Mapping[str, Any], operands: list[V], num_results: int, rules: Rules[V]
) -> list[V] | None:
    """Returns the results of a primitive that runs programs; None for an unknown primitive.

    A primitive is known if it is a loop or a branch, or if it has one program that takes as many operands
    and returns as many results as the primitive.

    Args:
        primitive: the primitive of an equation.
        params: the parameters of the primitive, which include the programs.
        operands: the operands of the equation.
        num_results: how many results the equation has.
        rules: the rules for the programs.
    """
    if primitive.name == "cond":
        return rules.branch(params["branches"], operands[0], operands[1:])
    if primitive.name == "while":
        num_cond = params["cond_nconsts"]
        first_carry = num_cond + params["body_nconsts"]
        return rules.while_loop(
            params["cond_jaxpr"],
            operands[:num_cond],
            params["body_jaxpr"],
            operands[num_cond:first_carry],
            operands[first_carry:],
        )
    if primitive.name == "scan":
        num_consts, num_carry = num_consts_and_carry(params)
        consts, rest = operands[:num_consts], operands[num_consts:]
        return rules.scan(params["jaxpr"], consts, rest[:num_carry], rest[num_carry:], params)
    programs = programs_in(params)
    if len(programs) != 1:
        return None
    (jaxpr,) = map(jaxpr_of, programs)
    if (len(jaxpr.invars), len(jaxpr.outvars)) != (len(operands), num_results):
        return None
    return rules.call(primitive, programs[0], operands, params)


Set = frozenset[Any]


class Sets(Rules[Set]):
    """Rules in which the value of a variable is the set of places that it may come from.

    The set of a result of a branch is the union of the sets from all branches.
    """

    def decide(self, condition: Set) -> None:
        """Does nothing; a subclass may record the set of a value that chooses a branch or ends a loop."""

    def part_of(self, whole: Set) -> Set:
        """Returns the set of an array, given the set of another array that it is a part of.

        Also called the other way round, for the stack that ``lax.scan`` makes of its results.
        """
        return whole

    def call(
        self, primitive: Any, program: Any, operands: list[Set], params: Mapping[str, Any]
    ) -> list[Set]:
        results = interpret(program, operands, self)
        # Other primitives, such as shard_map, run their program on parts of the operands. So a result is
        # not the operand that the program returns.
        return results if primitive.name in RUNS_ONCE else list(map(self.part_of, results))

    def branch(self, programs: Sequence[Any], index: Set, operands: list[Set]) -> list[Set]:
        self.decide(index)
        return [frozenset().union(*each) for each in zip(*(interpret(p, operands, self) for p in programs))]

    def scan(
        self, program: Any, consts: list[Set], carry: list[Set], xs: list[Set], params: Mapping[str, Any]
    ) -> list[Set]:
        slices, num_carry = list(map(self.part_of, xs)), len(carry)
        while True:
            results = interpret(program, [*consts, *carry, *slices], self)
            after = [old | new for old, new in zip(carry, results)]
            if after == carry:
                return [*carry, *map(self.part_of, results[num_carry:])]
            carry = after

    def while_loop(
        self, cond: Any, cond_consts: list[Set], body: Any, body_consts: list[Set], carry: list[Set]
    ) -> list[Set]:
        while True:
            (condition,) = interpret(cond, [*cond_consts, *carry], self)
            self.decide(condition)
            results = interpret(body, [*body_consts, *carry], self)
            after = [old | new for old, new in zip(carry, results, strict=True)]
            if after == carry:
                return carry
            carry = after
