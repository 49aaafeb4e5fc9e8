"""Small arrays that are computed as one array: the results are those of each alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.state.batching import each_alike
from fp8flax._core.state.state import ScalingState, digest_of, state_after
from tests import reference

AXES_OF_TWO = (1, 1)


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize("kind", [{}, {"in_parts": True}, {"loops": True}, {"read_once": False}])
def test_each_alike_is_each(kind):
    def f(x, pair, axis):
        return x + pair[0], pair[1] - axis

    xs, pairs = [jnp.float32(1), jnp.float32(2)], [(jnp.ones(2), jnp.zeros(3)), (jnp.zeros(2), jnp.ones(3))]
    found = jax.jit(lambda *args: each_alike(f, AXES_OF_TWO, *args, **kind))(xs, pairs)
    expected = [f(*each) for each in zip(xs, pairs, AXES_OF_TWO)]
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert len(each_alike(f, [1], xs[:1], pairs[:1], **kind)) == 1
    assert each_alike(f, [], [], [], **kind) == []
    without_some = jax.jit(
        lambda xs: each_alike(lambda x, _, axis: x + axis, [1, 1], xs, [None, None], **kind)
    ).trace(xs)
    without_some.lower(lowering_platforms=("cuda",))
    np.testing.assert_array_equal(without_some.lower().compile()(xs), [2, 3])


def test_the_fixture_stacks(stacking):
    """The program of the other tests has the stacking if, and only if, the fixture says so."""
    xs = [jnp.float32(1), jnp.float32(2)]
    for axes in ((1, 1), (1, 2)):
        program = jax.make_jaxpr(partial(each_alike, lambda x, axis: x + axis, axes))(xs)
        assert ("f32[2]" in str(program)) == (stacking == "stacked" and axes == (1, 1))


# Three tensors that can be stacked, one with another length, and two stacked layers along either axis.
SHAPES = [(0, (4,)), (0, (5,)), (0, (4,)), (1, (2, 4)), (0, (4,)), (0, (4, 2)), (1, (2, 4))]
AXES = [axis for axis, _ in SHAPES]


def states():
    """The states of tensors of several shapes."""
    rng, found = np.random.default_rng(0), []
    for axis, shape in SHAPES:
        history = rng.lognormal(size=shape).astype(np.float32)
        scale = rng.lognormal(size=np.take(history, [0], axis).shape).astype(np.float32)
        found.append(ScalingState(jnp.asarray(scale), jnp.asarray(history)))
    return found


def rows(x, axis):
    """Returns a row for each tensor of a stack."""
    x = np.moveaxis(np.asarray(x), axis, -1)
    return x.reshape(-1, x.shape[-1])


@pytest.mark.usefixtures("stacking")
def test_digests_of_tensors_of_several_shapes():
    for axis, old, digest in zip(AXES, states(), each_alike(digest_of, AXES, states())):
        assert {number.shape for number in digest} == {old.scale.shape}
        found = [rows(number, axis)[:, 0] for number in digest]
        for i, (scale, history) in enumerate(zip(rows(old.scale, axis), rows(old.amax_history, axis))):
            expected = [*scale, np.max(history), history[0]]
            expected += [
                reference.next_scale(history, scale, name)[0] for name in ("float8_e4m3fn", "float8_e5m2")
            ]
            np.testing.assert_array_equal([number[i] for number in found], np.float32(expected))


@pytest.mark.usefixtures("stacking")
@pytest.mark.parametrize(
    "amaxes", [[8.0] * 7, [8.0, np.inf, -np.inf, 1.0, 2.0, np.inf, 3.0]], ids=["good", "bad"]
)
def test_next_states_of_tensors_of_several_shapes(amaxes):
    olds = states()
    numbers = [tuple(jnp.full(old.scale.shape, x) for x in (2.0, amax)) for old, amax in zip(olds, amaxes)]
    news = each_alike(state_after, AXES, olds, numbers, in_parts=True)
    for axis, amax, old, new in zip(AXES, amaxes, olds, news):
        np.testing.assert_array_equal(new.scale, np.full(old.scale.shape, 2.0))
        for before, after in zip(rows(old.amax_history, axis), rows(new.amax_history, axis)):
            np.testing.assert_array_equal(after, reference.next_history(np.float32([amax]), before))
