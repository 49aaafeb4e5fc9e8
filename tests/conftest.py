"""Every test runs on the CPU, under strict dtype promotion and without implicit rank promotion."""

import importlib.metadata
import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before JAX 0.10 the CUDA plugin, which the audit compiles with, looks for a GPU's libraries without this.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
# The workers keep every core busy: splitting a program for more threads only costs (an eighth of the time).
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
# Most of the time goes into compiling, and many tests compile the same programs. A cache for each
# worker (JAX's cache has no locks), inherited by the processes that its tests start.
_CACHE = tempfile.TemporaryDirectory(prefix="fp8flax-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def _strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def gpu():
    """Skips where the compiler for GPUs is not installed; where it is, it must work."""
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the compiler for GPUs is not installed: pip install 'fp8flax[audit]'")
