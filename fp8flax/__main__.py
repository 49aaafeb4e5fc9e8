"""The command line: ``fp8flax`` or ``python -m fp8flax``, alone or with ``demo``.

Without a command it prints versions, devices and extras for a bug report.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

import fp8flax
from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, has_fp8_units
from fp8flax._host.interrupt import leave, raise_from_now_on

_USAGE = """\
usage: fp8flax                 print versions, devices and extras, for a bug report
       fp8flax demo ...        train a small model in bf16 and in FP8 (fp8flax demo --help)
"""
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda13-plugin", "jax-cuda13-pjrt")
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUMERIC_RANK_PROMOTION", "JAX_ENABLE_X64")


def environment() -> str:
    """Returns the versions, the devices with their FP8 support, and the extras, as lines of text."""
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
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not available
        return [f"none: {error}"]
    kinds = Counter(f"{device.device_kind} ({device.platform}): {multiplies(device)}" for device in devices)
    return [f"{count} × {kind}" for kind, count in kinds.items()]


def multiplies(device: Any) -> str:
    """Returns a description of the FP8 matmuls that a device supports."""
    if not has_fp8_units(device):
        why = "" if device.platform == "cpu" else f", which begins with compute capability {NATIVE_FP8}"
        return f"no FP8{why}; the same values are emulated"
    version = str(getattr(device, "compute_capability", ""))
    if not re.fullmatch(r"\d+\.\d+", version):
        return "FP8 in the way of its own compiler, which fp8flax does not know"
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or [""]
    if command == "demo":
        from fp8flax.demo.__main__ import main as demo

        return demo(rest)
    raise_from_now_on()
    if command in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        return 0
    if command:
        sys.stderr.write(f"fp8flax: there is no command {command!r}\n{_USAGE}")
        return 2
    sys.stdout.write(environment() + "\n")
    return 0


def command() -> NoReturn:
    """Runs the command line and ends the process: the entry point of the console script."""
    leave(main())


if __name__ == "__main__":
    command()
