"""Trains a Linen model in bf16 or in FP8: the state, the step, and a run with its checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import fp8flax as fp8
from fp8flax.demo.data import DemoError, Examples

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
ROLES = ("input", "kernel", "output_grad")
CHECKPOINT_EVERY = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its optimizer, its data, and the number of its steps."""

    about: str  # the data in words
    models: dict[str, nn.Module]  # one for each precision; both have the same parameters
    optimizer: optax.GradientTransformation
    keys: Callable[[jax.Array], Sequence[jax.Array]]  # maps a seed's key to keys of weights and dropout
    steps: int
    evaluations: int  # the number of evaluations, evenly spread over the steps
    batch: Callable[[int, int], Examples]  # maps seed and step to a batch, equal in both precisions
    held_out: Callable[[int, str], list[Examples]]  # maps seed and "validation" or "test" to batches
    accuracy_of: str | None = None  # "validation" or "test"; None compares validation losses
    files: dict[str, str] = dataclasses.field(default_factory=dict)  # texts to save beside the results


def make_state(task: Task, precision: str, seed: int) -> fp8.TrainState:
    """Returns the train state at step 0; a seed gives the same weights in both precisions."""
    model, inputs = task.models[precision], task.batch(seed, 0).inputs[:1]
    variables = task.models["bf16"].init(task.keys(jax.random.key(seed))[0], inputs)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, model, inputs)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=task.optimizer)


