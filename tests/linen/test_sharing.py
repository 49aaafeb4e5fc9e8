"""``DelayedScaling(shared_inputs=True)``: ops that take the same array cast it once."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._audit import compiling, kernels
from tests.cases import OWG, cells, normal, struct, variables_of
from tests.models import ALL

RECIPE = fp8.DelayedScaling(amax_history_len=4)
SHARED = fp8.DelayedScaling(amax_history_len=4, shared_inputs=True)
ROWS, WIDTH = 16, 32


class Attention(nn.Module):
    """Three layers of one array, then one of another, and one of the first again."""

    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x):
        layer = partial(nn.Dense, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=self.recipe))
        query, key, value = (layer(WIDTH, name=name)(x) for name in ("query", "key", "value"))
        out = layer(WIDTH, name="out")(jnp.tanh(query) * key + value)
        return out + layer(WIDTH, name="gate")(x)


class InAModelOfPlainLayers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return sum(nn.tanh(nn.Dense(WIDTH, name=f"layer_{i}")(x)) for i in range(3))


def eager(fun):
    return fun


def steps(model, variables, number, wrap=jax.jit):
    """Returns the variables, and the losses, of some steps of SGD."""

    def step(variables, x):
        loss, grads = fp8.value_and_grad(lambda v: jnp.mean(jnp.square(model.apply(v, x))))(variables)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], grads["params"])
        return {"params": params, OWG: grads[OWG]}, loss

    step, losses = wrap(step), []
    for i in range(number):
        variables, loss = step(variables, normal(i, ROWS, WIDTH))
        losses.append(loss)
    return variables, losses


@pytest.mark.parametrize("wrap", cells([eager, jax.jit], repeated=[eager]), ids=["eager", "jit"])
@pytest.mark.parametrize("kind", cells(["plain", "remat", "converted"], repeated=["remat"]))
def test_layers_that_saw_the_same_arrays_lose_no_bit(kind, wrap):
    def model(recipe):
        if kind == "converted":
            return fp8.quantize_model(InAModelOfPlainLayers(), recipe, **ALL)
        return (nn.remat(Attention) if kind == "remat" else Attention)(recipe)

    variables = variables_of(model(RECIPE), normal(9, ROWS, WIDTH))
    expected = steps(model(RECIPE), variables, 3, wrap)
    jax.tree.map(np.testing.assert_array_equal, steps(model(SHARED), variables, 3, wrap), expected)


def test_the_scale_of_the_first_and_a_state_of_each():
    variables = variables_of(Attention(RECIPE), normal(9, ROWS, WIDTH))
    variables[OWG] = {
        name: {"Fp8DotGeneralOp_0": {**ops["Fp8DotGeneralOp_0"], "input_amax_history": history}}
        for (name, ops), history in zip(
            sorted(variables[OWG].items()), jnp.asarray(448.0 * np.eye(5, 4, dtype=np.float32) + 448.0)
        )
    }
    names = sorted(variables[OWG])
    for recipe in (RECIPE, SHARED):
        new, _ = steps(Attention(recipe), variables, 1)
        new = {name: new[OWG][name]["Fp8DotGeneralOp_0"] for name in names}
        scales = {name: float(op["input_scale"][0]) for name, op in new.items()}
        own = {name: 2.0 if name != names[-1] else 1.0 for name in names}
        same = {**own, "key": own["query"], "value": own["query"]}
        assert own["query"] != own["value"]
        assert scales == (own if recipe is RECIPE else same)
        amax = np.max(np.abs(normal(0, ROWS, WIDTH)))
        for name in ("query", "key", "value", "gate"):
            np.testing.assert_array_equal(new[name]["input_amax_history"][0], amax)


@pytest.mark.long
def test_no_tracer_is_kept():
    model = Attention(SHARED)
    variables = variables_of(model, normal(9, ROWS, WIDTH))
    bound = model.bind(variables)
    with jax.checking_leaks():
        for _ in range(2):
            jax.jit(lambda x: bound(x) + model.apply(variables, x))(jnp.ones((ROWS, WIDTH)))


def test_an_inner_trace_notes_nothing_for_the_outer_one():
    class Checkpointed(nn.Module):
        @nn.compact
        def __call__(self, x):
            op = partial(fp8.Fp8DotGeneralOp, recipe=SHARED)
            first, second = (nn.Dense(WIDTH, dot_general_cls=op, name=name) for name in "ab")
            first(x), second(x)  # so that there are variables
            return jax.checkpoint(lambda y: y * first(x))(x) + second(x)

    model = Checkpointed()
    variables = variables_of(model, normal(9, ROWS, WIDTH))
    new, _ = steps(model, variables, 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA then fused otherwise")
@pytest.mark.parametrize("is_converted", cells([False, True], repeated=[True]), ids=["op", "converted"])
def test_the_array_is_cast_and_transposed_once(is_converted):
    class Layers(nn.Module):
        op: type | partial | None

        @nn.compact
        def __call__(self, x):
            return [nn.Dense(4096, dtype=jnp.bfloat16, dot_general_cls=self.op)(x) for _ in range(3)]

    counts = []
    for recipe in (RECIPE, SHARED):
        model, x = Layers(partial(fp8.Fp8DotGeneralOp, recipe=recipe)), struct(8192, 4096)
        if is_converted:
            model = fp8.quantize_model(Layers(None), recipe=recipe)
        variables = jax.eval_shape(model.init, jax.random.key(0), x)

        def loss(variables, x, model=model):
            return sum(jnp.mean(jnp.square(y).astype(jnp.float32)) for y in model.apply(variables, x))

        program = compiling.compile_for(
            compiling.find_target("h200"), jax.jit(fp8.value_and_grad(loss)), (variables, x)
        ).as_text()
        entry = program[program.index("\nENTRY") :]
        launched = {k.name for k in kernels.read(program).kernels}
        results = re.findall(r"%([\w.-]+) = (.*?) (?:fusion|custom-call)\(", entry)
        # Our kernel transposes bytes, those of three gradients, too.
        found = re.compile(r"(?:f8e4m3fn|u8)\[(?:8192,4096|4096,8192)\]")
        counts.append(sum(len(found.findall(types)) for name, types in results if name in launched))
    assert counts == [6 + 3, 2 + 3]
