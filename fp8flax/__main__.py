"""``python -m fp8flax`` prints versions and devices, for a bug report."""

import importlib.metadata
import sys

import jax

import fp8flax
from fp8flax._core.gemm.gpus import NATIVE_FP8, compute_capability_of

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _device(device: jax.Device) -> str:
    has_units = compute_capability_of(device) >= NATIVE_FP8
    units = "multiplies FP8" if has_units else "no FP8 units; the same values are emulated"
    return f"{device.device_kind} ({device.platform}): {units}"


def main() -> None:
    """Prints one line for each thing that a bug report needs, and what JAX prints for one."""
    lines = [f"fp8flax {fp8flax.__version__}", *(f"{name}: {_version(name)}" for name in _PACKAGES)]
    try:
        lines += [*sorted(set(map(_device, jax.devices()))), jax.print_environment_info(return_string=True)]
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not available
        lines += [f"no device: {error}"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
