"""Equinox: the layer of docs/trainers.md trains with tied weights, with the bits of the Linen ops."""

import jax
import optax
import pytest

import fp8flax as fp8
from tests.pages import examples_for
from tests.train.test_plain import DELAYED, EACH_RECIPE, X, loss_of, step_of, train_as_in_linen

eqx = pytest.importorskip("equinox", reason="equinox is not installed: make test-trainers")

pytestmark = pytest.mark.usefixtures("promotion_of_users")
(LAYER,) = examples_for("Equinox")


def mlp(recipe):
    names = {}
    exec(LAYER, names)
    with fp8.autocast(recipe=recipe):
        tied, last = (names["Linear"](jax.random.key(i), 8, size) for i, size in enumerate((8, 4)))

    class MLP(eqx.Module):
        tied: eqx.Module
        layers: list

        def __call__(self, x):
            with fp8.autocast(recipe=recipe):
                return self.layers[0](jax.nn.relu(self.tied(3.0 * jax.nn.relu(self.tied(x)))))

    return MLP(tied, [last])


@EACH_RECIPE
def test_tied_weights_train_as_in_linen(recipe):
    train_as_in_linen(mlp(recipe), recipe)


def test_the_gradient_of_equinox_is_refused():
    """Both calls of the tied layer add up their states."""
    model, tx = mlp(DELAYED), optax.adam(1e-2)
    opt_state = tx.init(fp8.split_state(model)[1])
    _, model, opt_state = step_of(tx)(model, opt_state, X)
    _, model, _ = step_of(tx, eqx.filter_value_and_grad(loss_of))(model, opt_state, X)
    with pytest.raises(ValueError, match="tied/fp8/input_amax_history"):
        fp8.check_state(model)
