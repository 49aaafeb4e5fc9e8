import jax
import numpy as np
import pytest
from jax import lax

from fp8flax._compat.report_primitive import with_report

NUMBERS = np.arange(3, dtype=np.float32)


@pytest.mark.newest
def test_a_report_to_the_host_is_no_side_effect():
    """The ``nn.scan`` of Flax 0.12.12 raises an error if its body has a side effect."""
    seen = []

    def note(x):
        return with_report(x, 10 * x, lambda label, x: seen.extend(label * np.ravel(x)), 2)

    @jax.jit
    def f(x):
        x, _ = lax.scan(lambda c, y: (note(c + y), None), x, NUMBERS)
        return jax.jvp(jax.vmap(lambda y: note(x + y)), (NUMBERS,), (NUMBERS,))

    assert not jax.make_jaxpr(f)(np.float32(1)).effects
    jax.block_until_ready(f(np.float32(1)))
    assert sorted(seen) == [20, 40, 80, 80, 100, 120]
