"""Static descriptions of operands."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8flax._core.plans.plan import Operand, explicit_sharding


def test_an_operand_is_static():
    x = jnp.ones((2, 3), jnp.bfloat16)
    operand = Operand.of(x)
    assert operand == Operand((2, 3), jnp.dtype(jnp.bfloat16), None, frozenset())
    assert hash(operand) == hash(Operand.of(2 * x))


def test_only_explicit_axes_are_part_of_it():
    found = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
        x = jax.device_put(jnp.ones((4, 3)), NamedSharding(mesh, P("data")))
        found.append(explicit_sharding(x))
        assert Operand.of(x).sharding == found[-1]
    assert found[0] is None
    assert found[1].spec == P("data", None)


def test_manual_axes_are_part_of_it():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    seen = []

    def f(x, y):
        seen.extend(Operand.of(array).axes for array in (x, y))
        return x

    jax.eval_shape(
        jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")),
        jnp.ones(2),
        jnp.ones(2),
    )
    assert seen == [frozenset({"data"}), frozenset()]
