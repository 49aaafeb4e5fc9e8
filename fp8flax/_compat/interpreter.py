"""Interprets a program that JAX has traced (a jaxpr): evaluates its equations on values of any kind.

``interpret`` loops over the equations and keeps the value of each variable. ``Rules`` define what a value
is, and how to evaluate an equation, a loop and a branch. This file has two kinds of rules:

* ``Sets``: a value is a set that says where a variable comes from. A loop is repeated until no set grows.
* ``Values``: a value is an array. The program is computed again. Some of its equations report more arrays,
  and the rules return these from all loops and branches around the equation.

Why: ``statistics`` computes a step again with more results. ``freeze`` and ``quantize_model`` find out
which parameters a program reads. JAX has no public way to do either.

Internals: the classes of ``jaxprs``, and for ``Values`` the scopes of ``name_scopes``, the attribute
``ctx`` of equations and ``get_bind_params`` of primitives.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar

import jax
from jax import lax

from fp8flax._compat import name_scopes
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

    def scope(self, eqn: Any) -> contextlib.AbstractContextManager[Any]:
        """Returns the context in which an equation is interpreted."""
        return contextlib.nullcontext()

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
        with rules.scope(eqn):
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


Reports = dict[Hashable, list[Any]]
"""For each key, the trees of arrays that the equations with this key reported, in order.

The arrays of an equation in a ``lax.scan`` have a leading axis for the iterations."""


class Values(Rules[Any]):
    """Rules that compute a program again; a subclass defines which equations report which arrays."""

    def __init__(self) -> None:
        self.reports: Reports = {}

    @abstractmethod
    def absent(self, like: Any) -> Any:
        """Returns the report of a branch that did not run, in the shape and dtype of ``like``.

        All branches of ``lax.cond`` must return equal trees. So each branch returns these arrays for the
        reports that only other branches make.
        """

    @abstractmethod
    def together(self, first: Any, second: Any) -> Any:
        """Returns the reports of two rounds of a while loop as one."""

    def report(self, key: Hashable, tree: Any) -> None:
        """Appends a tree of arrays to the reports of a key."""
        self.reports.setdefault(key, []).append(tree)

    def constant(self, value: Any) -> Any:
        return value

    def scope(self, eqn: Any) -> contextlib.AbstractContextManager[Any]:
        return name_scopes.of_equation(eqn)

    def equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        return list(out) if eqn.primitive.multiple_results else [out]

    def _run(self, program: Any, *operands: Any) -> tuple[list[Any], Reports]:
        """Returns the results of a program, and its reports."""
        inside = copy.copy(self)
        inside.reports = {}
        return interpret(program, operands, inside), inside.reports

    def _add(self, reports: Reports) -> None:
        """Appends the reports of an inner program to the reports."""
        for key, trees in reports.items():
            self.reports.setdefault(key, []).extend(trees)

    def branch(self, programs: Sequence[Any], index: Any, operands: list[Any]) -> list[Any]:
        # All branches must return equal trees. ``most`` has, for each key, the reports of the branch with
        # the most reports; the other branches fill up theirs with ``absent``.
        most: Reports = {}
        for program in programs:
            _, shapes = jax.eval_shape(partial(self._run, program), *operands)
            for key, trees in shapes.items():
                most[key] = max(most.get(key, []), trees, key=len)

        def filled(program: Any, *operands: Any) -> Any:
            """Returns the results of a branch, and its reports, filled up to the number of ``most``."""
            out, made = self._run(program, *operands)
            full = {}
            for key, trees in most.items():
                own = made.get(key, [])
                full[key] = [*own, *map(self.absent, trees[len(own) :])]
            return out, full

        out, reports = lax.switch(index, [partial(filled, program) for program in programs], *operands)
        self._add(reports)
        return out

    def scan(
        self, program: Any, consts: list[Any], carry: list[Any], xs: list[Any], params: Mapping[str, Any]
    ) -> list[Any]:
        num_carry = len(carry)

        def body(carry: Any, x: Any) -> Any:
            out, reports = self._run(program, *consts, *carry, *x)
            return out[:num_carry], (out[num_carry:], reports)

        carry, (ys, reports) = lax.scan(
            body, carry, xs, params["length"], params["reverse"], params["unroll"]
        )
        self._add(reports)
        return [*carry, *ys]

    def while_loop(
        self, cond: Any, cond_consts: list[Any], body: Any, body_consts: list[Any], carry: list[Any]
    ) -> list[Any]:
        # The number of rounds is unknown, so the reports of all rounds become one. Those of the condition
        # are dropped.
        _, shapes = jax.eval_shape(partial(self._run, body), *body_consts, *carry)
        none = {key: list(map(self.absent, trees)) for key, trees in shapes.items()}

        def round_of(state: Any) -> Any:
            carry, before = state
            carry, made = self._run(body, *body_consts, *carry)
            return carry, {key: list(map(self.together, before[key], made[key])) for key in before}

        carry, reports = lax.while_loop(
            lambda state: self._run(cond, *cond_consts, *state[0])[0][0], round_of, (carry, none)
        )
        self._add(reports)
        return carry
