"""How ``lowered`` chooses: a table of additions, each of another number, in the place of GEMMs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8flax._core.gemm import lowering
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.lowering import Row, lowered


class Adding(NamedTuple):
    """The request: what the reference adds."""

    number: int


def adds(number):
    return lambda request, x: x + request.number + number


def reference(request, x):
    return x + request.number


def adds_on_shards(number):
    def run(request, x):
        @custom_partitioning
        def add(x):
            return x + number

        def partition(mesh, args, result):
            return mesh, lambda x: x + number, result.sharding, (args[0].sharding,)

        add.def_partition(partition, sharding_rule="i j -> i j")
        return add(x) + request.number

    return run


def is_hopper(capability, request, x):
    return capability >= 9


PLAIN = adds(40)
ROWS = {
    "held": Row(is_hopper, adds(10), adds(20)),
    "kernel": Row(is_hopper, adds(10), adds_on_shards(30), needs_mesh=True),
    "one device": Row(is_hopper, adds(10)),
    "plain": Row(lambda capability, request, x: capability >= 8, PLAIN, PLAIN),
}


def ways(rows, capability, monkeypatch):
    """Returns what is added on one GPU, on several, and on several under ``jax.vmap``."""
    monkeypatch.setitem(lowering._TABLE, Adding, tuple(ROWS[name] for name in rows))
    monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.device_put(np.zeros((8, 2), np.float32), NamedSharding(mesh, P("data")))

    def add(x):
        return lowered(Adding(1), reference, x)

    with compile_target(capability):
        one, several = jax.jit(add)(jnp.zeros((2, 2))), jax.jit(add)(split)
        mapped = jax.jit(jax.vmap(add))(split[:, None])
    return [int(result.ravel()[0]) for result in (one, several, mapped)]


@pytest.mark.parametrize(
    ("rows", "capability", "expected"),
    [
        (["held", "plain"], 9.0, [11, 21, 21]),
        (["kernel", "plain"], 9.0, [11, 31, 41]),
        (["kernel"], 9.0, [11, 31, 1]),
        (["one device", "plain"], 9.0, [11, 41, 41]),
        (["one device"], 9.0, [11, 1, 1]),
        (["plain"], 9.0, [41, 41, 41]),
        (["held", "kernel", "plain"], 8.0, [41, 41, 41]),
        (["held", "kernel", "plain"], 7.0, [1, 1, 1]),
    ],
)
def test_which_row_runs(rows, capability, expected, monkeypatch):
    """The first that fits; on several devices the first that can be split; else the reference."""
    assert ways(rows, capability, monkeypatch) == expected


def test_other_devices_run_the_reference(monkeypatch):
    monkeypatch.setitem(lowering._TABLE, Adding, (ROWS["plain"],))
    with compile_target(9.0):
        out = jax.jit(lambda x: lowered(Adding(1), reference, x))(jnp.zeros(2))
    np.testing.assert_array_equal(out, np.ones(2))


def test_a_derivative_is_refused_if_a_row_fits(monkeypatch):
    monkeypatch.setitem(lowering._TABLE, Adding, (ROWS["plain"],))
    gradient = jax.grad(lambda x: lowered(Adding(1), reference, x))
    assert gradient(1.0) == 1
    with compile_target(9.0), pytest.raises(TypeError, match="can be differentiated once"):
        gradient(1.0)
