import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.formats import fp8_max
from tests import reference


@pytest.mark.parametrize(
    ("name", "largest", "normal", "subnormal", "finite"),
    [
        # OCP OFP8 v1.0, table 1; for FNUZ: Noune et al., 2022, arXiv:2206.02915.
        ("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-9, 253),
        ("float8_e5m2", 57344.0, 2.0**-14, 2.0**-16, 247),
        ("float8_e4m3fnuz", 240.0, 2.0**-7, 2.0**-10, 255),
        ("float8_e5m2fnuz", 57344.0, 2.0**-15, 2.0**-17, 255),
    ],
)
def test_limits(name, largest, normal, subnormal, finite):
    dtype = getattr(jnp, name)
    limits = jnp.finfo(dtype)
    assert (limits.smallest_normal, limits.smallest_subnormal) == (normal, subnormal)
    assert fp8_max(np.dtype(dtype)) == largest
    codes = reference.finite_codes(name)
    assert codes.max() == largest
    assert codes[codes > 0].min() == subnormal
    assert len(np.unique(codes)) == finite


@pytest.mark.parametrize("bad", [jnp.bfloat16, jnp.int8, "float8", None, jnp.float8_e4m3b11fnuz])
def test_other_dtypes_are_refused(bad):
    with pytest.raises(TypeError, match="must be an FP8 dtype, one of float8_e4m3fn.*got"):
        fp8_max(bad)
