"""An import of the package changes nothing of JAX, Flax and Python; each test runs in a fresh process."""

import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.newest


def run(code):
    """Runs code in a fresh process, and returns the lines that it prints."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


UNCHANGED = """
    import contextlib, importlib, pkgutil, signal, sys, warnings
    import flax, flax.linen, flax.nnx, flax.nnx.bridge, flax.training.dynamic_scale, optax
    import jax, jax.experimental.pallas, jax.experimental.custom_partitioning
    import jax.experimental.multihost_utils, jax.experimental.topologies, jax.extend.core
    for package in (flax.core, flax.linen, flax.nnx):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if "test" not in module.name:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)

    known = {n: m for n, m in sys.modules.items() if m and n.split(".")[0] in ("jax", "flax", "optax")}

    def look():
        found = {("signal", n): signal.getsignal(n) for n in signal.valid_signals()}
        found["sys"] = sys.excepthook, sys.unraisablehook, sys.displayhook, tuple(sys.path)
        found["imports"] = tuple(map(id, (*sys.meta_path, *sys.path_hooks)))
        found["warnings"] = tuple(warnings.filters), warnings.showwarning, warnings.warn
        found["config"] = dict(jax.config.values)
        for name, module in known.items():
            for key, value in list(vars(module).items()):
                found[name, key] = value
                if key.startswith("__"):
                    continue
                # Registries, and rules by primitive or by type; methods and attributes of classes.
                if isinstance(value, (list, set)):
                    found[name, key, "members"] = tuple(map(id, value))
                elif isinstance(value, type) and value.__module__.split(".")[0] in ("jax", "flax"):
                    found.update({(name, key, k): v for k, v in list(vars(value).items())})
                elif isinstance(value, dict):
                    found.update({(name, key, k): v for k, v in list(value.items())})
        return found

    before = look()
    import fp8flax, fp8flax.nnx
    after = look()

    def may_change(key):
        # Caches; Flax rewrites the fields of a class that has subclasses; further modules; our own types.
        kinds = "cache", "_counter", "__warningregistry__", "__dataclass_fields__"
        ours = "fp8" in repr(key[-1]) or "fp8flax" in str(getattr(key[-1], "__module__", ""))
        is_module = key not in before and len(key) == 2
        return ours or is_module or any(kind in str(part).lower() for part in key for kind in kinds)

    for key in {*before, *after}:
        was, now = before.get(key), after.get(key)
        if was is not now and was != now and not may_change(key):
            print(key)
"""


def test_nothing_is_replaced():
    """All functions, classes, rules and registries of JAX and Flax stay; new ones are for our own types."""
    assert run(UNCHANGED) == []


BRIDGE = """
    from flax import nnx
    from flax.nnx.bridge import variables as bridge

    before = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    import fp8flax.nnx as fp8nnx
    kind = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    print(before is kind is fp8nnx.OverwriteWithGradient)
    print(sorted(bridge.nnx_attrs_to_linen_vars({"w": kind(1.0)})))
    state = nnx.state(fp8nnx.Fp8DotGeneralOp(), fp8nnx.OverwriteWithGradient)
    print(len(state.flat_state()), sorted(bridge.nnx_attrs_to_linen_vars(dict(state))))
"""


def test_a_type_that_was_registered_before_is_the_type_of_the_state():
    name = "['_overwrite_with_gradient']"
    assert run(BRIDGE) == ["True", name, f"6 {name}"]
