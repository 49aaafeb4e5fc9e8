"""``python -m fp8flax`` prints versions and devices, for a bug report."""

import importlib.metadata
import os
import platform
import sys
from collections import Counter

import jax

import fp8flax
from fp8flax._core.gemm.gpus import NATIVE_FP8, compute_capability_of

_PACKAGES = ("fp8flax", "jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUMERIC_RANK_PROMOTION", "JAX_ENABLE_X64")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(device: jax.Device) -> str:
    capability = getattr(device, "compute_capability", "")
    has_units = compute_capability_of(device) >= NATIVE_FP8
    units = "multiplies FP8" if has_units else "no FP8 units; the same values are emulated"
    return f"{device.device_kind} ({' '.join(filter(None, (device.platform, capability)))}): {units}"


def main() -> None:
    """Prints one line for each thing that a bug report needs."""
    lines = [f"fp8flax {fp8flax.__version__}, Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{name}: {_version(name)}" for name in _PACKAGES]
    lines += [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    try:
        lines += [f"{count} × {device}" for device, count in Counter(map(_device, jax.devices())).items()]
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not available
        lines += [f"no device: {error}"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
