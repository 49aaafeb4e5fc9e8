"""A rule by which a module is computed as one block, and what is refused."""

import contextlib
import dataclasses
import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._audit import compiling, kernels
from fp8flax._core.names import CAST_TRANSPOSE
from fp8flax._model.elementwise import Unknown, at_points
from tests.cases import OWG, cells, normal, struct
from tests.models import trained

RECIPE = fp8.DelayedScaling(amax_history_len=4)
ROWS, WIDTH, HIDDEN = 16, 32, 48
GATED = fp8.FusedMLP(into=("gate_proj", "up_proj"), out_of="down_proj", activation="silu")
NAMES = GATED.names


def silu_gate(gate, up):
    return nn.silu(gate) * up


class Mlp(nn.Module):
    """A Llama's, or something that looks like it."""

    between: Any = silu_gate
    gated: bool = True
    hidden: int = HIDDEN
    fields: Any = ()
    """Of the layers."""
    kind: Any = nn.Dense

    @nn.compact
    def __call__(self, x):
        dense = partial(self.kind, **{"use_bias": False, **dict(self.fields)})
        dense_in = [dense(self.hidden, name=name)(x) for name in NAMES[not self.gated : 2]]
        return dense(x.shape[-1], name="down_proj")(self.between(*dense_in))


class Layers(nn.Module):
    """Blocks behind norms."""

    mlp: Any = Mlp
    is_scanned: bool = False

    @nn.compact
    def __call__(self, x):
        mlp = self.mlp  # the class, or what makes an instance

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + mlp(name="mlp")(nn.RMSNorm()(x)), None

        if not self.is_scanned:
            return Layer(name="layers_0")(x, None)[0]
        stacked = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return stacked(name="layers")(x, None)[0]


def converted(model, *rules, **options):
    return fp8.quantize_model(model, **{"recipe": RECIPE, "include": ".*", **options}, rules=rules)


def pair(model, said=GATED, pattern="mlp", shape=(ROWS, WIDTH), **options):
    """Returns the model with the rule and without it, variables of both, and an input."""
    x = normal(0, *shape)
    layers, variables = trained(model, x, **{"recipe": RECIPE, **options})
    share_inputs(variables[OWG])
    return converted(model, (pattern, said), **options), layers, variables, x


def share_inputs(state):
    """Gives the layers that take the same input what they have seen of it, as training does."""
    for inner in state.values():
        if isinstance(inner, dict):
            share_inputs(inner)
    if "gate_proj" in state:
        seen = {k: v for k, v in state["gate_proj"]["Fp8DotGeneralOp_0"].items() if k.startswith("input")}
        state["up_proj"]["Fp8DotGeneralOp_0"] |= seen


def step_of(model):
    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32) - 1))

    return fp8.value_and_grad(loss, (0, 1))


def is_one(model, variables, x):
    """Tells whether a model has the derivative of a block."""
    return "_mlp_bwd" in str(jax.make_jaxpr(step_of(model))(variables, x))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_same_step(one, layers, variables, x, rtol=1e-5, atol=1e-7):
    """In float32 but for the last bits of sums; the tree is the same, and so are the next states."""
    actual, wanted = (jax.jit(step_of(model))(variables, x) for model in (one, layers))
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), actual, wanted)


@pytest.mark.oldest
def test_a_step_is_that_of_the_layers():
    one, layers, variables, x = pair(Mlp(), pattern="^")
    assert is_one(one, variables, x)
    assert not is_one(layers, variables, x)
    assert_same_step(one, layers, variables, x)


def shape_of(model, *inputs):
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)


class Setup(nn.Module):
    """With layers of ``setup``, something before and after them, and other collections."""

    @nn.nowrap
    def _dense(self, features):
        return nn.Dense(
            features, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "m"))
        )

    def setup(self):
        self.norm = nn.BatchNorm(use_running_average=False)
        self.dropout = nn.Dropout(0.1, deterministic=False)
        self.gate_proj, self.up_proj, self.down_proj = map(self._dense, (HIDDEN, HIDDEN, WIDTH))

    def __call__(self, x):
        y = self.dropout(self.norm(x), rng=jax.random.key(1))
        up, gate = self.up_proj(y), self.gate_proj(y)
        self.sow("intermediates", "gate", gate)
        y = self.down_proj(nn.with_logical_constraint(up * nn.silu(gate), ("a", "b")))
        return x + self.dropout(y, rng=jax.random.key(2))


