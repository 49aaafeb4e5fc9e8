"""The 8-bit float formats and their limits; no array math."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
_E4M3_FNUZ, _E5M2_FNUZ = np.dtype(jnp.float8_e4m3fnuz), np.dtype(jnp.float8_e5m2fnuz)

FP8_DTYPES = (_E4M3, _E5M2, _E4M3_FNUZ, _E5M2_FNUZ)
"""The dtypes that a tensor may be quantized to."""


class Fp8Limits(NamedTuple):
    """Magnitudes that bound an 8-bit format, as Python floats."""

    max: float
    """Largest finite value."""
    smallest_normal: float
    """Smallest value with full precision."""
    smallest_subnormal: float
    """Smallest value above zero; equals ``smallest_normal`` in a format without subnormals."""


class Format(enum.Enum):
    """The FP8 dtypes of the forward pass and of the backward pass, as ``(forward, backward)``.

    ``HYBRID`` is the default for training: e4m3 (more precision) for inputs and kernels, e5m2 (more range)
    for output gradients. AMD MI300 computes in the ``_FNUZ`` formats.

    Example:
        >>> from fp8flax import Format
        >>> Format.HYBRID.backward_dtype
        dtype(float8_e5m2)

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
    """

    HYBRID = (_E4M3, _E5M2)
    E4M3 = (_E4M3, _E4M3)
    E5M2 = (_E5M2, _E5M2)
    HYBRID_FNUZ = (_E4M3_FNUZ, _E5M2_FNUZ)
    E4M3_FNUZ = (_E4M3_FNUZ, _E4M3_FNUZ)
    E5M2_FNUZ = (_E5M2_FNUZ, _E5M2_FNUZ)

    @property
    def forward_dtype(self) -> np.dtype:
        """Returns the dtype of inputs and kernels."""
        return self.value[0]

    @property
    def backward_dtype(self) -> np.dtype:
        """Returns the dtype of output gradients."""
        return self.value[1]


def as_fp8_dtype(dtype: Any, name: str) -> np.dtype:
    """Returns ``dtype`` as one of the four 8-bit tensor dtypes, or raises ``TypeError``."""
    try:
        result = np.dtype(dtype)
    except TypeError:
        result = None
    if result not in FP8_DTYPES:
        raise TypeError(
            f"{name} must be an FP8 dtype, one of {', '.join(d.name for d in FP8_DTYPES)}; got {dtype!r}."
        )
    return result


def fp8_limits(dtype: Any) -> Fp8Limits:
    """Returns the largest, smallest normal and smallest subnormal magnitude of a format.

    Args:
        dtype: one of the four FP8 dtypes, or ``float8_e8m0fnu``, the power-of-two scale format of the OCP
            Microscaling specification. ``float8_e8m0fnu`` has no sign, no zero and no subnormals.

    Returns:
        ``Fp8Limits`` of the format.

    Raises:
        TypeError: ``dtype`` is not one of these five dtypes.

    Example:
        >>> import jax.numpy as jnp, fp8flax
        >>> fp8flax.fp8_limits(jnp.float8_e4m3fn)
        Fp8Limits(max=448.0, smallest_normal=0.015625, smallest_subnormal=0.001953125)

    Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, table 1; OCP Microscaling Formats (MX)
    Specification v1.0, section 5.4.1.
    """
    if dtype is not None and dtype in (jnp.float8_e8m0fnu, np.dtype(jnp.float8_e8m0fnu)):
        return Fp8Limits(2.0**127, 2.0**-127, 2.0**-127)
    info = jnp.finfo(as_fp8_dtype(dtype, "dtype"))
    return Fp8Limits(float(info.max), float(info.smallest_normal), float(info.smallest_subnormal))


def fp8_max(dtype: Any) -> float:
    """Returns the largest finite value of an FP8 dtype, as a Python float.

    Args:
        dtype: one of the four FP8 dtypes, or ``float8_e8m0fnu``.

    Returns:
        The largest finite value.

    Raises:
        TypeError: ``dtype`` is not one of these five dtypes.

    Example:
        >>> import jax.numpy as jnp, fp8flax
        >>> [fp8flax.fp8_max(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2)]
        [448.0, 57344.0]

    Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, table 1.
    """
    return fp8_limits(dtype).max


def is_wide_float(dtype: Any) -> bool:
    """Returns whether ``dtype`` is a float dtype of two bytes or more; False if it is not a dtype."""
    try:
        # NumPy reads None as float64.
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        return is_float and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False
