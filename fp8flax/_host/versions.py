"""Checks the version of JAX, because this package uses private functions of JAX."""

import warnings

import jax

OLDEST, NEWEST = (0, 10), (0, 12)


def warn_of_unknown(version: str) -> None:
    """Warns if the tests of this package do not run with this version of JAX."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        known, after = (".".join(map(str, v)) for v in (NEWEST, (NEWEST[0], NEWEST[1] + 1)))
        warnings.warn(
            f"This fp8flax is known to work with JAX {'.'.join(map(str, OLDEST))} to {known}; this is JAX "
            f"{version}. fp8flax uses private functions of JAX, which change. If something fails, run pip "
            f"install 'jax>={'.'.join(map(str, OLDEST))},<{after}', or install a newer fp8flax.",
            UserWarning,
            stacklevel=2,
        )


warn_of_unknown(jax.__version__)
