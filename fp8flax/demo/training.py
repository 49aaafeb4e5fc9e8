"""The two tasks of the demo, a language model and a classifier, and how each is trained in bf16 and FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8flax as fp8
from fp8flax.demo.data import Examples, load_corpus, load_reviews, train_batch, validation_batches
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
    """Settings of a run of the language model; the demo itself sets ``steps`` alone."""

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
    """A model with its optimizer and its data."""

    models: dict[str, nn.Module]  # one for each precision; both have the same parameters
    optimizer: optax.GradientTransformation
    steps: int
    batch: Callable[[int, int], Examples]  # maps seed and step to a batch, equal in both precisions
    validation: list[Examples]  # in batches of one size


def lm(steps: int | None, recipe: str, folder: str | None) -> Task:
    """Returns the task ``lm``: predicts the next byte of a text at each position."""
    settings = Settings(steps=steps or Settings.steps)
    sizes = (settings.batch_size, settings.length)
    text, held_out = load_corpus(folder, settings.length)
    model = ByteTransformer(settings.width, settings.num_layers, max_length=settings.length)
    model8 = fp8.quantize_model(model, RECIPES[recipe], include=".*", exclude=WIDE)

    def examples(windows: np.ndarray) -> Examples:
        return Examples(windows[:, :-1], windows[:, 1:])

    return Task(
        models={"bf16": model, "fp8": model8},
        optimizer=make_optimizer(settings),
        steps=settings.steps,
        batch=lambda seed, step: examples(train_batch(text, seed, step, *sizes)),
        validation=list(map(examples, validation_batches(held_out, settings.validation_batches, *sizes))),
    )


def imdb(steps: int | None, recipe: str, folder: str | None) -> Task:
    """Returns the task ``imdb``: tells positive from negative film reviews.

    The sizes are those of Keras's example of text classification with a Transformer.
    """
    model = ByteTransformer(32, 1, num_heads=2, max_length=200, vocabulary=20_000, num_classes=2)
    reviews, held_out = load_reviews(folder, model.vocabulary, model.max_length)

    def draw(of: Examples, size: int, *seed: int) -> Examples:
        chosen = np.random.default_rng(seed).integers(0, len(of.labels), size)
        return Examples(of.inputs[chosen], of.labels[chosen])

    return Task(
        models={"bf16": model, "fp8": fp8.quantize_model(model, RECIPES[recipe], include=".*")},
        optimizer=optax.adam(1e-3),
        steps=steps or 2400,
        batch=lambda seed, step: draw(reviews, 32, seed, step),
        validation=[draw(held_out, 250, i) for i in range(20)],
    )


def at_real_width(task: Task) -> Task:
    """Returns a task with the same model at width 4096, and batches of about 8192 rows, for an audit."""

    def batch(seed: int, step: int) -> Examples:
        small = task.batch(seed, step)
        times = -(-8192 // small.inputs.size)
        return Examples(np.repeat(small.inputs, times, 0), np.repeat(small.labels, times, 0))

    models = {name: model.clone(width=4096, num_heads=32) for name, model in task.models.items()}
    return dataclasses.replace(task, models=models, batch=batch)


def make_state(task: Task, precision: str, seed: int) -> fp8.TrainState:
    """Returns the train state at step 0; a seed gives the same weights in both precisions."""
    model, inputs = task.models[precision], task.batch(seed, 0).inputs[:1]
    variables = task.models["bf16"].init(jax.random.key(seed), inputs)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, model, inputs)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=task.optimizer)


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss_of_step(variables: Any, state: fp8.TrainState, examples: Examples) -> jax.Array:
    """Returns the loss of one batch."""
    return loss_of(state.apply_fn(variables, examples.inputs), examples.labels)


@partial(jax.jit, donate_argnums=0)
def train_step(state: fp8.TrainState, examples: Examples) -> tuple[fp8.TrainState, jax.Array]:
    """Takes one training step; returns the next state and the loss."""
    loss, grads = fp8.value_and_grad(loss_of_step)(state.params, state, examples)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def _evaluate(state: fp8.TrainState, examples: Examples) -> jax.Array:
    logits, labels = state.apply_fn(state.params, examples.inputs), examples.labels
    return jnp.stack([loss_of(logits, labels), jnp.mean(jnp.argmax(logits, axis=-1) == labels)])


def train(task: Task, precision: str, seed: int) -> Iterator[dict[str, float]]:
    """Trains a model; yields after each step its loss, and now and then figures of held-out data."""
    state = make_state(task, precision, seed)
    for step in range(1, task.steps + 1):
        state, loss = train_step(state, task.batch(seed, step - 1))
        figures = {"step": step, "loss": float(loss)}
        if step % -(-task.steps // 12) == 0 or step == task.steps:
            held_out = np.mean([_evaluate(state, batch) for batch in task.validation], 0, float)
            figures["validation loss"], figures["validation accuracy"] = map(float, held_out)
        yield figures


def arguments_of_step(task: Task, precision: str) -> tuple[fp8.TrainState, Examples]:
    """Returns the shapes and dtypes of the arguments of ``train_step``."""
    return jax.eval_shape(lambda: (make_state(task, precision, 0), task.batch(0, 0)))
