"""NNX's layers with our ops compute, bit for bit, what Linen's layers with the Linen ops do."""

from functools import partial

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
from tests.cases import RECIPES, cells, normal
from tests.models import Einsum
from tests.nnx.layout import to_linen, update_from_linen
from tests.what_works import EXPLICIT

DELAYED = fp8.DelayedScaling(amax_history_len=4)
OWG = "_overwrite_with_gradient"
X, IMAGES = normal(0, 2, 3, 16), normal(1, 2, 4, 4, 3)


def rngs():
    return nnx.Rngs(0)


# The Linen layer, the NNX layer, and the class of their ops.
LAYERS = {
    "Linear": (
        lambda op: nn.Dense(8, dot_general_cls=op),
        lambda op: nnx.Linear(16, 8, dot_general=op(), rngs=rngs()),
        "Fp8DotGeneralOp",
        X,
    ),
    "LinearGeneral": (
        lambda op: nn.DenseGeneral((2, 4), axis=(-2, -1), dot_general_cls=op),
        lambda op: nnx.LinearGeneral((3, 16), (2, 4), axis=(-2, -1), dot_general=op(), rngs=rngs()),
        "Fp8DotGeneralOp",
        X,
    ),
    "Einsum": (
        lambda op: Einsum((16, 2, 4), "bta,ahd->bthd", op),
        lambda op: nnx.Einsum("bta,ahd->bthd", (16, 2, 4), einsum_op=op(), rngs=rngs()),
        "Fp8DotGeneralOp",
        X,
    ),
    "Conv": (
        lambda op: nn.Conv(8, (3, 3), conv_general_dilated_cls=op),
        lambda op: nnx.Conv(3, 8, (3, 3), conv_general_dilated=op(), rngs=rngs()),
        "Fp8ConvGeneralDilatedOp",
        IMAGES,
    ),
}


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_linens_give(name):
    make_linen, make_nnx, op, x = LAYERS[name]
    linen_layer = make_linen(partial(getattr(fp8, op), recipe=DELAYED))
    layer = make_nnx(partial(fp8nnx.Fp8Einsum if name == "Einsum" else getattr(fp8nnx, op), recipe=DELAYED))
    variables = jax.jit(linen_layer.init)(jax.random.key(0), x)
    assert list(jax.tree.leaves(variables[OWG]))
    update_from_linen(layer, variables)
    graphdef, state = nnx.split(layer)

    # Both in one program, so that it is compiled once.
    @jax.jit
    def both(variables, state):
        def of_nnx(state):
            return jnp.sum(jnp.sin(nnx.merge(graphdef, state)(x)))

        ours = fp8nnx.value_and_grad(of_nnx)(state)
        theirs = fp8.value_and_grad(lambda v: jnp.sum(jnp.sin(linen_layer.apply(v, x))))(variables)
        return ours, theirs

    (value, grads), (expected, expected_grads) = both(variables, state)
    nnx.update(layer, grads)
    assert value == expected
    jax.tree.map(np.testing.assert_array_equal, to_linen(layer), expected_grads)


@pytest.mark.newest
def test_ragged_dot():
    x, kernels, sizes = normal(0, 6, 16), normal(1, 2, 16, 8), jnp.array([4, 1])
    op, linen_op = fp8nnx.Fp8RaggedDotOp(2, recipe=DELAYED), fp8.Fp8RaggedDotOp(recipe=DELAYED)
    assert op.kernel_amax_history.shape == (2, 4)
    graphdef, state = nnx.split(op)

    @jax.jit
    def both(state, variables):
        def loss(multiply):
            return jnp.sum(jnp.sin(multiply(x, kernels, sizes)))

        ours = fp8nnx.value_and_grad(lambda state: loss(nnx.merge(graphdef, state)))(state)
        return ours, fp8.value_and_grad(lambda v: loss(partial(linen_op.apply, v)))(variables)

    (value, grads), (expected, expected_grads) = both(state, to_linen(op))
    assert value == expected
    fp8nnx.overwrite_state(op, grads)
    jax.tree.map(np.testing.assert_array_equal, to_linen(op), expected_grads)
    assert op.kernel_amax_history.get_value()[1, 0] == jnp.max(jnp.abs(kernels[1]))
    with pytest.raises(ValueError, match="kernel_scale"):
        op(x, normal(1, 3, 16, 8), jnp.array([4, 1, 1]))
    with pytest.raises(ValueError, match="num_experts"):
        fp8nnx.Fp8RaggedDotOp(0)


