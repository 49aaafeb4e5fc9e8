"""FP8 adds few kernels, bytes and memory to a whole training step that XLA compiles for an H200."""

import re
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import fp8flax as fp8
from benchmarks import llama
from fp8flax._audit.compiling import compile_for, find_target
from fp8flax._audit.gemms import gemms_of
from fp8flax._audit.program import bytes_moved, has_codes, parse
from tests.cases import struct

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("gpu", "promotion_of_users")]

MIB = 2**20


def compiled(step, *args):
    """Returns a program compiled for an H200: its text, its kernels, and its temporary bytes."""
    program, _ = compile_for(find_target("h200"), step, args)
    text = program.as_text()
    return text, parse(text).kernels, program.memory_analysis().temp_size_in_bytes


def figures_of_llama(how):
    """Returns the kernels of a step of 2 layers, the MiB that they move beside GEMMs, and temporary MiB."""
    step, initial, x = llama.training_step(how, 4096)
    _, found, temporary = compiled(step, jax.eval_shape(initial), x)
    for gemm in (gemm for kernel in found for gemm in gemms_of(kernel)):
        assert (gemm.backend == "cublasLt" and gemm.lhs_dtype.startswith("float8")) == (how != "bf16")
    others = [kernel for kernel in found if not list(gemms_of(kernel))]
    return len(found), sum(map(bytes_moved, others)) // MIB, temporary // MIB


@pytest.mark.newest
def test_of_a_llama():
    wide, delayed = map(figures_of_llama, ("bf16", "delayed"))
    # Each of 14 layers adds five kernels: casts, transposes, and merges of amaxes. The states of all layers
    # are entered and left in 9, and the program shows that they need no check.
    assert delayed[0] - wide[0] <= 14 * 5 + 9
    # JAX 0.12 moves 832 MiB less for the norms of the model in bfloat16. The FP8 programs move as much as
    # before.
    in_bf16 = wide[1] + (832 if jax.__version_info__ >= (0, 12) else 0)
    assert delayed[1] <= 1.105 * in_bf16
    assert delayed[2] <= 0.93 * wide[2]


def test_of_a_llama_with_scales_per_axis():
    """One pass casts a tensor for both GEMMs, and AdamW needs no float32 copy of a kernel."""
    step, initial, x = llama.training_step("axiswise", 4096)
    _, found, temporary = compiled(step, jax.eval_shape(initial), x)
    others = [kernel for kernel in found if not list(gemms_of(kernel))]
    assert not [k for k in others if k.opcode == "copy" and k.result.bytes >= MIB]
    assert sum(map(bytes_moved, others)) <= 34_100 * MIB  # 38,844 if XLA casts for each GEMM by itself
    # AdamW, which moves most bytes of a step, does not run at the rate of kernels that write codes.
    assert (
        sum(bytes_moved(kernel) for kernel in others if has_codes(kernel)) <= 7600 * MIB
    )  # otherwise 19,586
    assert temporary <= 3000 * MIB  # 3,280 in bf16


def test_of_a_llama_with_scales_per_block():
    """Our GPU kernel reads the float32 kernels, so that XLA casts none of them to bfloat16."""
    step, start, x = llama.training_step("block128", 4096)
    _, found, _ = compiled(step, jax.eval_shape(start), x)
    others = [kernel for kernel in found if not list(gemms_of(kernel))]
    assert len(others) <= 92
    assert sum(map(bytes_moved, others)) <= 27_750 * MIB  # 29,588 if XLA casts the kernels


def test_of_a_llama_in_nvfp4():
    step, start, x = llama.training_step("nvfp4", 4096)
    _, found, _ = compiled(step, jax.eval_shape(start), x)
    assert len(found) <= 620  # 649 if kernels of their own prepare the scales of each product


def initial(model, x):
    variables = model.init(jax.random.key(0), x)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-4))


@partial(jax.jit, donate_argnums=0)
def step(state, x):
    def loss(variables):
        return jnp.mean(jnp.square(state.apply_fn(variables, x).astype(jnp.float32)))

    value, grads = fp8.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def test_the_states_of_all_layers_are_stored_by_a_few_kernels():
    """Each further layer adds 12 kernels, three of them GEMMs, and AdamW 2. No donated state is copied."""
    layer = partial(nn.Dense, 1024, dtype=jnp.bfloat16, use_bias=False, dot_general_cls=fp8.Fp8DotGeneralOp)
    x, models = struct(2048, 1024), [nn.Sequential([layer() for _ in range(n)]) for n in (2, 4)]
    two, four = (compiled(step, jax.eval_shape(partial(initial, model), x), x) for model in models)
    assert "f32[1024]" in four[0]
    assert not re.search(r"= f32\[1(024)?\]\S* copy\(", four[0])
    assert len(four[1]) - len(two[1]) <= 2 * 12  # 15 if each layer computes its own scales
