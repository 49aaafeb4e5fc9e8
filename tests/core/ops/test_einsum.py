"""An einsum by one ``dot_general``, beside NumPy."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import calling

X = np.random.default_rng(0).integers(-8, 8, (2, 3, 4)).astype(np.float32)


@pytest.mark.parametrize(
    ("eqn", "shape"),
    [
        ("abc,cd->abd", (4, 5)),
        ("abc,dc->dab", (5, 4)),  # jnp.einsum would swap the operands
        ("abc,bcd->ad", (3, 4, 5)),
        ("abc,acd->abd", (2, 4, 5)),
        ("abc,dbe->ad", (5, 3, 6)),  # c and e are summed first
        ("...c,cd->...d", (4, 5)),
        ("abc,abc->", (2, 3, 4)),
        ("abc,d->dabc", (5,)),
        ("abc,cd", (4, 5)),
        ("abc,cd->abd", (1, 5)),  # an index of size 1 broadcasts
        ("abc,acd->abd", (1, 4, 5)),
    ],
)
def test_beside_numpy_with_the_operands_in_their_places(eqn, shape):
    y = np.random.default_rng(1).integers(-8, 8, shape).astype(np.float32)
    dot_general = mock.Mock(side_effect=lax.dot_general)
    out = calling(Einsum, dot_general)(eqn, jnp.asarray(X), jnp.asarray(y))
    np.testing.assert_array_equal(out, np.einsum(eqn, X, y))
    lhs, rhs, *_ = dot_general.call_args.args
    assert lhs.size in (X.size, X.size // 4)
    assert rhs.size in (y.size, y.size // 6)


@pytest.mark.parametrize("recipe", [fp8.Float8CurrentScaling(), fp8.MXFP8BlockScaling()])
@pytest.mark.parametrize("eqn", ["ijk,jl->il", "jl,ijk->il"])
def test_a_sum_that_overflows_stays_non_finite(recipe, eqn):
    """A cast to FP8 would saturate it, and the result would be finite."""
    operands = jnp.full((4, 5), 1e-3, jnp.float16), jnp.full((2, 4, 3), 3e4, jnp.float16)
    lhs, rhs = operands if eqn.startswith("jl") else operands[::-1]
    assert np.isinf(jnp.einsum(eqn, lhs, rhs)).all()
    assert not np.isfinite(fp8.Fp8Einsum(recipe=recipe).apply({}, eqn, lhs, rhs)).any()


@pytest.mark.parametrize(
    ("eqn", "message"),
    [
        ("abc,cd,de->abe", "number of operands"),
        ("ab,bd->ad", "number of indices"),
        ("abb,bd->ad", "repeats an index|label 'b'"),
        ("abc,bd->acd", "label 'b'"),
    ],
)
def test_errors(eqn, message):
    with pytest.raises(ValueError, match=message):
        calling(Einsum, lax.dot_general)(eqn, jnp.asarray(X), jnp.ones((4, 5)))
