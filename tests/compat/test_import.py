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
    import contextlib, importlib, pkgutil, signal, sys, types, warnings
    import flax, flax.linen, flax.nnx, flax.nnx.bridge, flax.training.dynamic_scale, optax
    import jax, jax.experimental.pallas, jax.experimental.custom_partitioning
    import jax.experimental.multihost_utils, jax.experimental.topologies, jax.extend.core, jax.numpy
    for package in (flax.core, flax.linen, flax.nnx):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if "test" not in module.name:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)

    def modules():
        return {n: m for n, m in sys.modules.items() if m and n.split(".")[0] in ("jax", "flax", "optax")}

    known = modules()

    def look():
        found = {}
        for name, module in known.items():
            for key, value in list(vars(module).items()):
                found[name, key] = value
                # Registries, and rules by primitive or by type.
                if isinstance(value, dict) and not key.startswith("__"):
                    found.update({(name, key, k): v for k, v in list(value.items())})
                elif isinstance(value, (list, set)) and not key.startswith("__"):
                    found[name, key, "members"] = tuple(map(id, value))
                # Methods and attributes of classes.
                elif isinstance(value, type) and value.__module__.split(".")[0] in ("jax", "flax"):
                    found.update({(name, key, k): v for k, v in list(vars(value).items())})
        for number in signal.valid_signals():
            found["signal", number] = signal.getsignal(number)
        found["sys"] = sys.excepthook, sys.unraisablehook, sys.displayhook, sys.exit, sys.breakpointhook
        found["warnings"] = tuple(warnings.filters), warnings.showwarning, warnings.warn
        found["config"] = dict(jax.config.values)
        found["path"] = tuple(sys.path), tuple(map(id, sys.meta_path)), tuple(map(id, sys.path_hooks))
        return found

    before = look()
    import fp8flax, fp8flax.nnx
    after = look()

    def ours(value):
        name = getattr(value, "__module__", None) or ""
        return str(name).startswith("fp8flax") or str(value).startswith("fp8") or "fp8flax" in repr(value)

    def may_change(key):
        # Caches; and Flax rewrites the fields of a class that has subclasses.
        kinds = "cache", "_counter", "__warningregistry__", "__dataclass_fields__"
        return any(kind in str(part).lower() for part in key for kind in kinds)

    changed = [
        key for key, value in before.items()
        if after.get(key) is not value and after.get(key) != value and not may_change(key)
    ]
    new = [
        key for key in after.keys() - before.keys()
        if len(key) == 3 and not ours(key[2]) and not ours(getattr(key[2], "name", ""))
        and not may_change(key)
    ]
    print("changed:", *sorted(map(str, changed)), sep="\\n")
    print("new:", *sorted(map(str, new)), sep="\\n")
"""


def test_nothing_is_replaced():
    """All functions, classes, rules and registries of JAX and Flax stay; new ones are for our own types."""
    assert run(UNCHANGED) == ["changed:", "new:"]


MAPPED = """
    import flax.linen as nn, jax, jax.numpy as jnp
    from flax.linen.fp8_ops import Fp8DotGeneralOp

    def seen(groups):
        print(sorted(groups))
        return groups

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.map_variables(nn.Dense, True, seen, seen, init=self.is_initializing())
            return layer(4, dot_general_cls=Fp8DotGeneralOp)(x)

    model, x = Model(), jnp.ones((2, 8))
    variables = model.init(jax.random.key(0), x)
    model.apply(variables, x)
"""


def test_map_variables_maps_the_state_of_flax():
    assert run(f"import fp8flax\n{textwrap.dedent(MAPPED)}") == run(MAPPED)


CONVERTED = """
    import flax.core.lift as lift, flax.linen as nn, jax, jax.numpy as jnp, threading
    import fp8flax as fp8
    from jax import lax
    from jax._src.interpreters import ad

    def rules():
        return [lift.pack, ad.fancy_transposes[lax.slice_p]]

    before, during = rules(), []

    class Model(nn.Module):
        raises: bool = False

        @nn.compact
        def __call__(self, x):
            during.append(rules())
            if self.raises:
                raise ZeroDivisionError
            return nn.Dense(4)(x)

    model8, x = fp8.quantize_model(Model(), include=".*"), jnp.ones((2, 8))
    variables = model8.init(jax.random.key(0), x)
    fp8.grad(lambda v: jnp.sum(model8.apply(v, x)))(variables)
    for function in (model8.clone(raises=True).apply, fp8.grad(model8.clone(raises=True).apply)):
        try:
            function(variables, x)
        except ZeroDivisionError:
            print("raised", rules() == before)
    in_gradient = during[1]
    print([a is b for a, b in zip(in_gradient, before)])
"""


def test_rules_are_replaced_only_while_a_gradient_runs():
    assert run(CONVERTED) == ["raised True", "raised True", "[True, False]"]


BRIDGE = """
    from flax import nnx
    from flax.nnx.bridge import variables as bridge

    {first}
    import fp8flax.nnx as fp8nnx
    kind = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    print(kind is fp8nnx.OverwriteWithGradient, kind.__name__)
    found = bridge.nnx_attrs_to_linen_vars({{"w": kind(1.0)}})
    print(sorted(found))
    state = nnx.state(fp8nnx.Fp8DotGeneralOp(), fp8nnx.OverwriteWithGradient)
    print(len(state.flat_state()), sorted(bridge.nnx_attrs_to_linen_vars(dict(state))))
    {last}
"""
REGISTER = """before = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)"""
USE = """print(sorted(bridge.nnx_attrs_to_linen_vars({"w": before(1.0)})))"""


@pytest.mark.parametrize("is_first", [False, True], ids=["after", "before"])
def test_the_registered_type_of_the_state_is_used(is_first):
    code = textwrap.dedent(BRIDGE).format(first=REGISTER if is_first else "", last=USE if is_first else "")
    name = "['_overwrite_with_gradient']"
    assert run(code) == ["True _overwrite_with_gradient", name, f"6 {name}", *[name] * is_first]
