"""One training run of the demo: model, optimizer, checkpoints and what is recorded on the way."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import fp8flax as fp8
from fp8flax.demo.data import Corpus, DemoError, train_batch, validation_batches
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
"""What ``--recipe`` offers, by name."""
WIDE = r"block[_/]0/attn"
"""Layers that stay in bf16: the attention of the first block, to which the loss is most sensitive."""
ROLES = ("input", "kernel", "output_grad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that determines the numbers of a run."""

    steps: int = 300
    batch_size: int = 16
    length: int = 128
    width: int = 128
    num_layers: int = 4
    learning_rate: float = 2e-3
    validation_batches: int = 16
    checkpoint_every: int = 50
    recipe: str = "delayed"
    """A name in ``RECIPES``, for FP8."""
    api: str = "linen"
    """In which of Flax's APIs the model is written."""

    @property
    def evaluation_steps(self) -> list[int]:
        """Steps after which the validation loss is taken: eight or fewer, the last included."""
        return sorted({-(-self.steps * i // 8) for i in range(1, 9)})


@dataclasses.dataclass
class Record:
    """What one run leaves behind; arrays are indexed by step."""

    precision: str
    seed: int
    train_loss: np.ndarray
    validation_steps: list[int]
    validation_loss: np.ndarray
    ops: list[str]
    """Paths of the layers with scaling state; empty for bf16 and for recipes without state."""
    scale: np.ndarray
    """``(steps, len(ops), 3)``: the scale used in each step, per layer and role."""
    amax: np.ndarray
    """``(steps, len(ops), 3)``: the amax seen in each step."""
    step_seconds: list[float]
    """Wall time of the steps of this process, without the first, which compiles."""


@functools.cache  # one object per setting: another seed then reuses the compiled step
def make_model(precision: str, settings: Settings) -> nn.Module:
    """Returns the demo's model; with ``precision="fp8"`` all linear layers but ``WIDE`` multiply in FP8."""
    model = ByteTransformer(
        width=settings.width, num_layers=settings.num_layers, max_length=settings.length
    )
    if precision != "fp8":
        return model
    return fp8.quantize_model(model, RECIPES[settings.recipe], include=".*", exclude=WIDE)


@functools.cache
def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay and clipping."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, max(1, settings.steps // 10), max(2, settings.steps), 1e-5
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))


def make_state(precision: str, seed: int, settings: Settings) -> fp8.TrainState:
    """Returns the train state at step 0: for each seed the same weights in both precisions."""
    tokens = jnp.zeros((1, settings.length), jnp.int32)
    variables = make_model("bf16", settings).init(jax.random.key(seed), tokens)
    model = make_model(precision, settings)
    if precision == "fp8":
        variables = fp8.add_fp8_state(variables, model, tokens)
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=make_optimizer(settings))


