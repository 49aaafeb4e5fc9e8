"""A GPU that is not there: the plugin compiles what JAX compiles, and JAX 0.12 says why it cannot."""

import dataclasses
import gc
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._audit import compiling
from fp8flax._compat import plugin_compiler, stablehlo_version
from fp8flax._compat.stablehlo_version import StableHloTooOldError
from tests.audit import test_whole_step as whole_step
from tests.cases import RECIPES, cells, dense_step, struct
from tests.gpus import gpus

pytestmark = pytest.mark.usefixtures("gpu")
# The package has HloModule there only; and before, JAX compiles FP8 algorithms itself.
from_0_10 = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="jaxlib has no HloModule")

PRESET = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
CODES = struct(64, 64, dtype=jnp.float8_e4m3fn)


def product(a, b):
    dims = (((1,), (0,)), ((), ()))
    return lax.dot_general(a, b, dims, precision=PRESET, preferred_element_type=jnp.bfloat16)


def dense(recipe):
    return dense_step(512, 256, 384, partial(fp8.Fp8DotGeneralOp, recipe=RECIPES[recipe]))


def sharded_dense():
    step, variables, *tensors = dense("delayed")
    rows = NamedSharding(gpus(), P("data"))
    return step, variables, *(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for x in tensors)


def llama_step():
    op = fp8.Fp8DotGeneralOp
    model, x = nn.Sequential([whole_step.Layer(op), whole_step.Layer(op)]), struct(8192, 4096)
    step = whole_step.step_of(lambda state, variables, x: state.apply_fn(variables, x))
    return step, whole_step.state_of(model, x), x


def frozen_model():
    x = struct(64, 256)
    model = nn.Sequential([nn.Dense(512, dot_general_cls=fp8.Fp8DotGeneralOp), nn.relu, nn.Dense(256)])
    variables = jax.tree.map(
        lambda leaf: jnp.ones(leaf.shape, leaf.dtype), jax.eval_shape(model.init, jax.random.key(0), x)
    )
    serve, served = fp8.freeze(model, variables, x)
    return serve.apply, served, x


def refuse_to_compile(monkeypatch):
    """Lets JAX refuse to compile, as JAX 0.12 does, so that ``audit`` uses the plugin."""

    def refuse(*args, **kwargs):
        raise StableHloTooOldError

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)


