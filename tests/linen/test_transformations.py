"""Every layer gives the results of plain calls under every recipe and transformation.

The loss is a sum with fixed weights, so the cotangents are exact. Products of FP8 values in few binades add
up without rounding, so the order of a sum changes nothing. The results are therefore compared bit for bit
or nearly so.
"""

import functools
import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fp8flax as fp8
from tests import what_works
from tests.cases import OWG, RECIPES, added_up, cells, normal, variables_of
from tests.models import Einsum
from tests.what_works import COLUMNS

pytestmark = pytest.mark.newest

EXAMPLES, LENGTH, WIDTH = 4, 3, 8
TOLERANCE = 3e-6  # XLA may change the order of sums in float32


class Own(nn.Module):
    """A user's module that calls the op itself, twice, on one kernel."""

    op: object

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], x.shape[-1]))
        op = self.op()
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return op(x, kernel, dims) + op(2 * x, kernel, dims)


LAYERS = {
    "Dense": lambda op, name: nn.Dense(WIDTH, dot_general_cls=op, name=name),
    "Einsum": lambda op, name: Einsum((WIDTH, WIDTH), "...d,de->...e", op, name=name),
    "Own": lambda op, name: Own(op, name=name),
}
X, WEIGHTS = (normal(i, EXAMPLES, LENGTH, WIDTH) for i in (0, 1))


class Case:
    """One layer under one recipe, with variables that have some steps behind them."""

    def __init__(self, layer, recipe):
        op = partial(fp8.Fp8DotGeneralOp, recipe=RECIPES[recipe])
        self.make = partial(LAYERS[layer], op)
        self.layer = self.make(None)
        self.reference = LAYERS[layer](partial(op, form="qdq") if recipe == "delayed" else op, None)
        # This program is compiled once for most references.
        self.plain = jax.jit(fp8.value_and_grad(self.loss))
        variables = [variables_of(self.layer, X, seed=seed) for seed in (10, 11, 12)]
        self.each = [self.advanced(v) for v in variables]
        self.variables = self.each[0]

    def apply(self, variables, x):
        return self.layer.apply(variables, x)

    def loss(self, variables, x, weights):
        return jnp.sum(self.apply(variables, x) * weights)

    def advanced(self, variables):
        """Fills each history with other amaxes."""
        for factor in (3.0, 1.5) if OWG in variables else ():
            grads = self.plain(variables, factor * X, factor * WEIGHTS)[1]
            variables = {**variables, OWG: grads[OWG]}
        return variables

    @functools.cached_property
    def whole(self):
        return self.plain(self.variables, X, WEIGHTS)

    @functools.cached_property
    def looped(self):
        """Returns loss and gradients summed over one call for each example, with the state merged."""
        return added_up([self.plain(self.variables, x, w) for x, w in zip(X, WEIGHTS)])

    @functools.cached_property
    def stacked_variables(self):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *self.each)

    @functools.cached_property
    def composed(self):
        """Returns the outputs, the loss and the gradients of three layers, one after the other."""

        def loss(each, x, weights):
            for variables in each:
                x = self.apply(variables, x)
            return jnp.sum(x * weights)

        return jax.jit(fp8.value_and_grad(loss))

    def check(self, actual, expected):
        def close(a, b):
            a, b = np.asarray(a), np.asarray(b)
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert np.linalg.norm(a - b) <= TOLERANCE * (np.linalg.norm(b) + 1e-6)

        def split(tree):
            return {k: v for k, v in tree.items() if k != OWG}, tree.get(OWG, {})

        (value, grads), (expected_value, expected_grads) = actual, expected
        close(value, expected_value)
        (params, state), (expected_params, expected_state) = split(grads), split(expected_grads)
        assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
        jax.tree.map(close, params, expected_params)
        jax.tree.map(np.testing.assert_array_equal, state, expected_state)


case = functools.cache(Case)


def nested(variables):
    """The variables of a layer as those of a module ``body`` that has it as ``layer``."""
    return {name: {"body": {"layer": tree}} for name, tree in variables.items()}


