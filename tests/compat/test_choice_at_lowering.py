"""Which of the functions a program has, for one device and for several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8flax._compat.choice_at_lowering import unless_partitioned


def two_programs(x):
    """Returns two results; the second one shows whether XLA can split the program over devices."""
    return unless_partitioned(lambda x: [2 * x, 0 * x], lambda x: [2 * x, 0 * x + 1], x)


@pytest.mark.newest
def test_a_program_for_one_device():
    x = jnp.arange(3.0)
    for wrap in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(wrap(lambda x: two_programs(x))(x), [2 * x, 0 * x])


@pytest.mark.newest
def test_which_programs_for_several_devices_have_shards():
    """Those that are split over a mesh; not on explicit axes, and for export."""

    @custom_partitioning
    def add_three(x):
        return x + 3

    def partition(mesh, args, result):
        return mesh, lambda x: x + 3, result.sharding, (args[0].sharding,)

    add_three.def_partition(partition, sharding_rule="... -> ...")

    def of_shards(x):
        return unless_partitioned(lambda x: x + 1, lambda x: x + 2, x, on_shards=add_three)

    def split(kind):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        return jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P("data")))

    automatic, explicit = map(split, (AxisType.Auto, AxisType.Explicit))
    for f in (of_shards, jax.jit(of_shards)):
        np.testing.assert_array_equal(f(jnp.zeros((8, 2))), np.ones((8, 2)))
        np.testing.assert_array_equal(f(automatic), np.full((8, 2), 3))
    exported = jax.export.export(jax.jit(of_shards))(automatic).call
    for f, x in ((jax.jit(of_shards), explicit), (exported, automatic)):
        np.testing.assert_array_equal(f(x), np.full((8, 2), 2))
