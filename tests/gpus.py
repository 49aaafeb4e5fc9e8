"""Programs for eight GPUs that are not present; run as a script, prints the result of ``seen_here``."""

import collections
import json
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._audit.compiling import compile_lowered, compiling_for, find_target
from fp8flax._audit.hlo import parse
from fp8flax._core.gemm import casts, gemm, ragged
from fp8flax._core.gemm.gpus import GPUS
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from tests.cases import RECIPES

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
KERNELS = {"data parallel": P(), "FSDP": P("data")}
CASES = ["delayed, FSDP", "block128, data parallel"]


def compiled_for_gpus(function, *args):
    """Returns a program compiled for a GPU that is not present."""
    lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",))
    return compile_lowered(find_target("h200"), lowered).as_text()


def run_branch_for_gpus(monkeypatch):
    """Makes GEMMs take here the branch of programs for GPUs. Other operations keep that of this CPU."""
    branching_lax = SimpleNamespace(**vars(jax.lax))
    branching_lax.platform_dependent = lambda *args, cuda, default: cuda(*args)
    for module in (casts, gemm, ragged):
        monkeypatch.setattr(module, "lax", branching_lax)


def gpus(target="h200"):
    devices = np.array(fp8.compile_only_devices(target, 8))
    return jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


def bytes_sent(program):
    """Returns the output bytes of collectives by kind, without those of single numbers."""
    total = collections.Counter()
    for computation in parse(program).computations.values():
        for instruction in computation.instructions.values():
            kind, results = instruction.opcode.removesuffix("-start"), instruction.results
            if instruction.opcode == "all-gather-start":  # it returns its operands, too
                results = results[len(results) // 2 :]
            if kind in COLLECTIVES:
                total[kind] += sum(array.bytes for array in results if array.dims)
    return dict(total)


def compiled_step(recipe, kernels):
    """Returns a compiled layer and its gradients for eight GPUs; ``kernels`` is the kernel's sharding."""
    on = gpus()
    op = None if recipe is None else partial(fp8.Fp8DotGeneralOp, recipe=recipe)
    model = nn.Dense(512, dot_general_cls=op, dtype=jnp.bfloat16, use_bias=False)
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    place = jax.tree.map(lambda leaf: NamedSharding(on, kernels if leaf.ndim == 2 else P()), variables)
    step = jax.jit(
        fp8.value_and_grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)),
        in_shardings=(place, NamedSharding(on, P("data"))),
        out_shardings=(NamedSharding(on, P()), place),
    )
    with compiling_for(GPUS["h200"]):
        return compiled_for_gpus(step, variables, x)


def seen_here():
    """Returns the bytes for each recipe and sharding, and whether our GPU kernel is in a program."""
    programs = {}
    for case in CASES:
        recipe, way = case.split(", ")
        programs[case] = compiled_step(RECIPES.get(recipe), KERNELS[way])
    return {
        name: {"kernel": BLOCK_GEMM_HOPPER in program, **bytes_sent(program)}
        for name, program in programs.items()
    }


if __name__ == "__main__":
    print(json.dumps({"devices": jax.device_count(), **seen_here()}))  # noqa: T201