def body(c, *, scanned=False, remat=False):
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            y = c.make("layer")(x)
            return (y, None) if scanned else y

    return nn.remat(Body) if remat else Body


def applied(c, model, variables, x=X, weights=WEIGHTS):
    """Loss and gradients of a Linen model whose variables are ``nested``, in the layer's own structure."""

    def loss(v):
        out = model.apply(v, x)
        out = out[0] if isinstance(out, tuple) else out
        return jnp.sum(out * weights)

    value, grads = jax.jit(fp8.value_and_grad(loss))(nested(variables))
    return value, {name: tree["body"]["layer"] for name, tree in grads.items()}


class Outer(nn.Module):
    """Calls the module that a Linen transformation returns, under a fixed name."""

    cls: type

    @nn.compact
    def __call__(self, x):
        out = self.cls(name="body")(x)
        return out[0] if isinstance(out, tuple) else out


AXES = {"variable_axes": {"params": 0, OWG: 0}, "split_rngs": {"params": True}}


def plain(c):
    """Checks the plain call, with which all others are compared.

    Delayed scaling is checked against the quantize-dequantize form. Other recipes have no such form, and no
    state: ``fp8.value_and_grad`` is checked against that of JAX.
    """

    def loss(v):
        return jnp.sum(c.reference.apply(v, X) * WEIGHTS)

    value_and_grad = fp8.value_and_grad if OWG in c.variables else jax.value_and_grad
    c.check(c.whole, jax.jit(value_and_grad(loss))(c.variables))


def called_twice(c):
    def loss(v):
        return c.loss(v, X[:1], WEIGHTS[:1]) + c.loss(v, X[1:], WEIGHTS[1:])

    expected = added_up([c.plain(c.variables, X[i], WEIGHTS[i]) for i in (slice(0, 1), slice(1, None))])
    c.check(jax.jit(fp8.value_and_grad(loss))(c.variables), expected)


def nn_scan_stacked(c, remat=False):
    model = Outer(nn.scan(body(c, scanned=True, remat=remat), length=3, **AXES))
    value, grads = c.composed(c.each, X, WEIGHTS)
    expected = value, jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    c.check(applied(c, model, c.stacked_variables), expected)


def nn_scan_tied(c):
    shared = {"variable_broadcast": ["params", OWG], "split_rngs": {"params": False}}
    model = Outer(nn.scan(body(c, scanned=True), length=3, **shared))
    value, grads = c.composed([c.variables] * 3, X, WEIGHTS)
    c.check(applied(c, model, c.variables), added_up([(v, g) for v, g in zip((value, 0, 0), grads)]))


def nn_remat(c):
    c.check(applied(c, Outer(body(c, remat=True)), c.variables), c.whole)


def remat_in_scan(c):
    nn_scan_stacked(c, remat=True)


def nn_vmap_over_experts(c):
    model = Outer(nn.vmap(body(c), in_axes=0, **AXES))
    each = [c.plain(v, x, w) for v, x, w in zip(c.each, X, WEIGHTS)]
    expected = sum(value for value, _ in each), jax.tree.map(lambda *g: jnp.stack(g), *(g for _, g in each))
    c.check(applied(c, model, c.stacked_variables, X[:3], WEIGHTS[:3]), expected)


def vmap_over_examples(c):
    def loss(v):
        return jnp.sum(jax.vmap(partial(c.loss, v))(X, WEIGHTS))

    c.check(jax.jit(fp8.value_and_grad(loss))(c.variables), c.looped)


def nested_vmap(c):
    """Over the experts, whose state is their own, and over the examples, which share it."""
    pairs = [a.reshape(2, 2, LENGTH, WIDTH) for a in (X, WEIGHTS)]

    def loss(stacked):
        return jnp.sum(jax.vmap(lambda v: jax.vmap(jax.vmap(partial(c.loss, v)))(*pairs))(stacked))

    each = [added_up([c.plain(v, x, w) for x, w in zip(X, WEIGHTS)]) for v in c.each]
    expected = sum(value for value, _ in each), jax.tree.map(lambda *g: jnp.stack(g), *(g for _, g in each))
    c.check(jax.jit(fp8.value_and_grad(loss))(c.stacked_variables), expected)


