"""NNX's transformations, devices and bridge: the state is that of the plain calls."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests import what_works
from tests.cases import RECIPES, added_up, normal
from tests.what_works import COLUMNS, EXPLICIT

SHORT = RECIPES["delayed"]
OWG = fp8.OVERWRITE_WITH_GRADIENT
X, W = normal(0, 8, 16), normal(1, 8, 16)


def nnx_op(recipe=SHORT):
    return fp8nnx.Fp8DotGeneralOp(recipe=recipe)


def layer_of(key, recipe=SHORT):
    return nnx.Linear(16, 16, dot_general=nnx_op(recipe), rngs=nnx.Rngs(key))


def linear(recipe="delayed"):
    return layer_of(jax.random.key(0), RECIPES[recipe])


def stacked(recipe):
    return nnx.vmap(partial(layer_of, recipe=RECIPES[recipe]))(jax.random.split(jax.random.key(0), 3))


def call(layer, x):
    return layer(x)


def weighted(out):
    return jnp.sum(out * W)


# One layer and all the data, in one call or in several.


def in_jit(layer):
    return weighted(nnx.jit(call)(layer, X))


def in_remat(layer):
    policy = jax.checkpoint_policies.save_only_these_names(*fp8.RESIDUAL_NAMES)
    return weighted(nnx.remat(call, policy=policy)(layer, X))


def in_vmap(layer):
    return weighted(nnx.vmap(call, in_axes=(None, 0))(layer, X))


def in_cond(layer):
    return weighted(nnx.cond(X[0, 0] < 100, call, lambda layer, x: 2 * x, layer, X))


def in_switch(layer):
    branches = [lambda layer, x: 2 * x, call]
    return weighted(nnx.switch(jnp.int32(X[0, 0] < 100), branches, layer, X))


def in_scan(layer):
    @nnx.scan(in_axes=(nnx.Carry, None, 0, 0), out_axes=nnx.Carry)
    def over_microbatches(total, layer, x, w):
        return total + jnp.sum(layer(x) * w)

    return over_microbatches(jnp.zeros(()), layer, X.reshape(4, 2, 16), W.reshape(4, 2, 16))


def as_carry(layer):
    @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
    def over_microbatches(layer, x, w):
        return layer, jnp.sum(layer(x) * w)

    return jnp.sum(over_microbatches(layer, X.reshape(4, 2, 16), W.reshape(4, 2, 16))[1])


def split_and_merged(layer):
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)
    return weighted(nnx.merge(graphdef, params, rest)(X))


def shared(layer):
    model = nnx.List([layer, nnx.Dict({"again": layer})])
    halves = model[0](X[:4]), model[1]["again"](X[4:])
    return weighted(jnp.concatenate(halves))


def in_shard_map(layer):
    graphdef, state = nnx.split(layer)

    def of_shard(state, x, w):
        return jax.lax.psum(jnp.sum(nnx.merge(graphdef, state)(x) * w), "data")

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())(
        state, X, W
    )


# The number is that of calls. Each call has its own scales if the recipe has no state.
WHOLE = {
    "`nnx.jit`": (in_jit, 1),
    "`nnx.remat`, with policies": (in_remat, 1),
    "`nnx.vmap` over examples": (in_vmap, 8),
    "`nnx.cond`": (in_cond, 1),
    "`nnx.switch`": (in_switch, 1),
    "`nnx.scan` over microbatches": (in_scan, 4),
    "`nnx.scan`, the model in the carry": (as_carry, 4),
    "`nnx.split`, `nnx.merge`": (split_and_merged, 1),
    "shared modules": (shared, 2),
    "`jax.shard_map`": (in_shard_map, 4),
}

# Three stacked layers, one after the other.


def scanned(layers):
    out = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, layers)
    return weighted(out)


def scanned_remat(layers):
    body = nnx.remat(lambda x, layer: layer(x))
    return weighted(nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, layers))


STACKED = {
    "`nnx.scan` over stacked layers": scanned,
    "`nnx.remat` inside `nnx.scan`": scanned_remat,
}


def pure(tree):
    return nnx.to_pure_dict(nnx.state(tree))


@cache
def whole(recipe="delayed", calls=1):
    gradient = nnx.jit(fp8nnx.value_and_grad(lambda layer, x, w: jnp.sum(layer(x) * w)))
    parts = 1 if recipe == "delayed" else calls
    each = [gradient(linear(recipe), *part) for part in zip(jnp.split(X, parts), jnp.split(W, parts))]
    return added_up([(value, pure(grads)) for value, grads in each])


@cache
def composed(recipe="delayed"):
    def loss(layers):
        x = X
        for layer in layers:
            x = layer(x)
        return weighted(x)

    keys = jax.random.split(jax.random.key(0), 3)
    layers = nnx.List([layer_of(key, RECIPES[recipe]) for key in keys])
    value, grads = nnx.jit(fp8nnx.value_and_grad(loss))(layers)
    return value, jax.tree.map(lambda *each: jnp.stack(each), *(pure(grads)[i] for i in range(3)))


def check(actual, expected, state_rtol=0.0):
    (value, grads), (expected_value, expected_grads) = actual, expected
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    grads, expected_grads = dict(pure(grads)), dict(expected_grads)
    state, expected_state = grads.pop("dot_general", {}), expected_grads.pop("dot_general", {})
    assert len(state) in (0, 6)
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, grads, expected_grads)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=state_rtol), state, expected_state)


ON_A_MESH = "`nnx.jit` of sharded arrays"
EACH_RECIPE = [COLUMNS[0], *(pytest.param(name, marks=pytest.mark.all_cells) for name in COLUMNS[1:])]


@pytest.mark.long
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_one_layer(recipe, name, cell):
    f, calls = WHOLE[name]
    check(nnx.jit(fp8nnx.value_and_grad(f))(linear(recipe)), whole(recipe, calls))
    cell("nnx", name, recipe)


@pytest.mark.long
@pytest.mark.parametrize("name", STACKED)
@pytest.mark.parametrize("recipe", EACH_RECIPE)
def test_stacked_layers(recipe, name, cell):
    found = nnx.jit(fp8nnx.value_and_grad(STACKED[name]))(stacked(recipe))
    check(found, composed(recipe), state_rtol=1e-6)
    cell("nnx", name, recipe)


@pytest.mark.long
def test_where_nnx_is_in_tree_mode():
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        check(fp8nnx.value_and_grad(lambda layer: weighted(layer(X)))(linear()), whole())


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = fp8nnx.value_and_grad(lambda model: weighted(model(x)))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.long
@pytest.mark.parametrize("recipe", EACH_RECIPE)
@pytest.mark.parametrize("spec", [P("data"), P("data", "model")], ids=str)
def test_sharded_jit(recipe, spec, cell):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    plain, spread = linear(recipe), linear(recipe)
    state = nnx.state(spread)
    on_mesh = {2: NamedSharding(mesh, P("data", "model")), 1: NamedSharding(mesh, P())}
    nnx.update(spread, jax.tree.map(lambda x: jax.device_put(x, on_mesh[x.ndim]), state))
    optimizers = [fp8nnx.Optimizer(m, optax.sgd(0.01)) for m in (plain, spread)]
    for factor in (1.0, 3.0):
        expected = train_step(plain, optimizers[0], factor * X)
        x = jax.device_put(factor * X, NamedSharding(mesh, spec))
        np.testing.assert_allclose(train_step(spread, optimizers[1], x), expected, rtol=1e-5)
    assert spread.kernel.get_value().sharding.spec == P("data", "model")
    ours, theirs = (pure(m).get("dot_general", {}) for m in (spread, plain))
    assert len(ours) == (6 if recipe == "delayed" else 0)
    # The second step's kernels are sums of gradients in another order.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), ours, theirs)
    cell("nnx", ON_A_MESH, recipe)


def test_linen_op_in_nnx():
    """``ToNNX`` of the Linen op keeps its state, in our type, and a layer of NNX takes it."""
    op = nnx.bridge.ToNNX(fp8.Fp8DotGeneralOp(recipe=SHORT))
    op.lazy_init(X, W, (((1,), (1,)), ((), ())))
    assert isinstance(op.input_scale, fp8nnx.OverwriteWithGradient)
    layer = linear()
    layer.dot_general = nnx.data(op)
    ours = fp8nnx.value_and_grad(lambda layer: weighted(layer(X)))(layer)
    check(ours, whole())
    fp8nnx.overwrite_state(layer, ours[1])
    assert op.input_amax_history.get_value()[0] == jnp.max(jnp.abs(X))


def test_the_rows_of_what_works(request):
    """Each row is a case above."""
    if not request.config.getoption("--write-table"):
        assert what_works.rows("nnx") == [*WHOLE, *STACKED, ON_A_MESH, EXPLICIT]


class Bridged(nnx.Module):
    """A layer of NNX, and a module of Linen behind a bridge."""

    def __init__(self, module):
        self.first = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.bridge = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(1)).lazy_init(X)

    def __call__(self, x):
        return self.bridge(self.first(x))


def test_a_linen_module_behind_a_bridge():
    """The module that calls it computes its products. ``freeze`` leaves their kernels wide, for Linen."""
    model = Bridged(nn.Dense(8))
    model8 = fp8.quantize_model(model, X, recipe=SHORT, include=".*")
    assert [row.kernel for row in fp8.report(model8, X).converted] == ["first/kernel", "bridge/kernel"]
    gradient = nnx.jit(fp8nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    fp8nnx.overwrite_state(model8, gradient(model8, X))
    fp8.check_state(model8)
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(model8(X), model(X))
    with pytest.warns(UserWarning, match="bridge"):
        frozen = fp8.freeze(model8, X)
    assert frozen.first.kernel.get_value().dtype == jnp.float8_e4m3fn
    assert frozen.bridge.kernel.get_value().dtype == jnp.float32
    call = nnx.jit(lambda model, x: model(x))
    np.testing.assert_array_equal(call(frozen, X), call(model8, X))


def test_a_linen_module_that_is_converted_before_the_bridge():
    """It has its own ops, and trains with the model."""
    with pytest.raises(TypeError, match=r"before the bridge: ToNNX\(quantize_model"):
        fp8.quantize_model(Bridged(nn.Dense(8)).bridge, X, include=".*")
    linen = fp8.quantize_model(nn.Dense(8), SHORT, include=".*")
    model8 = fp8.quantize_model(Bridged(linen), X, recipe=SHORT, include=".*")
    gradient = nnx.jit(fp8nnx.grad(lambda model, x: jnp.mean(model(x) ** 2)))
    fp8nnx.overwrite_state(model8, gradient(model8, X))
    fp8.check_state(model8)
    assert model8.bridge.Fp8DotGeneralOp_0["input_amax_history"].get_value()[0] > 0
