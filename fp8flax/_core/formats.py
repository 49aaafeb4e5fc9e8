"""The float formats of 8 and of 4 bits, and their limits; no array math."""

from __future__ import annotations

import enum

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

_E4M3, _E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
_E4M3_FNUZ, _E5M2_FNUZ = np.dtype(jnp.float8_e4m3fnuz), np.dtype(jnp.float8_e5m2fnuz)

FP8_DTYPES = (_E4M3, _E5M2, _E4M3_FNUZ, _E5M2_FNUZ)
"""The dtypes of 8 bits that a tensor may be quantized to."""

E5M2, OCP_DTYPES = _E5M2, frozenset((_E4M3, _E5M2))
"""The dtype with more range, and the dtypes that NVIDIA GPUs multiply."""

E2M1 = np.dtype(jnp.float4_e2m1fn)
"""The dtype of NVFP4, in 4 bits."""


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


def as_fp8_dtype(dtype: DTypeLike, name: str) -> np.dtype:
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


def fp8_max(dtype: DTypeLike) -> float:
    """Returns the largest finite value of an FP8 dtype, or of e2m1, as a Python float."""
    return float(jnp.finfo(dtype).max)


def is_wide_float(dtype: DTypeLike | None) -> bool:
    """Returns whether ``dtype`` is a float dtype of two bytes or more; False if it is not a dtype."""
    try:
        # NumPy reads None as float64.
        is_float = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        return is_float and jnp.dtype(dtype).itemsize >= 2
    except TypeError:
        return False
