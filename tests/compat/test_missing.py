"""Each private part of JAX and Flax is taken away: what then raises an error, and what works without it."""

import importlib.util
import subprocess
import sys
import types

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._compat import (
    flax_pack,
    flax_scopes,
    jaxprs,
    name_scopes,
    report_primitive,
    traces,
)
from fp8flax._compat.missing import MissingPart
from tests.cases import OWG, normal, variables_of

# By file: the module and the name in it that are taken away, and a use.
PARTS = {
    "jaxprs": ("jax.extend.core", "ClosedJaxpr", lambda file: file.programs_in({})),
    "name_scopes": ("jax._src.source_info_util", "user_context", lambda file: file.current()),
    "traces": ("jax._src.core", "eval_jaxpr", lambda file: file.current_watcher()),
    "report_primitive": ("jax.interpreters.ad", "primitive_jvps", lambda file: file.with_report(1, [], 0)),
    "flax_pack": ("flax.core.lift", "pack", lambda file: file.check_pack()),
}


def fresh_copy(file):
    """Runs a file of ``_compat`` once more, as in a process that imports the package."""
    spec = importlib.util.find_spec(f"fp8flax._compat.{file}")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def take_away(monkeypatch, module, name, whole):
    if not whole:
        monkeypatch.delattr(sys.modules[module], name)
        return
    parent, _, last = module.rpartition(".")
    monkeypatch.delattr(sys.modules[parent], last)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("whole", [False, True], ids=["name", "module"])
@pytest.mark.parametrize("file", PARTS)
@pytest.mark.oldest
def test_a_file_without_its_part_can_be_imported(file, whole, monkeypatch):
    module, name, use = PARTS[file]
    with monkeypatch.context() as context:
        take_away(context, module, name, whole)
        copy = fresh_copy(file)
    with pytest.raises(RuntimeError, match=rf"fp8flax\.\w+.* needs .*, which JAX {jax.__version__} "):
        use(copy)


def test_a_missing_part_can_be_looked_at():
    part = MissingPart("a part", "A feature")
    assert not hasattr(part, "__wrapped__")
    for use in (part, lambda: part.anything):
        with pytest.raises(RuntimeError, match="A feature needs a part, which JAX .* does not have"):
            use()


MODEL, X = nn.Sequential([nn.Dense(8)]), normal(0, 4, 16)
BY_HAND = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)


def loss(variables):
    return jnp.mean(BY_HAND.apply(variables, X))


def convert():
    return jax.eval_shape(fp8.quantize_model(MODEL, include=".*").init, jax.random.key(0), X)


def measure():
    return fp8.statistics(loss)(variables_of(BY_HAND, X))


def freeze_nnx():
    op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
    return fp8nnx.freeze(nnx.Linear(16, 8, dot_general=op, rngs=nnx.Rngs(0)), X)


@pytest.mark.parametrize(
    ("file", "attribute", "raises", "works"),
    [
        (jaxprs, "core", [convert, measure, freeze_nnx], []),
        (name_scopes, "source_info_util", [convert, measure], [freeze_nnx]),
        (traces, "core", [convert], [measure, freeze_nnx]),
        (report_primitive, "_report_p", [measure], [convert, freeze_nnx]),
        (flax_pack, "_flax_pack", [convert], [measure, freeze_nnx]),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if isinstance(value, types.ModuleType) else "",
)
def test_what_needs_a_part(file, attribute, raises, works, monkeypatch):
    monkeypatch.setattr(file, attribute, MissingPart("a part", "fp8flax.this"))
    message = rf"fp8flax\.this needs a part, which JAX {jax.__version__} "
    for feature in raises:
        with pytest.raises(RuntimeError, match=message):
            feature()
    for feature in works:
        feature()
    jax.eval_shape(fp8.grad(loss), variables_of(BY_HAND, X))  # as ops and training always do


def test_without_a_way_around_methods(monkeypatch):
    monkeypatch.delattr(nn.Module, "_call_wrapped_method")
    with pytest.raises(RuntimeError, match=r"quantize_model needs nn\.Module\._call_wrapped_method"):
        fp8.quantize_model(MODEL)


def test_a_transformation_that_hides_its_axes():
    packing = flax_pack.Packing(lambda: None, ["params"], ["params"])
    with pytest.raises(RuntimeError, match="quantize_model needs variable_in_axes in flax.core.lift.scan"):
        flax_pack.axis_of("params", packing)


def test_variables_of_a_scope_that_hides_them():
    scope = flax.core.Scope({"params": {"a": X}})
    hides = types.SimpleNamespace(variables=scope.variables)
    assert flax_scopes.variables_of(hides)["params"]["a"] is flax_scopes.variables_of(scope)["params"]["a"]


WITHOUT_PARTS = """
import jax, jax.extend.core, flax.core.lift, flax.linen as nn
from jax._src import core, source_info_util

taken = [(core, "eval_jaxpr"), (source_info_util, "user_context"), (flax.core.lift, "pack")]
taken += [(jax.extend.core, "ClosedJaxpr"), (nn.Module, "_call_wrapped_method")]
parts = [(where, name, getattr(where, name)) for where, name in taken]
for where, name in taken:
    delattr(where, name)
import fp8flax as fp8
for part in parts:
    setattr(*part)

import jax.numpy as jnp
layer, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
variables = layer.init(jax.random.key(0), x)
loss = lambda v: jnp.sum(layer.apply(v, x))
state = fp8.grad(loss)(variables)[fp8.OVERWRITE_WITH_GRADIENT]
print(state["Fp8DotGeneralOp_0"]["input_amax_history"][0])
for feature in (
    lambda: fp8.quantize_model(nn.Dense(4), include=".*").init(jax.random.key(0), x),
    lambda: fp8.statistics(loss)(variables),
):
    try:
        feature()
    except RuntimeError as error:
        print("fp8flax" in str(error) and jax.__version__ in str(error))
"""

IN_WEIGHT_NORM = f"""
import flax.linen as nn, jax, jax.numpy as jnp
import fp8flax as fp8

class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.WeightNorm(nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp, name="layer"))(x)

model, x = Normed(), 3 * jnp.ones((2, 8))
variables = model.init(jax.random.key(0), x)
state = fp8.grad(lambda v: jnp.sum(model.apply(v, x)))(variables)[{OWG!r}]
print(state["layer"]["Fp8DotGeneralOp_0"]["input_amax_history"][0])
"""


def run(code):
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")


@pytest.mark.long
def test_the_package_without_parts_in_a_fresh_process():
    assert run(WITHOUT_PARTS) == ["1.0", "True", "True", ""]


@pytest.mark.long
def test_an_op_by_hand_in_weight_norm_in_a_fresh_process():
    """The patch of Flax is there without any conversion: the state is not normalized, and it merges."""
    assert run(IN_WEIGHT_NORM) == ["3.0", ""]
