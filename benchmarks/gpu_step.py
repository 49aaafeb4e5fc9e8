"""Which GPU kernels take the time of a training step, in FP8 and in bf16?

Run ``python -m benchmarks.gpu_step`` with a Python whose JAX sees the GPU; it takes two to four minutes.
``--small`` runs tiny sizes on any device, to see that it runs.

Llama = the matmuls of two of a Llama's layers (width 4096, feed-forward 14336, an elementwise product in
the place of attention), a loss that is a mean of squares, and AdamW; 8192 rows; weights in float32,
computed in bfloat16. Dense = one nn.Dense 8192x4096x4096 in bfloat16, forward and backward.

step = seconds of a step, host included, the median of five rounds of 20 steps. kernels = what JAX's
profiler saw in four steps: launches per step and microseconds per step, by name, the longest 20.

times bf16 = the step in bf16 of the same run over this one. The GPU's clocks are as it keeps them; data are
Gaussian.
"""

from __future__ import annotations

import argparse
import glob
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Row

QUESTION, METHOD = common.question_and_method(__doc__)
ROUNDS, STEPS, PROFILED = 5, 20, 4
RECIPES: dict[str, fp8.Recipe | None] = {
    "bf16": None,
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "block128": fp8.Float8BlockScaling(),
}
Step = tuple[Callable[[Any], Any], Any]
"""A function from one carry to the next, and the first carry."""


class Layer(nn.Module):
    """The matmuls of a Llama's layer, with an elementwise product in the place of attention."""

    op: Any
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)
        norm, width = partial(nn.RMSNorm, dtype=jnp.bfloat16), x.shape[-1]
        h = norm()(x)
        query, key, value = (dense(width, name=name)(h) for name in ("query", "key", "value"))
        x = x + dense(width, name="out")(nn.tanh(query) * key + value)
        h = norm()(x)
        gate, up = (dense(self.hidden, name=name)(h) for name in ("gate", "up"))
        return x + dense(width, name="down")(nn.silu(gate) * up)


def llama(op: Any, rows: int, width: int, hidden: int) -> Step:
    model = nn.Sequential([Layer(op, hidden), Layer(op, hidden)])
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)

    @jax.jit
    def initial() -> fp8.TrainState:
        variables = model.init(jax.random.key(0), x[:16])
        return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-4))

    @partial(jax.jit, donate_argnums=0)
    def step(state: fp8.TrainState) -> fp8.TrainState:
        def loss(variables: Any) -> jax.Array:
            return jnp.mean(jnp.square(state.apply_fn(variables, x).astype(jnp.float32)))

        return state.apply_gradients(grads=fp8.grad(loss)(state.params))

    return step, initial()


def dense(op: Any, rows: int, width: int, hidden: int) -> Step:
    del hidden
    model = nn.Dense(
        width, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, dot_general_cls=op
    )
    x, g = (jax.random.normal(jax.random.key(i), (rows, width), jnp.bfloat16) for i in range(2))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    step = jax.jit(common.make_step(model.apply))
    return lambda _: step(variables, x, g), None


def kernels_in(folder: str) -> list[Row]:
    """Returns what the profiler saw on GPUs, the longest first."""
    found: dict[str, list[float]] = {}
    for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            streams = [line for line in plane.lines if line.name.startswith("Stream")]
            for event in (event for line in streams if "GPU" in plane.name for event in line.events):
                found.setdefault(event.name, []).append(event.duration_ns / 1e3)
    rows = [
        {"name": name, "launches": len(times) / PROFILED, "microseconds": sum(times) / PROFILED}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["microseconds"])


def measure(make: Callable[..., Step], recipe: fp8.Recipe | None, sizes: Sequence[int]) -> Row:
    step, carry = make(recipe and partial(fp8.Fp8DotGeneralOp, recipe=recipe), *sizes)

    def run(carry: Any, steps: int) -> Any:
        for _ in range(steps):
            carry = step(carry)
        return jax.block_until_ready(carry)

    carry, seconds = run(carry, 3), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        carry = run(carry, STEPS)
        seconds.append((time.perf_counter() - began) / STEPS)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(carry, PROFILED)
        kernels = kernels_in(folder)
    return {
        "step": common.summary(seconds),
        "launches": sum(row["launches"] for row in kernels),
        "busy_microseconds": sum(row["microseconds"] for row in kernels),
        "kernels": kernels[:20],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--json", type=Path, default=common.RESULTS / "gpu_steps.json", metavar="PATH")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    options = parser.parse_args(argv)
    here = common.machine(("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax"), ("gpu",))
    report = common.begin(QUESTION, METHOD, here, rows=[])
    sizes = (64, 64, 128) if options.small else (8192, 4096, 14336)
    for make in (dense, llama):
        for name, recipe in RECIPES.items():
            if make is llama and name == "axiswise":
                continue
            row = {"program": make.__name__, "recipe": name, **measure(make, recipe, sizes)}
            of_bf16 = next(r for r in (*report["rows"], row) if r["program"] == make.__name__)
            row["times_bf16"] = of_bf16["step"]["median"] / row["step"]["median"]
            report["rows"].append(row)
            milliseconds, launches = row["step"]["median"] * 1e3, round(row["launches"])
            print(
                f"{make.__name__:6} {name:9} {milliseconds:8.3f} ms  {row['times_bf16']:.2f} times bf16  "
                f"{launches} launches",
                flush=True,
            )
            jax.clear_caches()
    common.write(report, options.json)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    main()
