"""Which of the functions a program has, for one device and for several."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8flax._compat.choice_at_lowering import choose_at_lowering


@custom_partitioning
def add_two(x):
    return x + 2


add_two.def_partition(
    lambda mesh, args, result: (mesh, lambda x: x + 2, result.sharding, (args[0].sharding,)),
    sharding_rule="... -> ...",
)

chosen = partial(choose_at_lowering, lambda x: x + 1, add_two, lambda x: x + 3)


@pytest.mark.newest
def test_which_function_a_program_has():
    """1 for one device, 2 if it is split over a mesh, 3 on explicit axes, for export and without jit."""

    def split(kind):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        return jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, P("data")))

    automatic, explicit = map(split, (AxisType.Auto, AxisType.Explicit))
    jitted = jax.jit(chosen)
    np.testing.assert_array_equal(jitted(jnp.zeros((8, 2))), np.full((8, 2), 1))
    np.testing.assert_array_equal(jitted(automatic), np.full((8, 2), 2))
    exported = jax.export.export(jitted)(automatic).call
    for f, x in ((jitted, explicit), (exported, automatic), (chosen, automatic)):
        np.testing.assert_array_equal(f(x), np.full((8, 2), 3))


@pytest.mark.newest
def test_automatic_axes_of_an_explicit_mesh():
    """XLA would end the process at a sum over devices, if the mesh is set where it compiles."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        f = jax.jit(jax.sharding.auto_axes(chosen, axes="data", out_sharding=P("data")))
        np.testing.assert_array_equal(f(jnp.zeros((8, 2))), np.full((8, 2), 3))
