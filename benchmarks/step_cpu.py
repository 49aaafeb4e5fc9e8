"""What does an FP8 training step cost on a CPU, next to the step without FP8 and with Flax's ops?

Run ``make bench``.

FP8 is emulated on a CPU. A step is value_and_grad of the loss, AdamW on the float32 params, and the
overwrite of the scaling state; jitted, with the state donated.

Models: mlp = nn.Dense layers with relu between them, mean squared error; its sizes are layers, width and
batch. transformer = the demo's ByteTransformer, cross entropy; its sizes are layers, width, batch and
bytes of a window.

Contenders: plain = lax.dot_general; flax-qdq = flax.linen.fp8_ops.Fp8DotGeneralOp; flax-direct =
flax.linen.fp8_ops.Fp8DirectDotGeneralOp; these with Flax's TrainState and jax.value_and_grad; fp8flax =
fp8flax.Fp8DotGeneralOp, .TrainState, .value_and_grad. Amax histories of 1024.

step = seconds until the whole new state is ready: median (min-max) of the rounds after 2 of warm-up; in
each round every contender takes one step, in rotated order. step / X = median over the rounds of (seconds
of the step / seconds of X's step in that round).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Columns, Row, Shape
from fp8flax.demo.model import VOCABULARY, ByteTransformer
from fp8flax.demo.training import loss_of

BASELINES = ("plain", "flax-qdq", "flax-direct")
DTYPES = ("float32", "bfloat16")
HISTORY = 1024
OPTIONS: dict[str, Any] = {"rounds": 40, "mlp": (6, 512, 256), "transformer": (4, 128, 8, 128)}
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")


class Contender(NamedTuple):
    """A matmul, and the train state and differentiation that its package recommends."""

    dot_general_cls: Any = None
    train_state: Any = flax.training.train_state.TrainState
    value_and_grad: Callable[..., Any] = jax.value_and_grad


OURS = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=HISTORY))
CONTENDERS = {
    "plain": Contender(),
    "flax-qdq": Contender(partial(fp8_ops.Fp8DotGeneralOp, amax_history_length=HISTORY)),
    "flax-direct": Contender(partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=HISTORY)),
    "fp8flax": Contender(OURS, fp8.TrainState, fp8.value_and_grad),
}


class Task(NamedTuple):
    """A model with its loss and one batch."""

    make_model: Callable[[Any, Any], nn.Module]
    """Takes ``dot_general_cls`` and the compute dtype."""
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    inputs: jax.Array
    targets: jax.Array


def mlp(sizes: Shape) -> Task:
    num_layers, width, batch = sizes

    def make_model(dot_general_cls: Any, dtype: Any) -> nn.Module:
        dense = partial(nn.Dense, width, dtype=dtype, dot_general_cls=dot_general_cls)
        hidden = [layer for _ in range(num_layers - 1) for layer in (dense(), nn.relu)]
        return nn.Sequential([*hidden, dense()])

    def loss(y: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((y.astype(jnp.float32) - target) ** 2)

    x, y = (jax.random.normal(key, (batch, width)) for key in jax.random.split(jax.random.key(0)))
    return Task(make_model, loss, x, y)


def transformer(sizes: Shape) -> Task:
    num_layers, width, batch, length = sizes
    windows = jax.random.randint(jax.random.key(0), (batch, length + 1), 0, VOCABULARY)

    def make_model(dot_general_cls: Any, dtype: Any) -> nn.Module:
        options = {"max_length": length, "dot_general_cls": dot_general_cls, "dtype": dtype}
        return ByteTransformer(width, num_layers, **options)

    return Task(make_model, loss_of, windows[:, :-1], windows[:, 1:])


TASKS: dict[str, Callable[[Shape], Task]] = {"mlp": mlp, "transformer": transformer}


def make_run(task: Task, contender: Contender, dtype: str) -> Callable[[], None]:
    """Returns a function that takes a training step from the state that the last step left."""
    model = task.make_model(contender.dot_general_cls, jnp.dtype(dtype))
    batch = (task.inputs, task.targets)
    variables = dict(jax.jit(model.init)(jax.random.key(1), task.inputs))
    state = contender.train_state.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-3))

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        def loss_fn(variables: Any) -> jax.Array:
            return task.loss(state.apply_fn(variables, inputs), targets)

        loss, grads = contender.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    compiled = jax.jit(step, donate_argnums=0).lower(state, *batch).compile()

    def run() -> None:
        nonlocal state
        state, loss = compiled(state, *batch)
        jax.block_until_ready((state, loss))

    return run


def measure(model: str, task: Task, dtype: str, rounds: int) -> list[Row]:
    """Returns a row for each contender."""
    runs = {name: make_run(task, contender, dtype) for name, contender in CONTENDERS.items()}
    seconds = common.interleaved(runs, rounds)
    return [
        {
            "model": model,
            "dtype": dtype,
            "contender": name,
            "step_seconds": common.summary(seconds[name]),
            "step_ratio_to": {base: common.ratio(seconds[name], seconds[base]) for base in BASELINES},
            "step_seconds_by_round": seconds[name],
        }
        for name in CONTENDERS
    ]


def measure_all(rounds: int, **sizes: Shape) -> Row:
    tasks = {model: make_task(sizes[model]) for model, make_task in TASKS.items()}
    return {
        "results": [
            row
            for model, task in tasks.items()
            for dtype in DTYPES
            for row in measure(model, task, dtype, rounds)
        ]
    }


def table(report: Row) -> str:
    columns: Columns = {
        **{name: common.word(name) for name in ("model", "dtype", "contender")},
        "step ms": common.figure("step_seconds", ".2f", 1e3),
        **{f"step / {base}": common.figure(base, ".3f") for base in BASELINES},
    }
    rows = [row | row["step_ratio_to"] for row in report["results"]]
    return common.text_table(columns, rows, 3)


def main(argv: Sequence[str] | None = None) -> None:
    jax.config.update("jax_platforms", "cpu")
    common.command(__doc__, "step_cpu", measure_all, table, argv, options=OPTIONS, packages=PACKAGES)


if __name__ == "__main__":
    main()