@pytest.mark.long
def test_what_stands_before_and_after_is_the_modules_own():
    one, layers, variables, x = pair(Setup(), pattern="^")
    out = []
    for model in (one, layers):

        def loss(learned, model=model):
            y, others = model.apply(
                {**variables, **learned},
                x,
                mutable=["batch_stats", "intermediates"],
            )
            return jnp.mean(jnp.square(y - 1)), others

        learned = {name: variables[name] for name in ("params", OWG)}
        assert ("_mlp_bwd" in str(jax.make_jaxpr(jax.grad(loss, has_aux=True))(learned))) == (model is one)
        out.append(jax.jit(fp8.value_and_grad(loss, has_aux=True))(learned))
    actual, wanted = out
    assert set(actual[0][1]) == {"batch_stats", "intermediates"}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), actual, wanted)


def by_vmap(**axes):
    return nn.vmap(Mlp, variable_axes=axes, split_rngs={"params": axes["params"] is not None})


class Twice(nn.Module):
    """One block, called twice."""

    @nn.compact
    def __call__(self, x):
        block = Mlp(name="mlp")
        return block(block(x))


TRANSFORMED = {
    "scan and remat": (Layers(is_scanned=True), (ROWS, WIDTH)),
    "twice": (Twice(), (ROWS, WIDTH)),
    "remat": (Layers(nn.remat(Mlp)), (ROWS, WIDTH)),
    "jit": (Layers(nn.jit(Mlp)), (ROWS, WIDTH)),
    "vmap, stacked": (Layers(by_vmap(params=0)), (2, ROWS, WIDTH)),
    "vmap, shared": (Layers(by_vmap(params=None)), (2, ROWS, WIDTH)),
    "biases, one row": (Layers(partial(Mlp, fields=(("use_bias", True),))), (WIDTH,)),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    cells(TRANSFORMED, repeated=["remat", "jit", "vmap, stacked", "vmap, shared", "biases, one row"]),
)
def test_under_transformations(name):
    one, layers, variables, x = pair(TRANSFORMED[name][0], shape=TRANSFORMED[name][1])
    assert is_one(one, variables, x)
    assert_same_step(one, layers, variables, x)


@pytest.mark.long
def test_split_over_devices():
    one, layers, variables, x = pair(Layers())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def step(model):
        def of_shard(variables, x):
            return jax.lax.pmean(jnp.mean(jnp.square(model.apply(variables, x) - 1)), "data")

        return fp8.grad(jax.shard_map(of_shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))

    assert "_mlp_bwd" in str(jax.make_jaxpr(step(one))(variables, x))
    actual, wanted = (jax.jit(step(model))(variables, x) for model in (one, layers))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), actual, wanted)


@pytest.mark.parametrize(
    "what",
    [
        "autocast(enabled=False)",
        "another recipe",
        "a layer left",
        "two recipes",
        "float64",
        "an explicit mesh",
    ],
)
def test_else_the_layers_are_computed_one_after_the_other(what):
    rules = {
        "a layer left": [("gate", "leave")],
        "two recipes": [("up", fp8.DelayedScaling(amax_history_len=4, margin=1))],
    }.get(what, [])
    recipe = fp8.Float8CurrentScaling() if what == "another recipe" else RECIPE
    x = normal(0, ROWS, WIDTH)
    model = Mlp(fields=(("dtype", jnp.float64 if what == "float64" else jnp.float32),))
    _, variables = trained(Mlp(), x, rules=rules, recipe=recipe)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    context = {
        "autocast(enabled=False)": lambda: fp8.autocast(enabled=False),
        "float64": lambda: jax.enable_x64(True),
        "an explicit mesh": lambda: jax.set_mesh(mesh),
    }.get(what, contextlib.nullcontext)
    with context():
        if what == "an explicit mesh":
            x = jax.device_put(x, jax.NamedSharding(mesh, P()))
        assert not is_one(converted(model, *rules, ("^", GATED), recipe=recipe), variables, x)


