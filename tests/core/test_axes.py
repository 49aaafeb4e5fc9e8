"""Merging over the axes of ``jax.vmap`` and ``jax.shard_map``, beside NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp8flax._compat.varying import manual_axes
from fp8flax._core.axes import (
    axes_around_gradient,
    merge_amax,
    refuse_unchecked_axes,
    sum_to_axes,
    vary_alike,
)

pytestmark = pytest.mark.newest

AMAXES = np.float32([[1, 7, 3], [5, 2, 4]])
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = partial(jax.shard_map, mesh=MESH)


@pytest.mark.parametrize("axes_of_state", [(None, None), (0, None), (None, 0), (0, 0)], ids=str)
def test_an_amax_is_merged_over_each_batch_that_the_state_does_not_have(axes_of_state):
    outer, inner = axes_of_state
    has_axis = [axis == 0 for axis in axes_of_state]
    state = jnp.zeros([size for size, has in zip((2, 3), has_axis) if has])
    found = jax.vmap(jax.vmap(merge_amax, (0, inner)), (0, outer))(jnp.asarray(AMAXES), state)
    merged = AMAXES.max(tuple(i for i, has in enumerate(has_axis) if not has), keepdims=True)
    np.testing.assert_array_equal(found, np.broadcast_to(merged, (2, 3)))


def test_an_amax_of_a_scalar_is_repeated_for_a_batch_of_states():
    found = jax.vmap(merge_amax, (None, 0))(jnp.float32(3), jnp.zeros(4))
    np.testing.assert_array_equal(found, np.full(4, 3))


@pytest.mark.parametrize("is_replicated", [True, False])
def test_an_amax_is_merged_over_devices(is_replicated):
    state = jnp.zeros(1 if is_replicated else 2)

    def merged(amax, state):
        return merge_amax(amax[0], state[0])[None]

    of_state = P() if is_replicated else P("data")
    found = sharded(merged, in_specs=(P("data"), of_state), out_specs=of_state)(jnp.float32([3, 5]), state)
    np.testing.assert_array_equal(found, [5] if is_replicated else [3, 5])


def test_gradients_are_summed_over_the_axes_that_an_operand_does_not_have():
    def summed(x):
        x = x[0]
        assert manual_axes(sum_to_axes(x, frozenset())) == frozenset()
        return sum_to_axes(x, frozenset()) + sum_to_axes(x, frozenset({"data"}))

    found = sharded(lambda x: summed(x)[None], in_specs=P("data"), out_specs=P("data"))(jnp.float32([3, 5]))
    np.testing.assert_array_equal(found, [8 + 3, 8 + 5])


def test_arrays_vary_alike():
    def f(x, y):
        assert [manual_axes(array) for array in (x, y)] == [{"data"}, frozenset()]
        both = vary_alike(x, y)
        assert [manual_axes(array) for array in both] == [{"data"}] * 2
        return both[1]

    found = sharded(f, in_specs=(P("data"), P()), out_specs=P("data"))(jnp.zeros(2), jnp.ones(1))
    np.testing.assert_array_equal(found, np.ones(2))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_unchecked_axes_that_were_entered_inside_are_refused(inside, check_vma):
    def f(x):
        refuse_unchecked_axes()
        return x

    run = sharded(f, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    with axes_around_gradient(frozenset() if inside else frozenset({"data"})):
        if inside and not check_vma:
            with pytest.raises(TypeError, match="check_vma=False"):
                jax.eval_shape(run, jnp.zeros(2))
        else:
            assert jax.eval_shape(run, jnp.zeros(2)).shape == (2,)
