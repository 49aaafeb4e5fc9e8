"""Eight virtual devices compute what one device does, under every sharding."""

import functools
import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from tests import what_works
from tests.cases import OWG, RECIPES, added_up, cells, mesh, normal, variables_of
from tests.gpus import compiled_for_gpus, gpus
from tests.what_works import COLUMNS

BATCH, WIDTH, HIDDEN = 16, 16, 32
X, WEIGHTS = (normal(i, BATCH, WIDTH) for i in (0, 1))


class MLP(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        op = partial(fp8.Fp8DotGeneralOp, recipe=self.recipe)
        x = nn.relu(nn.Dense(HIDDEN, dot_general_cls=op, name="up")(x))
        return nn.Dense(WIDTH, dot_general_cls=op, name="down")(x)


class Case:
    """The MLP under one recipe, with the results of one device.

    The loss has fixed weights (see test_transformations), so the state is equal to the last bit.
    """

    def __init__(self, recipe):
        self.model = MLP(RECIPES[recipe])
        self.plain = jax.jit(fp8.value_and_grad(self.loss))
        self.variables = variables_of(self.model, X)
        for factor in (3.0, 1.5) if OWG in self.variables else ():
            grads = self.plain(self.variables, factor * X, factor * WEIGHTS)[1]
            self.variables = {**self.variables, OWG: grads[OWG]}

    def loss(self, variables, x, weights):
        return jnp.sum(self.model.apply(variables, x) * weights)

    @functools.cached_property
    def whole(self):
        return self.plain(self.variables, X, WEIGHTS)

    @functools.cached_property
    def per_shard(self):
        """Returns the sum of one call for each of eight shards of the batch, with the state merged."""
        shards = [a.reshape(8, -1, WIDTH) for a in (X, WEIGHTS)]
        return added_up([self.plain(self.variables, x, w) for x, w in zip(*shards)])

    def check(self, actual, expected):
        def close(a, b):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * (1e-3 + np.max(np.abs(b))))

        actual, expected = jax.device_get((actual, expected))
        close(actual[0], expected[0])
        assert jax.tree.structure(actual[1]) == jax.tree.structure(expected[1])
        jax.tree.map(close, actual[1]["params"], expected[1]["params"])
        jax.tree.map(np.testing.assert_array_equal, actual[1].get(OWG), expected[1].get(OWG))


case = functools.cache(Case)


def specs(variables, up, down):
    """Returns the partition specs: those of the two kernels; all else is replicated."""
    kernels = {"up": up, "down": down}

    def spec(path, leaf):
        return kernels[path[1].key] if path[-1].key == "kernel" else P()

    return jax.tree_util.tree_map_with_path(spec, variables)


@functools.cache
def jitted(c):
    return jax.jit(fp8.value_and_grad(c.loss))


def placed(c, on, batch, up, down, x=X):
    """Returns the result of ``jitted`` for arguments that are spread over devices."""
    place = partial(jax.tree.map, lambda a, spec: jax.device_put(a, NamedSharding(on, spec)))
    variables = place(c.variables, specs(c.variables, up, down))
    x, weights = (jax.device_put(a, NamedSharding(on, batch)) for a in (x, WEIGHTS))
    with jax.set_mesh(on):
        return jitted(c)(variables, x, weights)


def under_jit(c, *where):
    actual = placed(c, *where)
    for leaf in jax.tree.leaves(actual[1].get(OWG, {})):
        assert leaf.is_fully_replicated
    c.check(actual, c.whole)


def data(c):
    under_jit(c, mesh(data=8), P("data"), P(), P())


def tensor(c):
    under_jit(c, mesh(model=8), P(), P(None, "model"), P("model", None))


def fsdp(c):
    under_jit(c, mesh(data=8), P("data"), P("data"), P("data"))


def data_and_tensor(c):
    under_jit(c, mesh(data=4, model=2), P("data"), P(None, "model"), P("model", None))


def explicit_data(c):
    under_jit(c, mesh(AxisType.Explicit, data=8), P("data"), P(), P())


def explicit_tensor(c):
    # The second kernel is replicated, because Flax has no field for the sharding of its sum.
    under_jit(c, mesh(AxisType.Explicit, data=4, model=2), P("data"), P(None, "model"), P())