def test_the_state_is_read_where_the_layers_have_it():
    one, layers, variables, x = pair(Mlp(), pattern="^")
    assert_equal(shape_of(one, x), shape_of(layers, x))
    del variables[OWG]["up_proj"]
    with pytest.raises(fp8.MissingStateError, match="up_proj/Fp8DotGeneralOp_0/input_scale is missing"):
        one.apply(variables, x)


@pytest.mark.long
def test_calibrated_measured_and_frozen_it_is_the_layers():
    one, layers, variables, x = pair(Mlp(), pattern="^")
    assert_equal(fp8.calibrate(one.apply, variables, x), fp8.calibrate(layers.apply, variables, x))
    jax.eval_shape(step_of(one), variables, x)  # has been trained
    (served, frozen), (wanted, wanted_frozen) = (fp8.freeze(m, variables, x) for m in (one, layers))
    assert_equal(frozen, wanted_frozen)
    assert_equal(served.apply(frozen, x), wanted.apply(wanted_frozen, x))
    assert_equal(fp8.freeze(one, variables)[1], frozen)

    def measure(model):
        return str(jax.make_jaxpr(fp8.statistics(lambda v: jnp.mean(model.apply(v, x))))(variables))

    assert measure(one) == measure(layers)


def test_report_says_which_layers_are_one():
    one, layers, _, x = pair(Layers())
    rows, wanted = fp8.report(one, x).rows, fp8.report(layers, x).rows
    assert [row.reason for row in rows] == [
        "by include '.*', in one block with up_proj, down_proj",
        "by include '.*', in one block with gate_proj, down_proj",
        "by include '.*', in one block with gate_proj, up_proj",
    ]
    assert [dataclasses.replace(row, reason="") for row in rows] == [
        dataclasses.replace(row, reason="") for row in wanted
    ]
    one = converted(Layers(), ("up", "leave"), ("mlp", GATED))
    rows = fp8.report(one, x).rows
    assert rows[1].reason == "left by the rule 'up', not in one block with gate_proj, down_proj"


def test_nothing_of_the_proof_is_left_behind():
    one, _, variables, x = pair(Mlp(), pattern="^")
    with jax.checking_leaks():
        jax.make_jaxpr(step_of(one))(variables, x)


PLAIN = {
    name: fp8.FusedMLP(into="up_proj", out_of="down_proj", activation=name) for name in ("gelu", "relu")
}
EXACT = dataclasses.replace(PLAIN["gelu"], activation="gelu_exact")


def gelu_by_hand(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi).item() * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("said", "between"),
    [
        (GATED, lambda gate, up: up * (gate * jax.nn.sigmoid(gate))),
        (
            GATED,
            lambda gate, up: (nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(
                gate.dtype
            ),
        ),
        (PLAIN["gelu"], gelu_by_hand),
        (PLAIN["gelu"], jax.checkpoint(nn.gelu)),
        (EXACT, lambda x: x * (1 + jax.lax.erf(x / np.sqrt(2).item())) / 2),
        (PLAIN["relu"], lambda x: jnp.where(x > 0, x, 0)),
        (PLAIN["relu"], lambda x: nn.Dropout(0.5, deterministic=True)(x * (x > 0).astype(x.dtype))),
    ],
)
def test_an_activation_may_be_written_otherwise(said, between, dtype):
    model = Mlp(between, gated=said is GATED, fields=(("dtype", dtype),))
    shape_of(converted(model, ("^", said)), normal(0, ROWS, WIDTH))


@jax.custom_jvp
def straight_through(x):
    return nn.relu(x)


straight_through.defjvp(lambda primals, tangents: (nn.relu(*primals), *tangents))


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -100, 100),))

