"""Tests, in folders like those of the package; this folder has the code that they share."""

import importlib.metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEW_OPTIMIZATIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Later versions do not have the option. JAX is not imported before conftest.py has set its environment.
if importlib.metadata.version("jax").startswith("0.10."):
    FEW_OPTIMIZATIONS["xla_cpu_use_fusion_emitters"] = False
"""Options with which XLA compiles for CPUs in a third of the time."""


FEW_OPTIMIZATIONS_OF_MACHINE_CODE = {"xla_gpu_disable_gpuasm_optimizations": True}
"""The option with which ptxas compiles for GPUs in less time."""


def xla_flags(options):
    """Returns the environment of a process in which XLA has the given options."""
    return {"XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())}
