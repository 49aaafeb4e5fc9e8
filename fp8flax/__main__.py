"""Says what a bug report needs: ``python -m fp8flax`` prints versions, devices and extras."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from typing import Any

import jax

import fp8flax
from fp8flax._core.device import NATIVE_FP8, NATIVE_MX, has_fp8_units

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUMERIC_RANK_PROMOTION", "JAX_ENABLE_X64")


def environment() -> str:
    """Returns the versions, the devices with what they multiply in FP8, and the extras, as lines."""
    return "\n".join(
        [
            f"fp8flax {fp8flax.__version__}, Python {platform.python_version()} on {platform.platform()}",
            ", ".join(f"{name} {_version(name) or 'not installed'}" for name in _PACKAGES),
            *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
            "",
            "devices:",
            *(f"  {line}" for line in _devices()),
            "",
            "extras:",
            *(f"  {line}" for line in _extras()),
        ]
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # a platform that was asked for is not there
        return [f"none: {error}"]
    kinds = Counter(f"{device.device_kind} ({device.platform}): {multiplies(device)}" for device in devices)
    return [f"{count} × {kind}" for kind, count in kinds.items()]


def multiplies(device: Any) -> str:
    """Returns what a device multiplies in FP8, in words."""
    if not has_fp8_units(device):
        why = "" if device.platform == "cpu" else f", which begins with compute capability {NATIVE_FP8}"
        return f"no FP8{why}; the same values are emulated"
    version = str(getattr(device, "compute_capability", ""))
    if not re.fullmatch(r"\d+\.\d+", version):
        return "FP8 as its compiler has it, of which fp8flax knows nothing"
    if float(version) < NATIVE_MX:
        return f"FP8 with scales per tensor or row (compute capability {version})"
    return f"FP8 with scales per tensor or row, and per 32 columns (compute capability {version})"


def _extras() -> list[str]:
    try:
        requirements = importlib.metadata.requires("fp8flax") or []
    except importlib.metadata.PackageNotFoundError:
        return ["not known: fp8flax runs from its source and is not installed (pip install -e .)"]
    needs: dict[str, list[str]] = {}
    for requirement in requirements:
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        if found is not None and found[1] != "fp8flax":
            needs.setdefault(found[2], []).append(found[1])
    lines = []
    for extra, names in sorted(needs.items()):
        missing = [name for name in names if _version(name) is None]
        lines.append(f"{extra}: {'installed' if not missing else 'without ' + ', '.join(missing)}")
    return lines


if __name__ == "__main__":
    sys.stdout.write(environment() + "\n")