def test_dtypes_and_precision_are_honoured():
    op = fp8nnx.Fp8DotGeneralOp(recipe=DELAYED)
    layer = nnx.Linear(16, 8, use_bias=False, dtype=jnp.bfloat16, dot_general=op, rngs=rngs())
    layer.preferred_element_type = jnp.float32
    assert jax.eval_shape(layer, X).dtype == jnp.float32
    layer.precision = "nonsense"
    with pytest.raises(ValueError, match="nonsense"):
        layer(X)


def test_autocast():
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        layer = nnx.Linear(16, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=rngs())
        assert OWG not in to_linen(layer)
        current = layer(X)
    with pytest.raises(fp8.MissingStateError, match=r"Fp8DotGeneralOp\.input_scale"):
        layer(X)
    delayed = nnx.clone(layer)
    delayed.dot_general = fp8nnx.Fp8DotGeneralOp()
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        np.testing.assert_array_equal(delayed(X), current)
    plain = nnx.Linear(16, 8, rngs=rngs())
    nnx.update(plain, nnx.state(layer, nnx.Param))
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(delayed(X), plain(X))
        assert OWG not in to_linen(fp8nnx.Fp8DotGeneralOp(recipe=DELAYED))


def test_recipe_in_use_is_part_of_what_nnx_jit_knows_a_function_by():
    layer = nnx.Linear(16, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=rngs())
    call = nnx.jit(lambda layer, x: layer(x))
    delayed = call(layer, X)
    with fp8.autocast(enabled=False):
        plain = call(layer, X)
    assert not np.array_equal(delayed, plain)
    np.testing.assert_array_equal(call(layer, X), delayed)


def test_arguments_that_are_wrong():
    with pytest.raises(ValueError, match="form must be one of"):
        fp8nnx.Fp8DotGeneralOp(form="nonsense")
    with pytest.raises(ValueError, match="form must be one of"):
        fp8nnx.Fp8ConvGeneralDilatedOp(form="qdq")
    with pytest.raises(TypeError, match="recipe"):
        fp8nnx.Fp8DotGeneralOp(recipe="delayed")


def test_the_error_of_a_second_derivative_fits_nnx():
    def second(op):
        layer = nnx.Linear(16, 8, dot_general=op, rngs=rngs())
        return jax.jit(jax.jacrev(jax.grad(lambda x: jnp.sum(jnp.sin(layer(x))))))(X[0, 0])

    with pytest.raises(TypeError, match="form='qdq' to the op") as error:
        second(fp8nnx.Fp8DotGeneralOp())
    assert "fp8flax.Fp8DotGeneralOp" not in str(error.value)  # the op of Linen
    assert np.linalg.norm(second(fp8nnx.Fp8DotGeneralOp(form="qdq"))) > 0


SHARDINGS = {
    # Shardings of the input, the kernel and the result. JAX alone could not infer the first three results.
    "summed": (P("data", None, "model"), P("model"), P("data")),
    "summed and spread": (P("data", None, "model"), P("model"), P("data", "model")),
    "one axis twice": (P("model"), P(None, "model"), P("model")),
    "gathered": (P("data"), P(None, "model"), P()),
    "split": (P(), P(), P("data")),
}
TOLD = {**RECIPES, "qdq": DELAYED}


@pytest.mark.long
@pytest.mark.parametrize("name", cells(TOLD, repeated=["axiswise", "mxfp8"]))
def test_out_sharding(name, cell):
    """The op takes ``out_sharding`` like ``lax.dot_general``; values are those of one device."""
    sizes = (0, 4, 64, 256), (1, 256, 128), (2, 4, 64, 128)
    x, kernel, weights = (jnp.asarray(normal(*size)) for size in sizes)
    op = fp8nnx.Fp8DotGeneralOp(recipe=TOLD[name], form="qdq" if name == "qdq" else "direct")
    graphdef, state = nnx.split(op)

    def step(told, *args):
        def loss(state, x, kernel):
            out = nnx.merge(graphdef, state)(x, kernel, (((2,), (0,)), ((), ())), **told)
            here = jax.sharding.reshard(weights, told["out_sharding"]) if told else weights
            return jnp.sum(out * here), out

        return fp8nnx.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*args)

    expected = jax.jit(partial(step, {}))(state, x, kernel)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
        for of_x, of_kernel, of_out in SHARDINGS.values():
            args = (jax.sharding.reshard(a, spec) for a, spec in ((x, of_x), (kernel, of_kernel)))
            found = jax.jit(partial(step, {"out_sharding": of_out}))(state, *args)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
            out, (_, *grads) = found[0][1], found[1]
            for array, spec in zip((out, *grads), (of_out, of_x, of_kernel)):
                assert jax.typeof(array).sharding.spec == P(*spec, *[None] * (array.ndim - len(spec)))
    if name in RECIPES:
        cell("nnx", EXPLICIT, name)
