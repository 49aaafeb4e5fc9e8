"""Training a classifier in bf16 and in FP8 from the same weights on the same batches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8flax as fp8
from fp8flax.demo.data import DemoError
from fp8flax.demo.training import RECIPES, Record, fp8_ops, scaling_of

EVALUATION_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Examples:
    """Inputs and their classes: arrays with the examples as their first dimension."""

    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class Split:
    """What one run learns from and what it is judged by; ``test`` is None where validation is all."""

    train: Examples
    validation: Examples
    test: Examples | None = None

    @property
    def held_out(self) -> Examples:
        """The examples whose accuracy counts."""
        return self.validation if self.test is None else self.test


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model and how to train it.

    Attributes:
        name: what ``--task`` calls it.
        title: what it is, for the plot.
        source: where the data is from, to be printed.
        model: a Linen module that knows nothing of FP8; called with inputs and ``train``, it returns
            logits, ``(batch, classes)``, or ``(batch, 1)`` for two classes.
        optimizer: makes the optimizer from the number of steps.
        split: the data of a seed; the same numbers of examples for each.
        epochs: passes over the training examples.
        batch_size: examples per step.
        recipe: a name in ``RECIPES``.

    Raises:
        DemoError: there are fewer training examples than a batch takes.
    """

    name: str
    title: str
    source: str
    model: nn.Module
    optimizer: Callable[[int], optax.GradientTransformation]
    split: Callable[[int], Split]
    epochs: int
    batch_size: int
    recipe: str

    def __post_init__(self) -> None:
        examples = len(self.split(0).train)
        if examples < self.batch_size:
            raise DemoError(
                f"--batch-size {self.batch_size} is more than the {examples} examples to train on."
            )

    def steps(self, split: Split) -> int:
        """Returns the number of training steps; the examples that fill no batch wait an epoch."""
        return self.epochs * (len(split.train) // self.batch_size)


@dataclasses.dataclass
class Outcome(Record):
    """What one run leaves behind; validation is taken after each epoch."""

    validation_accuracy: np.ndarray
    accuracy: float
    """That of the trained model on ``Split.held_out``."""
    fp8_before: dict[str, np.ndarray]
    """Scales and amax histories by their path, before training; empty for bf16."""
    fp8_after: dict[str, np.ndarray]


def quantized(task: Task) -> nn.Module:
    """Returns the task's model in FP8: every layer that can be, however small."""
    return fp8.quantize_model(task.model, RECIPES[task.recipe], include=r".*")


def batches(examples: Examples, seed: int, epoch: int, batch_size: int) -> Iterator[Examples]:
    """Yields the batches of one epoch; their order is a function of seed and epoch alone."""
    order = np.random.default_rng((seed, epoch)).permutation(len(examples))
    for start in range(0, len(order) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        yield Examples(examples.inputs[chosen], examples.labels[chosen])


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each example in nats; a single logit is that of class 1."""
    if logits.shape[-1] == 1:
        return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels.astype(logits.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def predicted(logits: jax.Array) -> jax.Array:
    """Returns the likeliest class of each example."""
    if logits.shape[-1] == 1:
        return (logits[:, 0] > 0).astype(jnp.int32)
    return jnp.argmax(logits, axis=-1)


@partial(jax.jit, donate_argnums=0)
def train_step(
    state: fp8.TrainState, inputs: jax.Array, labels: jax.Array, key: jax.Array
) -> tuple[fp8.TrainState, jax.Array, jax.Array]:
    """Takes one step, with dropout from ``key`` and the step; returns ``(state, loss, scaling)``."""
    rngs = {"dropout": jax.random.fold_in(key, state.step)}

    def loss_fn(variables: Any) -> jax.Array:
        logits = state.apply_fn(variables, inputs, train=True, rngs=rngs)
        return jnp.mean(cross_entropy(logits, labels))

    loss, grads = fp8.value_and_grad(loss_fn)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, loss, scaling_of(state.params)


@jax.jit
def _evaluate_batch(state: fp8.TrainState, inputs: jax.Array, labels: jax.Array) -> jax.Array:
    logits = state.apply_fn(state.params, inputs)
    counts = labels >= 0
    loss = jnp.where(counts, cross_entropy(logits, labels), 0)
    return jnp.stack([jnp.sum(loss), jnp.sum(counts & (predicted(logits) == labels))])


def evaluate(state: fp8.TrainState, examples: Examples) -> tuple[float, float]:
    """Returns the mean loss and the accuracy on ``examples``, without dropout; the state stays as it is."""
    total = np.zeros(2)
    for start in range(0, len(examples), EVALUATION_BATCH):
        part = slice(start, start + EVALUATION_BATCH)
        inputs, labels = examples.inputs[part], examples.labels[part]
        missing = EVALUATION_BATCH - len(labels)  # one shape compiles once
        inputs = np.concatenate([inputs, np.zeros((missing, *inputs.shape[1:]), inputs.dtype)])
        labels = np.concatenate([labels, np.full(missing, -1, labels.dtype)])
        total += np.asarray(_evaluate_batch(state, inputs, labels), np.float64)
    loss, correct = total / len(examples)
    return float(loss), float(correct)


def fp8_variables(variables: Any) -> dict[str, np.ndarray]:
    """Returns the scales and amax histories by their path; empty for bf16 and recipes without state."""
    state = variables.get(fp8.OVERWRITE_WITH_GRADIENT, {})
    return {k: np.array(v) for k, v in sorted(flax.traverse_util.flatten_dict(state, sep="/").items())}


@partial(jax.jit, static_argnums=0)
def _init(model: nn.Module, key: jax.Array, inputs: jax.Array) -> Any:
    return model.init(key, inputs)


def train(
    precision: str,
    seed: int,
    task: Task,
    models: dict[str, nn.Module],
    optimizer: optax.GradientTransformation,
    split: Split,
    on_step: Callable[[int, float], None],
) -> Outcome:
    """Trains once; the seed alone decides weights, batches and dropout, whatever the precision.

    Args:
        precision: ``"bf16"`` or ``"fp8"``.
        seed: 0 or more.
        task: epochs and batch size.
        models: one for each precision; the same objects for each seed, so that they compile once.
        optimizer: likewise.
        split: the data.
        on_step: called after each step with the number of steps done and the loss.
    """
    weights_key, dropout_key = jax.random.split(jax.random.key(seed))
    sample = split.train.inputs[:1]
    variables = _init(models["bf16"], weights_key, sample)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, models["fp8"], sample)
    before = fp8_variables(variables)
    ops = fp8_ops(variables)
    state = fp8.TrainState.create(apply_fn=models[precision].apply, params=variables, tx=optimizer)
    losses, scaling, seconds = [], [], []
    validation = []
    for epoch in range(task.epochs):
        for batch in batches(split.train, seed, epoch, task.batch_size):
            began = time.perf_counter()
            state, loss, scaling_now = train_step(state, batch.inputs, batch.labels, dropout_key)
            losses.append(float(loss))
            scaling.append(np.asarray(scaling_now))
            seconds.append(time.perf_counter() - began)
            on_step(len(losses), losses[-1])
        validation.append((len(losses), *evaluate(state, split.validation)))
    steps, validation_loss, validation_accuracy = zip(*validation)
    accuracy = validation_accuracy[-1] if split.test is None else evaluate(state, split.test)[1]
    trace = np.asarray(scaling)
    return Outcome(
        precision=precision,
        seed=seed,
        train_loss=np.asarray(losses),
        validation_steps=list(steps),
        validation_loss=np.asarray(validation_loss),
        ops=ops,
        scale=trace[:, 0],
        amax=trace[:, 1],
        step_seconds=seconds[1:],
        validation_accuracy=np.asarray(validation_accuracy),
        accuracy=accuracy,
        fp8_before=before,
        fp8_after=fp8_variables(state.params),
    )