def both_ways(monkeypatch, program, target):
    """Returns the reports of a program that JAX compiled and that the plugin compiled."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        step, *args = program()
        by_jax = fp8.audit(step, *args, target=target)

        refuse_to_compile(monkeypatch)
        by_plugin = fp8.audit(step, *args, target=target)
    if by_jax.compiled_by == "XLA's plugin":
        pytest.skip("this JAX compiles no FP8 algorithm for a GPU that is not there")
    assert by_jax.compiled_by == "JAX"
    assert by_plugin.compiled_by == "XLA's plugin"
    return by_jax, by_plugin


PROGRAMS = {
    "delayed, H200": (partial(dense, "delayed"), "h200"),
    "block128, H200": (partial(dense, "block128"), "h200"),
    "block128, B200": (partial(dense, "block128"), "b200"),
    "mxfp8, B200": (partial(dense, "mxfp8"), "b200"),
    "XLA's own kernels, whose PTX is read": (
        lambda: dense_step(
            512, 256, 384, partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(accumulation=DEFAULT))
        ),
        "h200",
    ),
    "a frozen model": (frozen_model, "h200"),
    "eight devices": (sharded_dense, None),
    "a Llama's step": (llama_step, "h200"),
}
DEFAULT = fp8.Accumulation(forward="default", dgrad="default", wgrad="default")


@from_0_10
@pytest.mark.long
@pytest.mark.parametrize("name", cells(PROGRAMS, repeated=["a Llama's step"]))
def test_the_plugin_compiles_what_jax_compiles(name, monkeypatch):
    program, target = PROGRAMS[name]
    by_jax, by_plugin = both_ways(monkeypatch, program, target or gpus())
    assert by_jax.num_gemms > 0
    assert dataclasses.replace(by_plugin, compiled_by="JAX") == by_jax


@pytest.mark.oldest
def test_fp8_algorithms_are_compiled_on_every_jax():
    """JAX 0.12 writes ``jnp.cumsum`` for GPUs as an operation that is not in StableHLO."""
    report = fp8.audit(lambda *codes: (product(*codes), jnp.cumsum(jnp.arange(64))), CODES, CODES)
    (gemm,) = report.gemms
    assert [gemm.is_fp8, gemm.backend, gemm.accumulation] == [True, "cublasLt", "fast"]
    assert ("Compiled by XLA's plugin: without" in str(report)) == (report.compiled_by != "JAX")


@from_0_10
@pytest.mark.oldest
def test_a_program_is_compiled_once(monkeypatch):
    """``assert_fp8`` after ``audit`` needs no second compilation, as where JAX compiles."""

    def again(a, b):
        return product(a, b)

    plugin, used = plugin_compiler._Plugin, []
    monkeypatch.setattr(plugin_compiler, "_Plugin", lambda: used.append(plugin()) or used[-1])
    refuse_to_compile(monkeypatch)
    gc.collect()
    before = len(plugin_compiler._compiled)
    report = fp8.audit(again, CODES, CODES)
    assert report.compiled_by == "XLA's plugin"
    assert fp8.assert_fp8(again, CODES, CODES) == report
    assert len(used) == 1
    assert len(plugin_compiler._compiled) == before + 1
    del again
    gc.collect()
    assert len(plugin_compiler._compiled) == before


@pytest.mark.oldest
def test_a_function_of_nnx_jit_is_compiled():
    """Flax wraps the lowered program of JAX."""
    model = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0), dot_general=fp8nnx.Fp8DotGeneralOp())
    assert fp8.audit(nnx.jit(lambda model, x: model(x)), model, jnp.ones((64, 64))).num_fp8_gemms == 1


@pytest.mark.oldest
def test_compiling_ahead_of_time_says_what_to_do():
    """Other programs than the audit compile for a GPU that is not there, too, such as a launcher."""
    sharding = compiling.find_target("h200").sharding
    step = jax.jit(product, in_shardings=sharding, out_shardings=sharding)
    lowered = step.trace(CODES, CODES).lower(lowering_platforms=("cuda",))
    if fp8.audit(product, CODES, CODES).compiled_by == "JAX":
        lowered.compile()
    else:
        with pytest.raises(StableHloTooOldError, match=r"use fp8flax\.audit.*install jax<0\.12"):
            lowered.compile()


def test_other_errors_of_xla_stay_what_they_are():
    raised = stablehlo_version.explain
    assert raised(ValueError("Failed to serialize StableHLO; failed to legalize vhlo.dot_general_v2"))
    assert raised(ValueError("Failed to serialize StableHLO; failed to legalize vhlo.add_v1")) is None
    assert raised(ValueError("RESOURCE_EXHAUSTED: dot_general")) is None


@from_0_10
@pytest.mark.oldest
def test_an_error_of_the_plugin_is_raised():
    plugin = plugin_compiler._Plugin()
    with pytest.raises(RuntimeError, match="target_config"), plugin.topology("nonsense", 1):
        pass
    config = plugin_compiler.target_config_of(fp8.compile_only_devices("h200")[0])
    with (
        plugin.topology(config, 1) as topology,
        pytest.raises(RuntimeError, match="(?i)mlir|bytecode|parse"),
        plugin.executable(topology, b"nonsense", b""),
    ):
        pass


def test_another_api_is_not_called(monkeypatch):
    monkeypatch.setitem(plugin_compiler._FUNCTIONS, "PJRT_Later", 10_000)
    with pytest.raises(RuntimeError, match="cannot use this CUDA plugin"):
        plugin_compiler._Plugin()


def test_another_format_is_not_read():
    assert plugin_compiler._first_field(b"\x0a\x82\x01" + b"x" * 130 + b"more") == b"x" * 130
    with pytest.raises(RuntimeError, match="cannot read the optimized program"):
        plugin_compiler._first_field(b"\x12\x00")


@pytest.mark.oldest
@pytest.mark.parametrize("recipe", cells(["mxfp8", "block128"], repeated=["block128"]))
def test_block_scales_are_not_judged_where_cudnn_is_not_known(recipe, monkeypatch):
    """XLA then expands a block-scaled matmul to one in bfloat16, which no GPU with cuDNN would run."""
    step, *args = dense(recipe)
    assert fp8.audit(step, *args, target="b200").fp8_flops_share == 1
    lines = compiling._TARGET_CONFIG.splitlines()
    config = "\n".join(line for line in lines if "dnn_version" not in line)
    monkeypatch.setattr(compiling, "_TARGET_CONFIG", config)
    mesh = jax.sharding.Mesh(np.array(fp8.compile_only_devices("b200")), ("data",))
    with pytest.raises(RuntimeError, match="does not know the version of cuDNN"):
        fp8.audit(step, *args, target=mesh)
    step, *args = dense("delayed")
    assert fp8.audit(step, *args, target=mesh).fp8_flops_share == 1