def losses_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each label in nats; a single logit is that of class 1."""
    if logits.shape[-1] == 1:
        return optax.sigmoid_binary_cross_entropy(logits[..., 0], labels.astype(logits.dtype))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    return jnp.mean(losses_of(logits, labels))


def _loss(variables: Any, state: fp8.TrainState, examples: Examples, key: jax.Array) -> jax.Array:
    rngs = {"dropout": jax.random.fold_in(key, state.step)}
    return loss_of(state.apply_fn(variables, examples.inputs, rngs=rngs), examples.labels)


@partial(jax.jit, donate_argnums=0)
def train_step(
    state: fp8.TrainState, examples: Examples, key: jax.Array
) -> tuple[fp8.TrainState, jax.Array, jax.Array]:
    """Takes one training step; returns the next state, the loss, and ``scaling_of`` the variables."""
    loss, grads = fp8.value_and_grad(_loss)(state.params, state, examples, key)
    state = state.apply_gradients(grads=grads)
    return state, loss, scaling_of(state.params)


@jax.jit
def evaluate(state: fp8.TrainState, examples: Examples) -> tuple[jax.Array, jax.Array]:
    """Returns the loss without dropout and the number of right answers; labels below 0 do not count."""
    logits, labels = state.apply_fn(state.params, examples.inputs), examples.labels
    answers = logits[..., 0] > 0 if logits.shape[-1] == 1 else jnp.argmax(logits, axis=-1)
    return jnp.mean(losses_of(logits, labels), where=labels >= 0), jnp.sum(answers == labels)


def fp8_layers(variables: Any) -> list[str]:
    """Returns the paths of the layers with scaling state: none in bf16, and for recipes without state."""
    flat = flax.traverse_util.flatten_dict(variables.get(fp8.OVERWRITE_WITH_GRADIENT, {}))
    return sorted({"/".join(path[:-2]) for path in flat})


def scaling_of(variables: Any) -> jax.Array:
    """Returns scale and newest amax of each FP8 layer and role, with shape ``(2, layers, 3)``."""
    flat = flax.traverse_util.flatten_dict(variables.get(fp8.OVERWRITE_WITH_GRADIENT, {}), sep="/")
    ops = sorted({path.rsplit("/", 1)[0] for path in flat})
    values = [
        [[flat[f"{op}/{role}_{leaf}"][0] for role in ROLES] for op in ops]
        for leaf in ("scale", "amax_history")
    ]
    return jnp.array(values, jnp.float32).reshape(2, len(ops), 3)


class Run:
    """One training run and its records.

    Attributes:
        arrays: ``train_loss`` of each step; ``validation_loss`` and ``validation_accuracy`` of each step in
            ``evaluated_after``; if the model has FP8 layers, also ``scaling``: ``scaling_of`` each step.
        layers: the ``fp8_layers`` of the model.
        evaluated_after: the steps after which the model is evaluated.
        step_seconds: the times of the steps of this process; the first step compiles.
        accuracy: the accuracy of the trained classifier on ``Task.accuracy_of``.
    """

    def __init__(self, task: Task, precision: str, seed: int) -> None:
        self.task, self.precision, self.seed = task, precision, seed
        self.state, self.key = make_state(task, precision, seed), task.keys(jax.random.key(seed))[1]
        self.layers, self.step_seconds = fp8_layers(self.state.params), list[float]()
        times = range(1, task.evaluations + 1)
        self.evaluated_after = sorted({-(-task.steps * i // task.evaluations) for i in times})
        shapes: dict[str, tuple[int, ...]] = {"train_loss": (task.steps,)}
        shapes["validation_loss"] = shapes["validation_accuracy"] = (len(self.evaluated_after),)
        if self.layers:  # Orbax cannot save an empty array
            shapes["scaling"] = (task.steps, 2, len(self.layers), len(ROLES))
        self.arrays = {name: np.full(shape, np.nan, np.float32) for name, shape in shapes.items()}
        self.accuracy: float | None = None

    def figures(self) -> dict[str, Any]:
        """Returns all records as numbers, texts and lists, for JSON."""
        others = ("task", "state", "key", "arrays")
        plain = {name: value for name, value in vars(self).items() if name not in others}
        return {**plain, **{name: array.tolist() for name, array in self.arrays.items()}}

    def loss_and_accuracy(self, part: str) -> tuple[float, float]:
        """Returns the loss and the accuracy of the model on ``"validation"`` or ``"test"``."""
        batches = self.task.held_out(self.seed, part)
        losses, rights = zip(*(evaluate(self.state, examples) for examples in batches))
        sizes = [np.sum(examples.labels >= 0) for examples in batches]
        return float(np.average(np.array(losses, float), weights=sizes)), float(sum(rights)) / sum(sizes)

    def train(self, checkpoints: Path) -> Iterator[tuple[int, float]]:
        """Trains from the newest checkpoint in ``checkpoints``, or from the start; yields step and loss.

        Raises:
            DemoError: a checkpoint cannot be read or written.
        """
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        with ocp.CheckpointManager(checkpoints.absolute(), options=options) as manager:
            start = manager.latest_step() or 0
            if start:
                done = restore(manager, start, {"state": self.state, **self.arrays})
                self.state = done.pop("state")
                self.arrays = {
                    name: np.array(array) for name, array in done.items()
                }  # the arrays of Orbax are read-only
            for step in range(start + 1, self.task.steps + 1):
                examples = self.task.batch(self.seed, step - 1)
                began = time.perf_counter()
                self.state, loss, scaling = train_step(self.state, examples, self.key)
                # NumPy turns a Ctrl-C into a ValueError while it converts a JAX array; float does not.
                self.arrays["train_loss"][step - 1] = float(loss)
                if self.layers:
                    self.arrays["scaling"][step - 1] = np.asarray(scaling)
                self.step_seconds.append(time.perf_counter() - began)
                if step in self.evaluated_after:
                    i, values = self.evaluated_after.index(step), self.loss_and_accuracy("validation")
                    self.arrays["validation_loss"][i], self.arrays["validation_accuracy"][i] = values
                if step % CHECKPOINT_EVERY == 0 or step == self.task.steps:
                    save(manager, step, {"state": self.state, **self.arrays})
                yield step, float(loss)
        if self.task.accuracy_of is not None:
            self.accuracy = self.loss_and_accuracy(self.task.accuracy_of)[1]


def digest(tree: Any) -> str:
    """Returns the SHA-256 of all leaves of a tree: their paths, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(jnp.asarray(leaf))  # the step is a Python int at first, and after a restore
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


@contextlib.contextmanager
def _explained(checkpoint: Path, verb: str, advice: str) -> Iterator[None]:
    """Turns any error of Orbax into one that names the checkpoint; its class depends on the file system."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise DemoError(f"the checkpoint {checkpoint} cannot be {verb} ({reason}); {advice}") from error


def save(manager: ocp.CheckpointManager, step: int, done: dict[str, Any]) -> None:
    """Writes a checkpoint with a digest, so that ``restore`` finds a flipped bit."""
    with _explained(manager.directory / str(step), "written", "--resume goes on from the one before."):
        manager.save(step, args=ocp.args.StandardSave(done), custom_metadata={"sha256": digest(done)})


def restore(manager: ocp.CheckpointManager, step: int, like: dict[str, Any]) -> dict[str, Any]:
    """Reads a checkpoint and checks its digest."""
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    advice = "delete that folder to go on from an older one."
    with _explained(manager.directory / str(step), "read", advice):
        done = manager.restore(step, args=ocp.args.StandardRestore(abstract))
        if digest(done) != manager.metadata(step).custom_metadata["sha256"]:
            raise ValueError("its checksum does not match")
    return done
