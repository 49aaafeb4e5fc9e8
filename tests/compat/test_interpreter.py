"""Goes through traced programs with sets and with arrays, in all that JAX puts around a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8flax._compat.interpreter import Values, interpret
from fp8flax._compat.jaxprs import equations
from fp8flax._compat.report_primitive import ToHost, is_report, key_of, with_report

NUMBERS = np.arange(3, dtype=np.float32)


class Reported(Values):
    def absent(self, like):
        return np.full(like.shape, -1, np.float32)

    def together(self, first, second):
        return jnp.maximum(first, second)

    def inside(self, eqn):
        return self

    def equation(self, eqn, operands):
        if not is_report(eqn):
            return super().equation(eqn, operands)
        x, report = operands
        self.report(key_of(eqn), report)
        return [x]


def reports_of(f, *args):
    rules = Reported()
    out = interpret(jax.make_jaxpr(f)(*args), args, rules)
    return out, rules.reports


def note(x, key="a"):
    return with_report(x, [10 * x], key)


@pytest.mark.newest
def test_reports_come_out_of_everything():
    def f(x):
        x = jax.jit(jax.checkpoint(note))(x)
        x, _ = lax.scan(lambda c, y: (note(c + y), None), x, NUMBERS)
        x = lax.while_loop(lambda x: x < 4, lambda x: note(x + 1, "d"), x)
        x = lax.cond(x > 100, lambda: note(note(x), "b"), lambda: note(2 * x))
        return jax.vmap(lambda y: note(x + y, "c"))(NUMBERS)

    out, reports = reports_of(f, np.float32(1))
    np.testing.assert_array_equal(out[0], [8, 9, 10])
    first, in_scan, in_branch = reports["a"]
    np.testing.assert_array_equal(first, 10)
    np.testing.assert_array_equal(in_scan, [10, 20, 40])
    np.testing.assert_array_equal(in_branch, 80)
    np.testing.assert_array_equal(reports["b"], [-1])  # of the branch that did not run
    np.testing.assert_array_equal(reports["c"], [[80, 90, 100]])


@pytest.mark.newest
def test_a_report_to_the_host_is_no_side_effect():
    """The ``nn.scan`` of Flax 0.12.12 raises an error if its body has a side effect."""
    seen = []
    key = ToHost(lambda label, x: seen.extend(label * np.ravel(x)), 2)

    @jax.jit
    def f(x):
        x, _ = lax.scan(lambda c, y: (note(c + y, key), None), x, NUMBERS)
        return jax.jvp(jax.vmap(lambda y: note(x + y, key)), (NUMBERS,), (NUMBERS,))

    assert not jax.make_jaxpr(f)(np.float32(1)).effects
    jax.block_until_ready(f(np.float32(1)))
    assert sorted(seen) == [20, 40, 80, 80, 100, 120]


def test_a_program_that_is_computed_again_keeps_its_scopes():
    def f(x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jax.named_call(jnp.sin, name="inner")(x))(x)

    again = jax.make_jaxpr(lambda x: reports_of(f, x)[0])(np.float32(1))
    (sin,) = [one for one in equations(again) if one.eqn.primitive.name == "sin"]
    assert sin.scopes.startswith("outer/")
    assert "inner" in sin.scopes


@pytest.mark.newest
def test_equations_have_their_scopes_and_how_often_they_run():
    def f(x):
        with jax.named_scope("outer"):
            loop = jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=4)[0])
            return lax.scan(lambda c, _: (loop(c), None), jnp.cos(x), length=3)[0]

    program = jax.make_jaxpr(f)(np.float32(1))
    found = {one.eqn.primitive.name: one for one in equations(program)}
    assert (found["cos"].times, found["sin"].times) == (1, 12)
    assert found["sin"].scopes.startswith("outer")
    names = [one.eqn.primitive.name for one in equations(program, looks_into=lambda one: False)]
    assert names == ["cos", "scan"]
