"""Which of two functions a program has, with the private parts of JAX and without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8flax._compat.choice_at_lowering import unless_cpu, unless_partitioned


@pytest.mark.newest
def test_on_a_cpu_the_other_function_is_not_even_traced():
    def otherwise(x):
        raise AssertionError("traced")

    traced = jax.jit(lambda x: unless_cpu(otherwise, lambda x: [x + 1], x)).trace(jnp.ones(2))
    np.testing.assert_array_equal(traced.lower().compile()(jnp.ones(2)), [[2, 2]])
    with pytest.raises(AssertionError, match="traced"):
        traced.lower(lowering_platforms=("cuda",))


class TestUnlessCpu:
    @staticmethod
    def of_a_platform(x, y):
        """Returns three results; the last one shows for which platform the program was lowered."""
        return unless_cpu(
            lambda x, y: {"sum": x + y[0], "product": x * y[0], "where": jnp.sin(0 * x) + 2},
            lambda x, y: {"sum": x + y[0], "product": x * y[0], "where": jnp.zeros_like(x)},
            x,
            y,
        )

    @pytest.mark.newest
    def test_elsewhere_it_is_the_other_function(self):
        traced = jax.jit(self.of_a_platform).trace(jnp.ones(2), [jnp.ones(2)])
        programs = {
            name: traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda", "tpu")
        }
        assert [name for name, program in programs.items() if "sine" in program] == ["cuda", "tpu"]

    @pytest.mark.newest
    @pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cuda", "cpu")])
    def test_in_a_program_for_several_platforms(self, platforms):
        exported = jax.export.export(jax.jit(self.of_a_platform), platforms=platforms)
        found = exported(jnp.ones(2), [jnp.ones(2)]).call(jnp.array([1.0, 2.0]), [jnp.array([3.0, 4.0])])
        expected = {"sum": [4, 6], "product": [3, 8], "where": [0, 0]}
        jax.tree.map(np.testing.assert_array_equal, found, {k: np.array(v) for k, v in expected.items()})

    @pytest.mark.newest
    def test_with_jit_switched_off(self):
        with jax.disable_jit():
            found = self.of_a_platform(jnp.ones(2), [jnp.full(2, 3.0)])
        np.testing.assert_array_equal(found["product"], [3, 3])
        np.testing.assert_array_equal(found["where"], [0, 0])


def two_programs(x):
    """Returns two results; the second one shows whether XLA can split the program over devices."""
    return unless_partitioned(lambda x: [2 * x, 0 * x], lambda x: [2 * x, 0 * x + 1], x)


@pytest.mark.newest
def test_a_program_for_one_device():
    x = jnp.arange(3.0)
    for wrap in (lambda f: f, jax.jit, jax.vmap):
        np.testing.assert_array_equal(wrap(lambda x: two_programs(x))(x), [2 * x, 0 * x])


@pytest.mark.newest
def test_which_programs_for_several_devices_have_shards():
    """Those that are split over a mesh; not on explicit axes, under ``jax.vmap``, and for export."""

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
    for f, x in (
        (jax.jit(of_shards), explicit),
        (jax.jit(jax.vmap(of_shards)), automatic),
        (exported, automatic),
    ):
        np.testing.assert_array_equal(f(x), np.full((8, 2), 2))