def scan_over_microbatches(c):
    def loss(v):
        return lax.scan(lambda total, xw: (total + c.loss(v, *xw), None), 0.0, (X, WEIGHTS))[0]

    c.check(jax.jit(fp8.value_and_grad(loss))(c.variables), c.looped)


def cond_in_one_branch(c):
    def loss(v, flag):
        return lax.cond(flag, lambda: c.loss(v, X, WEIGHTS), lambda: 0.0)

    step = jax.jit(fp8.value_and_grad(loss))
    c.check(step(c.variables, True), c.whole)
    zero = {k: v if k == OWG else jax.tree.map(jnp.zeros_like, v) for k, v in c.variables.items()}
    c.check(step(c.variables, False), (jnp.float32(0), zero))


def while_loop_forward(c):
    @jax.jit
    def loop(v):
        return lax.while_loop(lambda ih: ih[0] < 2, lambda ih: (ih[0] + 1, c.apply(v, ih[1])), (0, X))[1]

    expected = c.composed([c.variables] * 2, X, WEIGHTS)[0]
    assert abs(jnp.sum(loop(c.variables) * WEIGHTS) - expected) <= TOLERANCE * (1 + abs(expected))


def checkpoint_policies(c):
    policies = jax.checkpoint_policies
    for policy in (
        None,
        policies.save_only_these_names(*fp8.RESIDUAL_NAMES),
        policies.save_from_both_policies(
            policies.dots_saveable, policies.save_only_these_names("fp8_output")
        ),
    ):
        saved = jax.checkpoint(c.loss, policy=policy)
        c.check(jax.jit(fp8.value_and_grad(saved))(c.variables, X, WEIGHTS), c.whole)


def vjp_and_linearize_by_hand(c):
    state = fp8.TrainState.create(apply_fn=c.apply, params=c.variables, tx=optax.sgd(0.1))

    @jax.jit
    def by_hand(v):
        out, vjp = jax.vjp(lambda v: state.apply_fn(v, X), v)
        out_again, linear = jax.linearize(lambda v: state.apply_fn(v, X), v)
        return (out, *vjp(WEIGHTS)), (out_again, *jax.linear_transpose(linear, v)(WEIGHTS))

    for out, grads in by_hand(c.variables):
        c.check((jnp.sum(out * WEIGHTS), grads), c.whole)


def un_jitted(c):
    c.check(fp8.value_and_grad(c.loss)(c.variables, X, WEIGHTS), c.whole)


def donated(c):
    @partial(jax.jit, donate_argnums=0)
    def step(v):
        value, grads = fp8.value_and_grad(c.loss)(v, X, WEIGHTS)
        return value, {k: g if k == OWG else jax.tree.map(jnp.add, v[k], g) for k, g in grads.items()}

    value, grads = c.whole
    params = jax.tree.map(jnp.add, c.variables["params"], grads["params"])
    expected = value, {**grads, "params": params}
    given = jax.tree.map(jnp.copy, c.variables)
    c.check(step(given), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given["params"]))


def accumulated(c):
    value, grads = jax.jit(fp8.accumulate_gradients(lambda v, xw: EXAMPLES * c.loss(v, *xw)))(
        c.variables, (X, WEIGHTS)
    )
    c.check((value, grads), c.looped)


