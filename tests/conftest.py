"""Every test runs on the CPU, under strict dtype promotion and without implicit rank promotion.

Internals: ``jax._src.compiler``, for options of the compiler that no configuration of JAX sets;
``jax._src.lru_cache``, JAX's cache of compiled programs in files, which several processes share here.
"""

import gc
import importlib.metadata
import os
import tempfile
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The workers keep every core busy, so to split a program into threads costs an eighth of the time.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_parallel_codegen_split_count=1"
# Most of the time goes into compiling, and many tests compile the same programs: one cache for all workers,
# which inherit it, as do the processes that their tests start.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="fp8flax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest
from jax._src import compiler, lru_cache

from tests import FEW_OPTIMIZATIONS, FEW_OPTIMIZATIONS_OF_MACHINE_CODE, what_works

# Programs hold many cycles that live as long as JAX's caches. Frequent searches for them take time.
gc.set_threshold(100_000, 20, 50)
# No test reads the source locations in programs, and recording them takes time.
jax.config.update("jax_traceback_in_locations_limit", 1)

# The tests of sharding use eight devices; all others use the first.
jax.config.update("jax_num_cpu_devices", 8)


def _put(self, key, value):
    """Writes an entry of the cache atomically; another process could read JAX's own half written."""
    path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
    with tempfile.NamedTemporaryFile(dir=self.path, delete=False) as file:
        file.write(value)
    os.replace(file.name, path)


lru_cache.LRUCache.put = _put


@pytest.fixture(autouse=True)
def _strict_jax():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def promotion_of_users():
    """Mixes dtypes and ranks, as Optax, Flax's ``DynamicScale`` and layers in float16 do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


FEW = True


def _compile_options(*args, backend=None, **kwargs):
    """Lets XLA compile for CPUs in a third of the time.

    XLA optimizes programs for GPUs as for users. Only ptxas, which generates machine code, does less.
    """
    options = get_compile_options(*args, backend=backend, **kwargs)
    if FEW and backend is not None:
        few = FEW_OPTIMIZATIONS if backend.platform == "cpu" else FEW_OPTIMIZATIONS_OF_MACHINE_CODE
        options.env_option_overrides = [*options.env_option_overrides, *few.items()]
    return options


get_compile_options, compiler.get_compile_options = compiler.get_compile_options, _compile_options


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Saves time with fewer optimizations; tests marked ``optimized`` and all cells have all."""
    global FEW
    all_cells = item.config.getoption("--all-cells")
    FEW = not (all_cells or item.get_closest_marker("optimized"))
    if item.get_closest_marker("all_cells") and not all_cells:
        pytest.skip("only with --all-cells")
    if item.get_closest_marker("long") and not (all_cells or item.config.getoption("--long")):
        pytest.skip("only with --long (make test-long)")


@pytest.fixture(scope="session")
def gpu():
    """Skips the test if the compiler for GPUs is not installed; if it is installed, it must work."""
    try:
        importlib.metadata.version("jax-cuda13-plugin")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the compiler for GPUs is not installed: pip install 'fp8flax[audit]'")


def pytest_addoption(parser):
    group = parser.getgroup("what works with what")
    group.addoption("--all-cells", action="store_true", help="also what is left out in CI for its time")
    group.addoption("--long", action="store_true", help="also tests that take 2 seconds or more each")
    group.addoption("--write-table", action="store_true", help="write what was seen to docs/what_works.md")


# A script that needs torch.
collect_ignore = ["serve/write_files.py"]

CELLS = []


def pytest_runtest_logreport(report):
    """Collects the cells that the tests have seen, in the process that writes the table."""
    if report.when == "call" and report.passed:
        for key, value in report.user_properties:
            if key == "cell":
                CELLS.append(value)


def pytest_sessionfinish(session):
    """Writes the table if all tests passed, because a cell stands for several tests."""
    is_worker = hasattr(session.config, "workerinput")
    if session.config.getoption("--write-table") and not is_worker and not session.testsfailed:
        what_works.write(CELLS)


@pytest.fixture
def stacking(monkeypatch):
    """Stacks the arrays of states, as programs for GPUs do. Programs for CPUs compute each by itself."""
    from fp8flax._core.state import stacking

    stacking_lax = SimpleNamespace(**vars(jax.lax))
    stacking_lax.platform_dependent = lambda *args, cpu, default: default(*args)
    monkeypatch.setattr(stacking, "lax", stacking_lax)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def small_heap():
    """Excludes existing objects from garbage collection: a check for leaks collects dozens of times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def cell(record_property, request):
    """Returns a function that a test calls at its end, with the row, the column and what it has seen."""

    def saw(table, row, column, text="yes"):
        record_property("cell", (table, row, column, text))
        if not request.config.getoption("--write-table"):
            assert what_works.read(table, row, column) == text

    return saw