def gradient_inside(c):
    def of_shard(v, x, w):
        return fp8.value_and_grad(lambda v: lax.psum(c.loss(v, x, w), "data"))(v)

    step = jax.shard_map(of_shard, mesh=mesh(data=8), in_specs=(P(), P("data"), P("data")), out_specs=P())
    c.check(jax.jit(step)(c.variables, X, WEIGHTS), c.per_shard)


@functools.cache
def outside(c):
    """The gradient is taken outside of ``jax.shard_map``."""

    def of_shard(v, x, w):
        return lax.psum(c.loss(v, x, w), "data")

    loss = jax.shard_map(of_shard, mesh=mesh(data=8), in_specs=(P(), P("data"), P("data")), out_specs=P())
    return jax.jit(fp8.value_and_grad(loss))


def gradient_outside(c):
    c.check(outside(c)(c.variables, X, WEIGHTS), c.per_shard)


def tensor_by_hand(c):
    """Each device has a slice of the first kernel's columns and of the second one's rows."""

    def of_slice(v, x):
        def dense(name, x, params):
            op = partial(fp8.Fp8DotGeneralOp, recipe=c.model.recipe)
            layer = nn.Dense(params["kernel"].shape[1], use_bias="bias" in params, dot_general_cls=op)
            state = {OWG: v[OWG][name]} if OWG in v else {}
            return layer.apply({"params": params, **state}, x)

        hidden = nn.relu(dense("up", x, v["params"]["up"]))
        return dense("down", hidden, {"kernel": v["params"]["down"]["kernel"]})

    def of_device(v, x, w):
        return jnp.sum((lax.psum(of_slice(v, x), "model") + v["params"]["down"]["bias"][None]) * w)

    def one_after_another(v, x, w):
        up, down = v["params"]["up"], v["params"]["down"]
        ups = [jnp.split(up["kernel"], 4, axis=1), jnp.split(up["bias"], 4)]
        total = down["bias"][None]
        for kernel, bias, last in zip(*ups, jnp.split(down["kernel"], 4)):
            params = {"up": {"kernel": kernel, "bias": bias}, "down": {"kernel": last}}
            total = total + of_slice({**v, "params": params}, x)
        return jnp.sum(total * w)

    on = specs(c.variables, P(None, "model"), P("model"))
    on["params"]["up"]["bias"] = P("model")
    loss = jax.shard_map(of_device, mesh=mesh(model=4), in_specs=(on, P(), P()), out_specs=P())
    actual = jax.jit(fp8.value_and_grad(loss))(c.variables, X, WEIGHTS)
    c.check(actual, jax.jit(fp8.value_and_grad(one_after_another))(c.variables, X, WEIGHTS))
    if OWG in c.variables:  # with past scales the result does not depend on the sharding of the kernels
        c.check(actual, c.whole)