TRANSFORMATIONS = {
    "`jax.jit`": plain,
    "un-jitted": un_jitted,
    "called twice": called_twice,
    "`nn.scan`, stacked": nn_scan_stacked,
    "`nn.scan`, weights tied": nn_scan_tied,
    "`nn.remat`": nn_remat,
    "`nn.remat` inside `nn.scan`": remat_in_scan,
    "`nn.vmap` over experts": nn_vmap_over_experts,
    "`jax.vmap` over examples": vmap_over_examples,
    "nested `jax.vmap`": nested_vmap,
    "`lax.scan` over microbatches": scan_over_microbatches,
    "`fp8.accumulate_gradients`": accumulated,
    "`lax.cond`, in one branch": cond_in_one_branch,
    "`lax.while_loop`, forward": while_loop_forward,
    "`jax.checkpoint` with policies": checkpoint_policies,
    "`jax.vjp` by hand, `jax.linearize` with `jax.linear_transpose`": vjp_and_linearize_by_hand,
    "donated variables": donated,
}


REFUSED = ("forward mode: `jax.jvp`, `jax.jacfwd`, `jax.linearize`", "second derivatives")


# Dense with delayed scaling runs all transformations; each other layer and recipe runs some.
OTHERS = {
    "`jax.jit`": ("Einsum", "delayed"),
    "`nn.vmap` over experts": ("Dense", "block128"),
    "`jax.vmap` over examples": ("Own", "delayed"),
    "`lax.scan` over microbatches": ("Dense", "mxfp8"),
}


def covered(layer, recipe, name):
    return (layer, recipe) in (("Dense", "delayed"), OTHERS.get(name))


@pytest.mark.filterwarnings("ignore:The kernel of an FP8 layer is differentiated")
@pytest.mark.parametrize("recipe", cells(COLUMNS, repeated=COLUMNS[1:]))
def test_forward_mode(recipe, cell):
    c = case("Dense", recipe)
    tangent = jax.tree.map(jnp.ones_like, c.variables["params"])

    uses = (
        lambda apply, p: jax.jvp(apply, (p,), (tangent,)),
        lambda apply, p: jax.jit(lambda p: jax.jvp(jax.checkpoint(apply), (p,), (tangent,)))(p),
        lambda apply, p: jax.jacfwd(apply)(p),
        lambda apply, p: jax.linearize(apply, p)[1](tangent),
    )
    for layer, use in itertools.product((c.layer, c.reference), uses):
        with pytest.raises(TypeError, match="forward-mode"):
            use(lambda p, layer=layer: layer.apply({**c.variables, "params": p}, X), c.variables["params"])
    cell("transformations", REFUSED[0], recipe, "refused (1)")


@pytest.mark.filterwarnings("ignore:The kernel of an FP8 layer is differentiated")
@pytest.mark.parametrize("recipe", cells(COLUMNS, repeated=["current", "axiswise", "block128"]))
def test_second_derivatives(recipe, cell):
    c = case("Dense", recipe)

    def gradient_norm(layer, v):
        grads = fp8.grad(lambda p: jnp.sum(jnp.sin(layer.apply({**v, "params": p}, X))))(v["params"])
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))

    with pytest.raises(TypeError, match="once, in reverse mode"):
        jax.jit(jax.grad(partial(gradient_norm, c.layer)))(c.variables)
    seen = "refused (2)"
    if recipe == "delayed":
        second = jax.jit(jax.grad(lambda p: gradient_norm(c.reference, {**c.variables, "params": p})))
        assert jnp.linalg.norm(second(c.variables["params"])["kernel"]) > 0
        seen = 'with `form="qdq"` (2)'
    cell("transformations", REFUSED[1], recipe, seen)


# Sorted by layer and recipe, so that the references of a case are compiled once.
def test_rows_of_the_page(request):
    if not request.config.getoption("--write-table"):
        assert what_works.rows("transformations") == [*TRANSFORMATIONS, *REFUSED]


CELLS = list(itertools.product(LAYERS, COLUMNS, TRANSFORMATIONS))


@pytest.mark.parametrize(
    ("layer", "recipe", "name"), cells(CELLS, repeated=[c for c in CELLS if not covered(*c)])
)
def test_as_plain_calls(layer, recipe, name, cell):
    TRANSFORMATIONS[name](case(layer, recipe))
    cell("transformations", name, recipe)