OTHERS = {
    "another activation": (
        GATED,
        lambda gate, up: nn.gelu(gate) * up,
        r"computes .*\(gelu\(gate.* Say so: FusedMLP",
    ),
    "swapped": (
        GATED,
        lambda gate, up: nn.silu(up) * gate,
        r"silu\(up_proj\(x\)\) \* gate_proj\(x\)\)\. Say so",
    ),
    "a residual": (
        GATED,
        lambda gate, up: nn.silu(gate) * up + up,
        r"with gate_proj\(x\)=-3.5 and .* takes 1.346",
    ),
    "a factor": (GATED, lambda gate, up: nn.silu(1.001 * gate) * up, "where that would be -0.15"),
    "dropout": (
        GATED,
        lambda gate, up: nn.Dropout(0.5, deterministic=False)(nn.silu(gate) * up, rng=jax.random.key(0)),
        "made of the primitive random_",
    ),
    "a norm": (GATED, lambda gate, up: nn.standardize(nn.silu(gate) * up), "the primitive reduce_sum too"),
    "other places": (GATED, lambda gate, up: nn.silu(gate) * up[::-1], "the primitive rev too"),
    "numbers": (
        GATED,
        lambda gate, up: nn.silu(gate) * up * np.ones((1, HIDDEN), up.dtype),
        r"shape \(1, 48\)",
    ),
    "no gradient": (
        GATED,
        lambda gate, up: nn.silu(jax.lax.stop_gradient(gate)) * up,
        "stop_gradient|gradients",
    ),
    "a gradient of its own": (PLAIN["relu"], straight_through, "the same, but not their gradients"),
    "a clip": (
        GATED,
        lambda gate, up: jnp.clip(nn.silu(gate) * up, -50, 50),
        r"with gate_proj\(x\)=60.0 and .* takes 50",
    ),
    "a threshold": (
        PLAIN["relu"],
        lambda x: jnp.where(x > 1e-3, nn.relu(x), 0),
        r"with up_proj\(x\)=0.0001",
    ),
    "a clipped gradient": (PLAIN["relu"], lambda x: clipped_gradient(nn.relu(x)), "not their gradients"),
    "a cast": (
        PLAIN["relu"],
        lambda x: nn.relu(x).astype(jnp.float8_e4m3fn).astype(x.dtype),
        "a cast to float8_e4m3fn",
    ),
    "tanh for exact": (EXACT, nn.gelu, r"Say so: .*'gelu'"),
    "exact for tanh": (PLAIN["gelu"], partial(nn.gelu, approximate=False), r"Say so: .*'gelu_exact'"),
    "another input": (
        PLAIN["relu"],
        lambda x: nn.relu(x)[..., :8],
        r"takes an array of shape \(16, 8\), made of",
    ),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_block_is_refused(name, dtype):
    said, between, message = OTHERS[name]
    if name == "a factor" and dtype == jnp.bfloat16:
        pytest.skip("which bfloat16 rounds to one")
    model = converted(Mlp(between, gated=said is GATED, fields=(("dtype", dtype),)), ("^", said))
    with pytest.raises(ValueError, match=f"the model itself computes .* but it does not: .*{message}"):
        shape_of(model, struct(ROWS, WIDTH, dtype=dtype))


class Wild(nn.Module):
    """Calls its layers in ways that no block does."""

    how: str

    @nn.compact
    def __call__(self, x):
        how = self.how
        gate_proj, up_proj = (nn.Dense(HIDDEN, name=name) for name in NAMES[:2])
        down_proj = nn.Dense(WIDTH, name="down_proj")
        if how == "a transformation inside":
            inner = nn.remat(lambda module, x: nn.silu(gate_proj(x)) * up_proj(x))
            return down_proj(inner(self, x))
        if how == "intercepted":
            with nn.intercept_methods(lambda call, args, kwargs, context: 2 * call(*args, **kwargs)):
                return down_proj(nn.silu(gate_proj(x)) * up_proj(x))
        if how == "first the last":
            down_proj(normal(0, ROWS, HIDDEN))
        gate, up = gate_proj(x), up_proj(2 * x if how == "two inputs" else x)
        y = down_proj(nn.silu(gate) * up)
        return down_proj(gate) if how == "twice" else y


class Half(nn.Module):
    """Has no last layer."""

    @nn.compact
    def __call__(self, x):
        return nn.silu(nn.Dense(HIDDEN, name="gate_proj")(x)) * nn.Dense(HIDDEN, name="up_proj")(x)


class Inherited(nn.Dense):
    pass


MADE = {
    "twice": (Wild("twice"), "it calls down_proj more than once"),
    "two inputs": (Wild("two inputs"), "gate_proj and up_proj take different arrays. If they are equal"),
    "first the last": (
        Wild("first the last"),
        "it calls down_proj, but not gate_proj and up_proj before it",
    ),
    "inside": (Wild("a transformation inside"), "runs in a transformation inside of it. Put nn.remat"),
    "intercepted": (Wild("intercepted"), "gate_proj runs in nn.intercept_methods inside of the model"),
    "not called": (Mlp(nn.silu, gated=False), "it calls down_proj, but not gate_proj before it"),
    "a part": (Half(), "its own: gate_proj, up_proj; and not down_proj"),
    "a subclass": (Mlp(kind=Inherited), "gate_proj is a .*Inherited, and not an nn.Dense"),
    "an op": (Mlp(fields=(("dot_general_cls", fp8.Fp8DotGeneralOp),)), "gate_proj has dot_general_cls="),
    "precision": (Mlp(fields=(("precision", "highest"),)), "gate_proj has precision='highest'"),
    "promotion": (
        Mlp(fields=(("promote_dtype", lambda *xs, dtype: xs),)),
        "has a promote_dtype of its own",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_other_calls_and_layers_are_refused(name):
    model, message = MADE[name]
    with pytest.raises(ValueError, match=f"but it does not: .*{message}"):
        shape_of(converted(model, ("^", GATED)), normal(0, ROWS, WIDTH))


def test_what_others_intercept_is_part_of_the_proof():
    def halved(call, args, kwargs, context):
        out = call(*args, **kwargs)
        return out / 2 if type(context.module) is nn.Dense and context.module.name == "up_proj" else out

    model = converted(Mlp(lambda gate, up: 2 * nn.silu(gate) * up), ("^", GATED))
    with nn.intercept_methods(halved):
        shape_of(model, normal(0, ROWS, WIDTH))
    with pytest.raises(ValueError, match="with gate_proj"):
        shape_of(model, normal(0, ROWS, WIDTH))


def test_layers_that_differ_are_refused():
    for field, other, message in (
        (
            "dtype",
            jnp.bfloat16,
            "differ in dtype: None of gate_proj, bfloat16 of up_proj, None of down_proj",
        ),
        ("use_bias", True, "one of gate_proj and up_proj has a bias"),
    ):

        def dense(features, *, name, field=field, other=other, use_bias):
            return nn.Dense(
                features,
                name=name,
                **{"use_bias": use_bias, **({field: other} if name == "up_proj" else {})},
            )

        with pytest.raises(ValueError, match=message), jax.numpy_dtype_promotion("standard"):
            shape_of(converted(Mlp(kind=dense), ("^", GATED)), normal(0, ROWS, WIDTH))


def test_an_error_of_the_second_trace_says_what_it_is_for():
    class Counting(Mlp):
        @nn.compact
        def __call__(self, x):
            calls.append(1)
            if len(calls) > 1:
                raise RuntimeError("once is enough")
            return super().__call__(x)

    calls = []
    with pytest.raises(RuntimeError) as error:
        shape_of(converted(Counting(), ("^", GATED)), normal(0, ROWS, WIDTH))
    assert re.search("traced the model once more, .*silu", "".join(error.value.__notes__))


def test_patterns():
    x = normal(0, ROWS, WIDTH)
    shape_of(converted(Layers(), ("mlp", GATED)), x)  # not its layers, whose paths go on
    with pytest.raises(
        ValueError, match="rule 'feed' of a FusedMLP.* must match up to the end of the path"
    ):
        shape_of(converted(Layers(), ("feed", GATED)), x)
    shape_of(converted(Layers(), ("feed", GATED), allow_unmatched=True), x)
    with pytest.raises(ValueError, match="says? that layers_0 computes"):  # the first rule that speaks
        shape_of(converted(Layers(), ("layers_0", GATED), ("mlp", GATED)), x)
    recipes = converted(Layers(), ("mlp", GATED), ("mlp", fp8.Float8CurrentScaling()), include=None)
    assert "not in one block" in fp8.report(recipes, x).rows[0].reason  # no rule of a recipe is shadowed


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"activation": "tanh"}, ValueError, "activation must be one of"),
        ({"into": ()}, ValueError, r"one or two names of layers.* into=\(\)"),
        ({"into": ("a", "b", "c")}, ValueError, "one or two names of layers"),
        (
            {"into": ("gate", "down")},
            ValueError,
            "out_of another name, all different; got .* out_of='down'",
        ),
        ({"into": ("gate", 1)}, TypeError, "must be names of layers; got 1"),
    ],
)
def test_errors(fields, error, message):
    with pytest.raises(error, match=message):
        fp8.FusedMLP(**{"into": "up", "out_of": "down", "activation": "relu", **fields})


