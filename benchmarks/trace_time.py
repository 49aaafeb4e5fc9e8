"""How long does an FP8 step take to trace, lower and compile, beside bf16 and Flax's ops?

Run ``make bench-trace``; ``ARGS=--help`` for the options.

The model is a stack of Transformer blocks that is written as a Python loop (no ``nn.scan``), each of six
matmuls; the step is loss and gradients of all variables. Every repetition starts with empty caches, and
the cases take turns.

Figures are seconds of CPU time of the process, so that other work on the machine counts less; compiled for
the device at hand. Sizes are small, as none of the figures depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Columns, Row

OPTIONS: dict[str, Any] = {"blocks": 6, "repetitions": 5}
PARTS = ("trace", "lower", "compile")


class Block(nn.Module):
    """Attention and an MLP, each with a LayerNorm before and a sum after."""

    op: Any = None
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        dense = partial(nn.Dense, dtype=jnp.bfloat16, dot_general_cls=self.op)
        norm = partial(nn.LayerNorm, dtype=jnp.bfloat16)
        ops = {"qkv_dot_general_cls": self.op, "out_dot_general_cls": self.op}
        x = x + nn.MultiHeadDotProductAttention(4, dtype=jnp.bfloat16, **ops)(norm()(x))
        h = nn.gelu(dense(4 * self.width)(norm()(x)))
        return x + dense(self.width)(h)


class Stack(nn.Module):
    """Blocks, one after the other."""

    op: Any = None
    blocks: int = 6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # noqa: D102
        for _ in range(self.blocks):
            x = Block(self.op)(x)
        return x


class Case(NamedTuple):
    """How a step is written."""

    model: Callable[[int], nn.Module]
    value_and_grad: Callable[..., Any] = jax.value_and_grad


CASES = {
    "bf16": Case(lambda blocks: Stack(None, blocks)),
    "flax-qdq": Case(lambda blocks: Stack(fp8_ops.Fp8DotGeneralOp, blocks)),
    "flax-direct": Case(lambda blocks: Stack(fp8_ops.Fp8DirectDotGeneralOp, blocks)),
    "ops by hand": Case(lambda blocks: Stack(fp8.Fp8DotGeneralOp, blocks), fp8.value_and_grad),
    "quantize_model": Case(
        lambda blocks: fp8.quantize_model(Stack(None, blocks), include=r".*"), fp8.value_and_grad
    ),
}


def measure(case: Case, blocks: int) -> dict[str, float]:
    """Returns the CPU seconds that each part of making a step takes."""
    jax.clear_caches()
    model, x = case.model(blocks), jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(variables: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    step, seconds = jax.jit(case.value_and_grad(loss)), {}
    stage: Any = partial(step.trace, variables, x)
    for part in PARTS:
        began = time.process_time()
        made = stage()
        seconds[part] = time.process_time() - began
        stage = made.lower if part == "trace" else getattr(made, "compile", None)
    return seconds


def measure_all(blocks: int, repetitions: int) -> Row:
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(repetitions):
        for name, case in CASES.items():
            seconds[name].append(measure(case, blocks))
    medians = {
        name: {part: statistics.median(s[part] for s in all_of) for part in PARTS}
        for name, all_of in seconds.items()
    }
    return {"cpu_seconds": seconds, "median_cpu_seconds": medians}


def table(report: Row) -> str:
    """Returns the medians as text, with trace and lower over those of Flax's direct op."""
    medians = report["median_cpu_seconds"]

    def traced(row: Row) -> float:
        return row["trace"] + row["lower"]

    columns: Columns = {
        "case": common.word("case"),
        **{f"{part} s": common.figure(part, ".2f") for part in PARTS},
        "trace + lower": lambda row: f"{traced(row) / traced(medians['flax-direct']):.2f}x",
    }
    return common.text_table(columns, [{"case": name, **row} for name, row in medians.items()], 1)


def main(argv: Sequence[str] | None = None) -> None:
    common.command(__doc__, "trace_time", measure_all, table, argv, options=OPTIONS)


if __name__ == "__main__":
    common.run(main)