def reduced_by_hand(c):
    def of_shard(v, x, w):
        value, grads = fp8.value_and_grad(lambda v: c.loss(v, x, w))(v)
        grads = fp8.pmean_gradients(grads, "data")
        params = jax.tree.map(lambda g: 8 * g, grads["params"])
        return lax.psum(value, "data"), {**grads, "params": params}

    step = jax.shard_map(
        of_shard,
        mesh=mesh(data=8),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    c.check(jax.jit(step)(c.variables, X, WEIGHTS), c.per_shard)


def vmap_around_shard_map(c):
    """With ``spmd_axis_name``, JAX cannot batch ``lax.clamp`` there, which quantizing needs."""

    def of_shard(v, x, w):
        return lax.psum(c.loss(v, x, w), "data")

    on = {"mesh": mesh(data=4), "in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    of_half = jax.vmap(jax.shard_map(of_shard, **on), (None, 0, 0))
    halves = [a.reshape(2, -1, WIDTH) for a in (X, WEIGHTS)]
    step = jax.jit(fp8.value_and_grad(lambda *args: jnp.sum(of_half(*args))))
    c.check(step(c.variables, *halves), c.per_shard)


STAGES, MICROBATCHES = 4, 4


def pipeline(c):
    """Runs GPipe on two replicas: each stage is a layer, and a microbatch advances one stage per tick."""
    layer = nn.Dense(WIDTH, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=c.model.recipe))
    each = [variables_of(layer, X, seed=i) for i in range(STAGES)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    rows = BATCH // MICROBATCHES // 2  # of a microbatch on one replica

    def of_device(v, x, w):
        v = jax.tree.map(lambda leaf: lax.squeeze(leaf, (0,)), v)
        stage = lax.axis_index("stage")
        x, w = (a.reshape(MICROBATCHES, rows, WIDTH) for a in (x, w))

        def tick(carry, t):
            arrived, total = carry
            inputs = jnp.where(stage == 0, x[jnp.clip(t, 0, MICROBATCHES - 1)], arrived)
            out = layer.apply(v, inputs)
            done = t - (STAGES - 1)
            is_last = (stage == STAGES - 1) & (done >= 0)
            weights = jnp.where(is_last, w[jnp.clip(done, 0, MICROBATCHES - 1)], 0.0)
            out = jnp.where((stage <= t) & (t < stage + MICROBATCHES), out, 0.0)
            moved = lax.ppermute(out, "stage", [(i, i + 1) for i in range(STAGES - 1)])
            return (moved, total + jnp.sum(out * weights)), None

        axes = ("stage", "data")
        start = lax.pcast((jnp.zeros((rows, WIDTH)), jnp.zeros(())), axes, to="varying")
        (_, total), _ = lax.scan(tick, start, jnp.arange(STAGES + MICROBATCHES - 1))
        return lax.psum(total, axes)

    loss = jax.shard_map(
        of_device,
        mesh=mesh(stage=STAGES, data=2),
        in_specs=(P("stage"), P("data"), P("data")),
        out_specs=P(),
    )
    actual = jax.jit(fp8.value_and_grad(loss))(stacked, X, WEIGHTS)

    def through_all(each, x, w):
        for v in each:
            x = layer.apply(v, x)
        return jnp.sum(x * w)

    through_all = jax.jit(fp8.value_and_grad(through_all))
    pieces = [a.reshape(2 * MICROBATCHES, rows, WIDTH) for a in (X, WEIGHTS)]
    results = [through_all(each, x, w) for x, w in zip(*pieces)]
    stages = [added_up([(value, grads[i]) for value, grads in results]) for i in range(STAGES)]
    expected = stages[0][0], jax.tree.map(lambda *g: jnp.stack(g), *(g for _, g in stages))
    c.check(actual, expected)


def unchecked_gradient_outside(c):
    """JAX adds up cotangents there, also those of the state, because it does not know the merge."""

    def of_shard(v, x, w):
        return c.loss(v, x, w)[None]

    losses = jax.shard_map(
        of_shard,
        mesh=mesh(data=8),
        in_specs=(P(), P("data"), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    step = jax.jit(fp8.value_and_grad(lambda *args: jnp.sum(losses(*args))))
    if OWG not in c.variables:
        c.check(step(c.variables, X, WEIGHTS), c.per_shard)
        return "yes"
    with pytest.raises(TypeError, match="fp32_max_grad"):
        step(c.variables, X, WEIGHTS)
    return "refused (3)"


def a_nan_on_one_device(c):
    """A NaN on one device marks the whole batch, although a maximum over devices may lose a NaN."""
    x = X.at[5, 3].set(jnp.nan)
    expected = c.plain(c.variables, x, WEIGHTS)[1].get(OWG)
    for grads in (
        placed(c, mesh(data=8), P("data"), P(), P(), x)[1],
        outside(c)(c.variables, x, WEIGHTS)[1],
    ):
        jax.tree.map(np.testing.assert_array_equal, grads.get(OWG), expected)


WAYS = {
    "data parallel, `jax.jit`": data,
    "tensor parallel, `jax.jit`": tensor,
    "FSDP, `jax.jit`": fsdp,
    "data and tensor parallel, `jax.jit`": data_and_tensor,
    "data parallel, explicit axes": explicit_data,
    "data and tensor parallel, explicit axes": explicit_tensor,
    "`jax.shard_map`, gradient inside": gradient_inside,
    "`jax.shard_map`, gradient outside": gradient_outside,
    "tensor parallel in `jax.shard_map`": tensor_by_hand,
    "`check_vma=False`, `fp8.pmean_gradients`": reduced_by_hand,
    "`check_vma=False`, gradient outside": unchecked_gradient_outside,
    "`jax.vmap` around `jax.shard_map`": vmap_around_shard_map,
    "pipeline in `jax.shard_map`": pipeline,
    "a NaN on one device": a_nan_on_one_device,
}


CELLS = list(itertools.product(WAYS, COLUMNS))
# These ways take the same paths as others: on both kinds of meshes, data and tensor parallelism at once.
REPEATED = ("data parallel, `jax.jit`", "tensor parallel, `jax.jit`", "data parallel, explicit axes")
COVERED = [(name, "delayed") for name in WAYS if name not in REPEATED]
COVERED += [
    ("data and tensor parallel, `jax.jit`", "mxfp8"),
    ("`check_vma=False`, gradient outside", "current"),
]


def test_rows_of_the_page(request):
    if not request.config.getoption("--write-table"):
        assert what_works.rows("devices") == [*WAYS]


@pytest.mark.newest
@pytest.mark.parametrize(("name", "recipe"), cells(CELLS, repeated=[c for c in CELLS if c not in COVERED]))
def test_as_one_device(recipe, name, cell):
    seen = WAYS[name](case(recipe))
    cell("devices", name, recipe, seen or "yes")


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "target", "gemm"),
    [
        ("delayed", "h200", "f8e4m3fn"),
        ("block128", "h200", BLOCK_GEMM_HOPPER),
        ("mxfp8", "b200", "__cudnn$blockScaledDot"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_shard_map_on_gpus(recipe, target, gemm):
    """The lowering for GPUs keeps track of the values that vary over devices."""
    on = gpus(target)
    op = partial(fp8.Fp8DotGeneralOp, recipe=RECIPES[recipe])
    layer = nn.Dense(256, dot_general_cls=op, dtype=jnp.bfloat16)

    def shapes(tree, spec):
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(on, spec)), tree
        )

    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    variables = shapes(jax.eval_shape(layer.init, jax.random.key(0), x), P())

    def loss(v, x):
        def of_shard(v, x):
            return lax.pmean(jnp.mean(layer.apply(v, x) ** 2), "data")

        return jax.shard_map(of_shard, mesh=on, in_specs=(P(), P("data")), out_specs=P())(v, x)

    program = compiled_for_gpus(on, fp8.value_and_grad(loss), variables, shapes(x, P("data")))
    assert "f8e4m3fn" in program
    assert gemm in program
    assert "all-gather" not in program


@pytest.mark.newest
def test_microbatches_of_several_devices():
    """Kernels are quantized before the loop on several devices, too."""
    model, batches = MLP(RECIPES["delayed"]), normal(3, 4, BATCH, WIDTH)
    variables = variables_of(model, X)

    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x)))

    def of_shard(variables, batches):
        return fp8.accumulate_gradients(lambda v, x: lax.pmean(loss(v, x), "data"))(variables, batches)

    specs = (P(), P(None, "data"))
    step = jax.shard_map(of_shard, mesh=mesh(data=8), in_specs=specs, out_specs=(P(), P()))
    expected = jax.jit(fp8.accumulate_gradients(loss))(variables, batches)
    actual = jax.jit(step)(variables, batches)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), actual, expected)
    jax.tree.map(np.testing.assert_array_equal, actual[1][OWG], expected[1][OWG])


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_two_meshes_in_one_program():
    """JAX allows one mesh beside ``custom_partitioning``, so the default recipe does without it."""
    devices = np.array(fp8.compile_only_devices("h200", 8))
    places = [
        NamedSharding(jax.sharding.Mesh(devices, ("data",)), P("data")),
        NamedSharding(jax.sharding.Mesh(devices.reshape(2, 4), ("a", "b")), P("a", "b")),
    ]
    layer = nn.Dense(512, dot_general_cls=fp8.Fp8DotGeneralOp, dtype=jnp.bfloat16, use_bias=False)
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)

    def loss(variables, x):
        for place in places:
            x = layer.apply(variables, lax.with_sharding_constraint(x, place))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    program = compiled_for_gpus(places[0].mesh, fp8.value_and_grad(loss), variables, x)
    assert program.count("__cublas$lt$matmul$f8") >= 5