def test_where_it_is_no_rule():
    with pytest.raises(ValueError, match="but form='qdq' computes each layer by itself"):
        converted(Mlp(), ("mlp", GATED), form="qdq")
    with pytest.raises((TypeError, ValueError), match="recipe"):
        shape_of(converted(Mlp(), lambda *_: GATED), normal(0, ROWS, WIDTH))
    with pytest.raises(ValueError, match="FusedMLP, which is for Linen models"):
        fp8nnx.quantize_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), rules=[("", GATED)])


def test_elementwise_values():
    """Of what the activations do not do."""

    def f(x, y):
        z = jnp.clip(jnp.exp2(x) + jnp.square(y), 0.5, 3) / jnp.sqrt(jnp.abs(y) + 1)
        return jnp.where((x > 0) & jnp.isfinite(y), z, -z) + (x >= y).astype(x.dtype) * 2

    x, y = np.float64([-1.5, 0.3, 2.0, 1.0]), np.float64([0.2, -3.0, 2.0, 0.5])
    closed = jax.make_jaxpr(f)(*[struct(2, 3, dtype=jnp.float32)] * 2)
    (found,) = at_points(closed, [x, y])
    np.testing.assert_allclose(found, f(jnp.float32(x), jnp.float32(y)), rtol=1e-6)
    closed = jax.make_jaxpr(lambda x: (x.astype(jnp.int32), x.sum(), x[None]))(struct(2, dtype=jnp.float32))
    assert [value.why for value in at_points(closed, [x]) if isinstance(value, Unknown)] == [
        "the primitive convert_element_type",
        "the primitive reduce_sum",
        "the primitive broadcast_in_dim",
    ]


