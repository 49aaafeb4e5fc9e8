"""The two tasks of the demo, a language model and a classifier, and how each is trained in bf16 and FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8flax as fp8
from fp8flax.demo.data import Corpus, Examples, load_corpus, load_reviews, train_batch, validation_batches
from fp8flax.demo.model import ByteTransformer, ReviewClassifier

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
EVALUATIONS = 12


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
    recipe: str = "delayed"


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
    validation: list[Examples]
    test: list[Examples] | None = None  # of a classifier
    keys: Callable[[jax.Array], Sequence[jax.Array]]  # maps a seed's key to keys of weights and dropout


def language_model(settings: Settings, corpus: Corpus) -> Task:
    """Returns the task of predicting the next byte at each position."""
    sizes = (settings.batch_size, settings.length)
    model = ByteTransformer(settings.width, settings.num_layers, max_length=settings.length)
    model8 = fp8.quantize_model(model, RECIPES[settings.recipe], include=".*", exclude=WIDE)

    def examples(windows: np.ndarray) -> Examples:
        return Examples(windows[:, :-1], windows[:, 1:])

    return Task(
        models={"bf16": model, "fp8": model8},
        optimizer=make_optimizer(settings),
        steps=settings.steps,
        batch=lambda seed, step: examples(train_batch(corpus, seed, step, *sizes)),
        validation=list(map(examples, validation_batches(corpus, settings.validation_batches, *sizes))),
        keys=lambda key: (key, key),
    )


def lm(steps: int | None, recipe: str, folder: str | None) -> Task:
    """Returns the task ``lm``: a byte-level Transformer on text."""
    settings = Settings(steps=steps or Settings.steps, recipe=recipe)
    return language_model(settings, load_corpus(folder, settings.length))


def imdb(steps: int | None, recipe: str, folder: str | None) -> Task:
    """Returns the task ``imdb``: Keras's float8 example, by default for three epochs as there."""
    model, batch_size = ReviewClassifier(), 32
    reviews, num_words = load_reviews(folder, model.vocabulary, model.length)
    model = model.clone(vocabulary=num_words)
    per_epoch = len(reviews["train"].labels) // batch_size

    def batch(seed: int, step: int) -> Examples:
        epoch, place = divmod(step, per_epoch)  # an epoch leaves out the reviews that fill no batch
        order = np.random.default_rng((seed, epoch)).permutation(len(reviews["train"].labels))
        return reviews["train"].take(order[place * batch_size : (place + 1) * batch_size])

    return Task(
        models={"bf16": model, "fp8": fp8.quantize_model(model, RECIPES[recipe], include=".*")},
        optimizer=optax.adam(1e-3, eps=1e-7),
        steps=steps or 3 * per_epoch,
        batch=batch,
        validation=reviews["validation"].batches(256),
        test=reviews["test"].batches(256),
        keys=jax.random.split,
    )


def make_state(task: Task, precision: str, seed: int) -> fp8.TrainState:
    """Returns the train state at step 0; a seed gives the same weights in both precisions."""
    model, inputs = task.models[precision], task.batch(seed, 0).inputs[:1]
    variables = task.models["bf16"].init(task.keys(jax.random.key(seed))[0], inputs)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, model, inputs)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=task.optimizer)


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats; a single logit is that of class 1."""
    if logits.shape[-1] == 1:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits[..., 0], labels.astype(logits.dtype)))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def loss_of_step(variables: Any, state: fp8.TrainState, examples: Examples, key: jax.Array) -> jax.Array:
    """Returns the loss of one batch, with dropout."""
    rngs = {"dropout": jax.random.fold_in(key, state.step)}
    return loss_of(state.apply_fn(variables, examples.inputs, rngs=rngs), examples.labels)


@partial(jax.jit, donate_argnums=0)
def train_step(
    state: fp8.TrainState, examples: Examples, key: jax.Array
) -> tuple[fp8.TrainState, jax.Array]:
    """Takes one training step; returns the next state and the loss."""
    loss, grads = fp8.value_and_grad(loss_of_step)(state.params, state, examples, key)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def _evaluate(state: fp8.TrainState, examples: Examples) -> jax.Array:
    logits, labels = state.apply_fn(state.params, examples.inputs), examples.labels
    answers = logits[..., 0] > 0 if logits.shape[-1] == 1 else jnp.argmax(logits, axis=-1)
    return jnp.stack([loss_of(logits, labels), jnp.mean(answers == labels)])


def loss_and_accuracy(state: fp8.TrainState, batches: list[Examples]) -> tuple[float, float]:
    """Returns the loss without dropout and the share of right answers."""
    values = np.array([_evaluate(state, examples) for examples in batches], float)
    loss, accuracy = np.average(values, axis=0, weights=[len(examples.labels) for examples in batches])
    return float(loss), float(accuracy)


def train(task: Task, precision: str, seed: int) -> Iterator[dict[str, float]]:
    """Trains a model; yields after each step its loss, and now and then those of held-out data."""
    state, key = make_state(task, precision, seed), task.keys(jax.random.key(seed))[1]
    for step in range(1, task.steps + 1):
        state, loss = train_step(state, task.batch(seed, step - 1), key)
        figures = {"step": step, "loss": float(loss)}
        if step % -(-task.steps // EVALUATIONS) == 0 or step == task.steps:
            figures["validation loss"], _ = loss_and_accuracy(state, task.validation)
        if step == task.steps and task.test is not None:
            _, figures["test accuracy"] = loss_and_accuracy(state, task.test)
        yield figures


def arguments_of_step(task: Task, precision: str) -> tuple[fp8.TrainState, Examples, jax.Array]:
    """Returns the shapes and dtypes of the arguments of ``train_step``."""
    return jax.eval_shape(lambda: (make_state(task, precision, 0), task.batch(0, 0), jax.random.key(0)))
