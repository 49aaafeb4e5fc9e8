import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8flax._compat.report_primitive import reported
from tests.cases import mesh

NUMBERS = np.arange(3, dtype=np.float32)


SEEN = []


def receive(label, device, *numbers):
    SEEN.append((label, int(device), *(np.asarray(x).tolist() for x in numbers)))
    return np.int32(len(SEEN))


def reports_of(f, *args):
    SEEN.clear()
    jax.block_until_ready(jax.jit(f)(*args))
    return list(SEEN)


def note(x, *numbers):
    return lax.select(reported(receive, "it", *numbers) > 0, x, jnp.zeros_like(x))


@pytest.mark.newest
def test_a_report_to_the_host_is_no_side_effect():
    """The ``nn.scan`` of Flax 0.12.12 raises an error if its body has a side effect."""

    def f(x):
        x, _ = lax.scan(lambda c, y: (note(c + y, c + y), None), x, NUMBERS)
        return jax.jvp(jax.vmap(lambda y: note(x + y, x + y, x)), (NUMBERS,), (NUMBERS,))

    assert not jax.make_jaxpr(f)(np.float32(1)).effects
    ones = [("it", 0, x) for x in (1, 2, 4)]
    assert reports_of(f, np.float32(1)) == [*ones, ("it", 0, [4, 5, 6], [4])]


@pytest.mark.newest
@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("inside", [False, True])
def test_a_repeated_forward_pass_makes_no_reports_and_all_are_in_order(inside, unroll):
    def step(c, x):
        return jnp.sin(note(c, x, c)) * x, None

    def f(x):
        body = jax.checkpoint(step) if inside else step
        return lax.scan(body, x, NUMBERS, unroll=unroll)[0]

    gradient = jax.value_and_grad(f if inside else jax.checkpoint(f))
    assert [x for _, _, x, _ in reports_of(gradient, np.float32(1))] == [0, 1, 2]


@pytest.mark.newest
@pytest.mark.parametrize("check_vma", [True, False])
def test_each_device_of_shard_map_has_a_number(check_vma):
    f = jax.shard_map(
        lambda x: note(x, x[0]),
        mesh=mesh(a=2),
        in_specs=jax.P("a"),
        out_specs=jax.P("a"),
        check_vma=check_vma,
    )
    assert sorted(reports_of(f, np.float32([3, 4]))) == [("it", 0, 3), ("it", 1, 4)]