SIXTEEN_BITS = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Stacked(nn.Module):
    """Blocks in a loop, whose author knows of the state."""

    mlp: Any

    @nn.compact
    def __call__(self, x):
        mlp = self.mlp

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + mlp(name="mlp")(x), None

        axes = {"params": 0, OWG: 0}
        stacked = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=2)
        return stacked(name="layers")(x, None)[0]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "how",
    cells(["one block", "scan and remat", "microbatches"], repeated=["scan and remat", "microbatches"]),
)
def test_on_hopper_it_is_the_program_of_fp8_mlp(how):
    own = partial(fp8.MLP, 256, **SIXTEEN_BITS, activation="silu", gated=True, names=NAMES)
    plain = partial(Mlp, hidden=256, fields=tuple(SIXTEEN_BITS.items()))
    is_scanned = how == "scan and remat"
    models = (
        Stacked(own) if is_scanned else own(),
        fp8.quantize_model(
            Stacked(plain) if is_scanned else plain(),
            include=".*",
            rules=[("mlp" if is_scanned else "^", GATED)],
        ),
    )
    x, found = struct(4, 128, 128), []
    for model in models:

        def loss(variables, x, model=model):
            return jnp.mean(jnp.square(model.apply(variables, x)).astype(jnp.float32))

        step = fp8.accumulate_gradients if how == "microbatches" else fp8.value_and_grad
        variables = jax.eval_shape(model.init, jax.random.key(0), struct(128, 128))
        program = compiling.compile_for(compiling.find_target("h200"), step(loss), (variables, x))
        text = program.as_text()
        calls = [line for line in text.splitlines() if " custom-call(" in line and CAST_TRANSPOSE in line]
        read = kernels.read(text).kernels
        times, moved = (sum(x) for x in zip(*((k.trip_count, k.bytes * k.trip_count) for k in read)))
        found.append((len(calls), times, moved, program.memory_analysis().temp_size_in_bytes))
    assert found[0] == found[1]
    assert found[1][0] >= 3 + 2  # kernels; and the activations, forward and backward
