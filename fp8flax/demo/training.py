"""The language model of the demo, and how it is trained in bf16 and FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.typing import VariableDict

import fp8flax as fp8
from fp8flax.demo.data import load_corpus, train_batch, validation_batches
from fp8flax.demo.model import ByteTransformer

PRECISIONS = ("bf16", "fp8")
RECIPES: dict[str, fp8.Recipe] = {
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "axiswise-hp-wgrad": fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True),
    "mxfp8": fp8.MXFP8BlockScaling(),
    "block128": fp8.Float8BlockScaling(),
}
"""The recipes that ``--recipe`` offers, by name."""
WIDE = r"block_0/attn"
"""The layers of the language model that stay in bf16: the loss is most sensitive to its first attention."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run of the language model; all of them change its numbers."""

    steps: int = 300
    batch_size: int = 16
    length: int = 128
    width: int = 128
    num_layers: int = 4
    learning_rate: float = 2e-3
    validation_batches: int = 16


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay and clipping."""
    peak, steps = settings.learning_rate, settings.steps
    rates = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), max(2, steps), 1e-5)
    adamw = optax.adamw(rates, b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The models with their optimizer and their data: windows of text, ``(batch, length + 1)``."""

    models: dict[str, nn.Module]  # one for each precision; both have the same parameters
    optimizer: optax.GradientTransformation
    steps: int
    batch: Callable[[int, int], np.ndarray]  # maps seed and step to windows, equal in both precisions
    validation: list[np.ndarray]


def make_task(steps: int | None, recipe: str, folder: str | None) -> Task:
    """Returns the task of predicting the next byte at each position of the texts in a folder."""
    settings = Settings(steps=steps or Settings.steps)
    sizes = (settings.batch_size, settings.length)
    text, held_out = load_corpus(folder, settings.length)
    model = ByteTransformer(settings.width, settings.num_layers, max_length=settings.length)
    model8 = fp8.quantize_model(model, RECIPES[recipe], include=".*", exclude=WIDE)
    return Task(
        models={"bf16": model, "fp8": model8},
        optimizer=make_optimizer(settings),
        steps=settings.steps,
        batch=lambda seed, step: train_batch(text, seed, step, *sizes),
        validation=validation_batches(held_out, settings.validation_batches, *sizes),
    )


def at_real_width(task: Task) -> Task:
    """Returns a task with the same model at width 4096, and batches of about 8192 rows, for an audit."""
    times = -(-8192 // task.batch(0, 0)[:, 1:].size)
    models = {name: model.clone(width=4096, num_heads=32) for name, model in task.models.items()}
    return dataclasses.replace(
        task, models=models, batch=lambda seed, step: np.repeat(task.batch(seed, step), times, 0)
    )


def make_state(task: Task, precision: str, seed: int) -> fp8.TrainState:
    """Returns the train state at step 0; a seed gives the same weights in both precisions."""
    model, inputs = task.models[precision], task.batch(seed, 0)[:1, :-1]
    variables = task.models["bf16"].init(jax.random.key(seed), inputs)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, model, inputs)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=task.optimizer)


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss_of_step(variables: VariableDict, state: fp8.TrainState, windows: jax.Array) -> jax.Array:
    """Returns the loss of one batch."""
    return loss_of(state.apply_fn(variables, windows[:, :-1]), windows[:, 1:])


@partial(jax.jit, donate_argnums=0)
def train_step(state: fp8.TrainState, windows: jax.Array) -> tuple[fp8.TrainState, jax.Array]:
    """Takes one training step; returns the next state and the loss."""
    loss, grads = fp8.value_and_grad(loss_of_step)(state.params, state, windows)
    return state.apply_gradients(grads=grads), loss


def train(task: Task, precision: str, seed: int) -> Iterator[dict[str, float]]:
    """Trains a model; yields after each step its loss, and now and then figures of held-out data."""
    state, evaluate = make_state(task, precision, seed), jax.jit(loss_of_step)
    for step in range(1, task.steps + 1):
        state, loss = train_step(state, task.batch(seed, step - 1))
        figures = {"step": step, "loss": float(loss)}
        if step % -(-task.steps // 12) == 0 or step == task.steps:
            losses = [evaluate(state.params, state, windows) for windows in task.validation]
            figures["validation loss"] = float(np.mean(losses, dtype=float))
        yield figures


def arguments_of_step(task: Task, precision: str) -> tuple[fp8.TrainState, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of the arguments of ``train_step``."""
    return jax.eval_shape(lambda: (make_state(task, precision, 0), task.batch(0, 0)))