def loss_of(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy in nats per byte."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def fp8_ops(variables: Any) -> list[str]:
    """Returns the paths of the layers with scaling state in a dict of variables, sorted."""
    flat = flax.traverse_util.flatten_dict(variables.get(fp8.OVERWRITE_WITH_GRADIENT, {}))
    return sorted({"/".join(path[:-2]) for path in flat})


def scaling_of(variables: Any) -> jax.Array:
    """Returns the scale and the newest amax per FP8 layer and role, shape ``(2, layers, 3)``."""
    flat = flax.traverse_util.flatten_dict(variables.get(fp8.OVERWRITE_WITH_GRADIENT, {}), sep="/")
    ops = sorted({path.rsplit("/", 1)[0] for path in flat})
    values = [
        [[flat[f"{op}/{role}_{leaf}"][0] for role in ROLES] for op in ops]
        for leaf in ("scale", "amax_history")
    ]
    return jnp.array(values, jnp.float32).reshape(2, len(ops), 3)


def _loss(variables: Any, state: fp8.TrainState, windows: jax.Array) -> jax.Array:
    return loss_of(state.apply_fn(variables, windows[:, :-1]), windows[:, 1:])


@partial(jax.jit, donate_argnums=0)
def train_step(state: fp8.TrainState, windows: jax.Array) -> tuple[fp8.TrainState, jax.Array, jax.Array]:
    """Takes one step on windows ``(batch, length + 1)``; returns ``(state, loss, scaling)``."""
    loss, grads = fp8.value_and_grad(_loss)(state.params, state, windows)
    state = state.apply_gradients(grads=grads)
    return state, loss, scaling_of(state.params)


@jax.jit
def evaluate(state: fp8.TrainState, windows: jax.Array) -> jax.Array:
    """Returns the loss on windows ``(batch, length + 1)`` without touching the state."""
    return _loss(state.params, state, windows)


@jax.jit
def measure(state: fp8.TrainState, windows: jax.Array) -> Any:
    """Returns statistics of each FP8 tensor of a step on windows ``(batch, length + 1)``."""
    return fp8.statistics(_loss)(state.params, state, windows)


class Api(NamedTuple):
    """How the demo is written in one of Flax's APIs; a state is a tree of arrays."""

    make_state: Callable[[str, int, Settings], Any]
    train_step: Callable[[Any, Any], tuple[Any, jax.Array, jax.Array]]
    evaluate: Callable[[Any, Any], jax.Array]
    measure: Callable[[Any, Any], Any]
    variables: Callable[[Any], Any]
    """Those in a state, as Linen has them."""


LINEN = Api(make_state, train_step, evaluate, measure, lambda state: state.params)


def train(
    api: Api,
    precision: str,
    seed: int,
    settings: Settings,
    corpus: Corpus,
    checkpoints: Path,
    on_step: Callable[[int, float, float], None],
    before_step: Callable[[int, Callable[[], Any], Callable[[], Any]], None] = lambda *given: None,
) -> Record:
    """Trains from the newest checkpoint under ``checkpoints``, or from the start.

    Args:
        api: what the model is written in.
        precision: ``"bf16"`` or ``"fp8"``.
        seed: seed of the weights and of the batches.
        settings: sizes and length of the run.
        corpus: the bytes.
        checkpoints: a folder for this run's checkpoints.
        on_step: called after each step with the number of steps done, the loss and the step's seconds.
        before_step: called with the number of the step to come, from 1, a function that returns the
            statistics of its FP8 tensors, and one that returns the variables.

    Raises:
        DemoError: a checkpoint cannot be read, or not be written.
    """
    state = api.make_state(precision, seed, settings)
    held_out = validation_batches(corpus, settings.validation_batches, settings.batch_size, settings.length)
    eval_steps = settings.evaluation_steps
    ops = fp8_ops(api.variables(state))
    done: dict[str, Any] = {
        "state": state,
        "train_loss": np.full(settings.steps, np.nan, np.float32),
        "validation_loss": np.full(len(eval_steps), np.nan, np.float32),
    }
    if ops:
        done["scaling"] = np.zeros((settings.steps, 2, len(ops), 3), np.float32)
    step_seconds: list[float] = []
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(checkpoints.absolute(), options=options) as manager:
        start = manager.latest_step() or 0
        if start:
            done = _restore(manager, start, done)
        for step in range(start, settings.steps):
            windows = train_batch(corpus, seed, step, settings.batch_size, settings.length)
            looked_at = partial(api.measure, done["state"], windows), partial(api.variables, done["state"])
            before_step(step + 1, *looked_at)
            began = time.perf_counter()
            done["state"], loss, scaling = api.train_step(done["state"], windows)
            done["train_loss"][step] = loss
            if ops:
                done["scaling"][step] = scaling
            seconds = time.perf_counter() - began
            if step > start:
                step_seconds.append(seconds)
            if step + 1 in eval_steps:
                losses = [float(api.evaluate(done["state"], w)) for w in held_out]
                done["validation_loss"][eval_steps.index(step + 1)] = np.mean(losses)
            if (step + 1) % settings.checkpoint_every == 0 or step + 1 == settings.steps:
                _save(manager, step + 1, done)
            on_step(step + 1, float(loss), seconds)
    scaling_trace = np.asarray(done.get("scaling", np.zeros((settings.steps, 2, 0, 3))))
    return Record(
        precision=precision,
        seed=seed,
        train_loss=np.asarray(done["train_loss"]),
        validation_steps=eval_steps,
        validation_loss=np.asarray(done["validation_loss"]),
        ops=ops,
        scale=scaling_trace[:, 0],
        amax=scaling_trace[:, 1],
        step_seconds=step_seconds,
    )


def digest(tree: Any) -> str:
    """Returns the SHA-256 of all leaves of a tree: places, dtypes, shapes and bytes."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(jnp.asarray(leaf))  # a step is an int before the first, and when restored
        sha.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _save(manager: ocp.CheckpointManager, step: int, done: dict[str, Any]) -> None:
    try:
        manager.save(step, args=ocp.args.StandardSave(done), custom_metadata={"sha256": digest(done)})
    except Exception as error:  # which of them it is depends on the file system
        for left in Path(manager.directory).glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)
        raise DemoError(
            f"the checkpoint {manager.directory / str(step)} cannot be written ({_reason(error)}); "
            "--resume goes on from the one before."
        ) from error


def _restore(manager: ocp.CheckpointManager, step: int, like: dict[str, Any]) -> dict[str, Any]:
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    try:
        done = manager.restore(step, args=ocp.args.StandardRestore(abstract))
        written = (manager.metadata(step).custom_metadata or {}).get("sha256")  # none in older runs
        if written is not None and digest(done) != written:
            raise ValueError("its checksum does not match")
    except Exception as error:
        raise DemoError(
            f"the checkpoint {manager.directory / str(step)} cannot be read ({_reason(error)}); delete "
            "that folder to go on from an older one."
        ) from error
    # Orbax may hand back read-only buffers; these are written to in place.
    return {k: v if k == "state" else np.array(v) for k, v in done.items()}
