"""Warns at import if the tests of this package do not run with the installed version of JAX."""

import warnings

import jax

OLDEST, NEWEST = (0, 10), (0, 12)

if not OLDEST <= tuple(map(int, jax.__version__.split(".")[:2])) <= NEWEST:
    warnings.warn(
        f"fp8flax uses private functions of JAX and is tested with JAX 0.{OLDEST[1]} to 0.{NEWEST[1]}; "
        f"this is JAX {jax.__version__}. If something fails, install another JAX, or a newer fp8flax.",
        stacklevel=2,
    )
