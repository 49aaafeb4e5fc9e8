"""What does an FP8 training step cost on a CPU, next to the step without FP8 and with Flax's ops?

Run ``python -m benchmarks.step_cpu``; ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax.training.train_state
import jax
import jax.extend
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops

import fp8flax as fp8
from benchmarks.common import (
    RESULTS,
    aligned,
    begin,
    compilations,
    interleaved,
    machine,
    quiet,
    ratio,
    run,
    summary,
    write,
)
from fp8flax.demo.model import VOCABULARY, ByteTransformer
from fp8flax.demo.training import loss_of

QUESTION = (
    "What does an FP8 training step cost on a CPU, where FP8 is emulated, next to the same step without "
    "FP8 and with Flax's own ops?"
)
PLAIN, FLAX_QDQ, FLAX_DIRECT, OURS = "plain", "flax-qdq", "flax-direct", "fp8flax"
BASELINES = (PLAIN, FLAX_QDQ, FLAX_DIRECT)
DTYPES = ("float32", "bfloat16")
HISTORY = 1024
RESULT = RESULTS / "step_cpu.json"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of both models, and how often trace and compilation are repeated."""

    mlp_layers: int = 6
    mlp_width: int = 512
    mlp_batch: int = 256
    transformer_layers: int = 4
    transformer_width: int = 128
    transformer_length: int = 128
    transformer_batch: int = 8
    compilations: int = 3


QUICK = Sizes(
    mlp_layers=2,
    mlp_width=16,
    mlp_batch=8,
    transformer_layers=1,
    transformer_width=16,
    transformer_length=8,
    transformer_batch=2,
    compilations=1,
)


class MLP(nn.Module):
    """Dense layers of one width with ReLU between them."""

    num_layers: int
    width: int
    dot_general_cls: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(batch, width)`` to the same shape, float32."""
        for i in range(self.num_layers):
            x = nn.relu(x) if i else x
            x = nn.Dense(self.width, dtype=self.dtype, dot_general_cls=self.dot_general_cls)(x)
        return x.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A matmul, and the train state and differentiation that its package tells its users to take."""

    dot_general_cls: Any
    train_state: Any
    value_and_grad: Callable[..., Any]


def contenders() -> dict[str, Contender]:
    flax_way = partial(
        Contender,
        train_state=flax.training.train_state.TrainState,
        value_and_grad=jax.value_and_grad,
    )
    return {
        PLAIN: flax_way(dot_general_cls=None),
        FLAX_QDQ: flax_way(dot_general_cls=partial(fp8_ops.Fp8DotGeneralOp, amax_history_length=HISTORY)),
        FLAX_DIRECT: flax_way(
            dot_general_cls=partial(fp8_ops.Fp8DirectDotGeneralOp, amax_history_length=HISTORY)
        ),
        OURS: Contender(
            dot_general_cls=partial(
                fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=HISTORY)
            ),
            train_state=fp8.TrainState,
            value_and_grad=fp8.value_and_grad,
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A model with its loss and one batch."""

    make_model: Callable[[Any, Any], nn.Module]
    """Takes ``dot_general_cls`` and the compute dtype."""
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    inputs: jax.Array
    targets: jax.Array


def tasks(sizes: Sizes) -> dict[str, Task]:
    x_key, y_key, bytes_key = jax.random.split(jax.random.key(0), 3)
    shape = (sizes.mlp_batch, sizes.mlp_width)
    windows = jax.random.randint(
        bytes_key, (sizes.transformer_batch, sizes.transformer_length + 1), 0, VOCABULARY
    )
    return {
        "mlp": Task(
            make_model=lambda dot_general_cls, dtype: MLP(
                sizes.mlp_layers, sizes.mlp_width, dot_general_cls, dtype
            ),
            loss=lambda y, target: jnp.mean((y - target) ** 2),
            inputs=jax.random.normal(x_key, shape),
            targets=jax.random.normal(y_key, shape),
        ),
        "transformer": Task(
            make_model=lambda dot_general_cls, dtype: ByteTransformer(
                width=sizes.transformer_width,
                num_layers=sizes.transformer_layers,
                max_length=sizes.transformer_length,
                dot_general_cls=dot_general_cls,
                dtype=dtype,
            ),
            loss=loss_of,
            inputs=windows[:, :-1],
            targets=windows[:, 1:],
        ),
    }


def make_loss(task: Task, state: Any, inputs: jax.Array, targets: jax.Array) -> Callable[[Any], jax.Array]:
    return lambda variables: task.loss(state.apply_fn(variables, inputs), targets)


def make_step(task: Task, contender: Contender) -> Any:
    """Returns the jitted train step; a new one each time, so that nothing of it is cached."""

    def step(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        loss_fn = make_loss(task, state, inputs, targets)
        loss, grads = contender.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    return jax.jit(step, donate_argnums=0)


def make_state(task: Task, contender: Contender, dtype: str) -> Any:
    model = task.make_model(contender.dot_general_cls, jnp.dtype(dtype))
    return contender.train_state.create(
        apply_fn=model.apply,
        params=dict(jax.jit(model.init)(jax.random.key(1), task.inputs)),
        tx=optax.adamw(1e-3),
    )


def residual_bytes(loss_fn: Callable[[Any], jax.Array], variables: Any) -> int:
    """Returns the bytes of the arrays that the backward pass of ``loss_fn`` keeps.

    Counted in the jaxpr of the forward half of ``jax.vjp``: each array once, and none that is an argument
    or a constant. A conversion to or from ``fp32_max_grad`` changes no bit, so it makes no new array.
    """
    forward = jax.make_jaxpr(lambda v: jax.tree.leaves(jax.vjp(loss_fn, v)[1]))(variables).jaxpr
    source: dict[Any, Any] = {}
    for eqn in forward.eqns:
        variables_of_eqn = [*eqn.invars, *eqn.outvars]
        if len(variables_of_eqn) == 2 and any(v.aval.dtype == fp8.fp32_max_grad for v in variables_of_eqn):
            before, after = variables_of_eqn
            source[after] = source.get(before, before)
    not_kept = {*forward.invars, *forward.constvars}
    handed_over = {var for var in forward.outvars if not isinstance(var, jax.extend.core.Literal)}
    kept = {source.get(var, var) for var in handed_over} - not_kept
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def measure(task: Task, dtype: str, sizes: Sizes, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the figures of one model and dtype, by contender."""
    entrants = contenders()
    names = list(entrants)
    states = {name: make_state(task, entrants[name], dtype) for name in names}
    batch = (task.inputs, task.targets)
    trace_seconds, compile_seconds, compiled = compilations(
        {name: partial(make_step, task, entrants[name]) for name in names},
        {name: (states[name], *batch) for name in names},
        sizes.compilations,
    )
    residuals = {
        name: residual_bytes(make_loss(task, state, *batch), state.params) for name, state in states.items()
    }

    def take_step(name: str) -> None:
        states[name], loss = compiled[name](states[name], *batch)
        jax.block_until_ready((states[name], loss))

    step_seconds = interleaved({name: partial(take_step, name) for name in names}, rounds)
    return {
        name: {
            "trace_seconds": summary(trace_seconds[name]),
            "compile_seconds": summary(compile_seconds[name]),
            "step_seconds": summary(step_seconds[name]),
            "step_ratio_to": {base: ratio(step_seconds[name], step_seconds[base]) for base in BASELINES},
            "residual_bytes": residuals[name],
            "step_seconds_by_round": step_seconds[name],
        }
        for name in names
    }


def method(sizes: Sizes, rounds: int) -> list[str]:
    return [
        "A step is value_and_grad of the loss, AdamW on the float32 params, and the overwrite of the "
        "scaling state; jitted, with the state donated.",
        f"Models: mlp = {sizes.mlp_layers} x nn.Dense({sizes.mlp_width}) and relu, batch "
        f"{sizes.mlp_batch}, mean squared error; transformer = the demo's ByteTransformer, "
        f"{sizes.transformer_layers} layers of width {sizes.transformer_width}, batch "
        f"{sizes.transformer_batch} x {sizes.transformer_length} bytes, cross entropy.",
        "Contenders: plain = lax.dot_general; flax-qdq = flax.linen.fp8_ops.Fp8DotGeneralOp; flax-direct = "
        "flax.linen.fp8_ops.Fp8DirectDotGeneralOp; these with Flax's TrainState and jax.value_and_grad; "
        f"fp8flax = fp8flax.Fp8DotGeneralOp, .TrainState, .value_and_grad. Amax histories of {HISTORY}.",
        f"trace = jit(step).trace(...), compile = .lower().compile(): medians of {sizes.compilations}, "
        "with JAX's caches cleared before each and no persistent cache.",
        f"step = seconds until the whole new state is ready: median (min-max) of {rounds} rounds after 2 "
        "of warm-up; in each round every contender takes one step, in rotated order.",
        "step / X = median over the rounds of (seconds of the step / seconds of X's step in that round).",
        "residuals = sum of size * itemsize over the arrays that the forward half of jax.vjp(loss, "
        "variables) hands to the backward half, in the jaxpr, before XLA: each array once (fp8 1 byte per "
        "element, fp32_max_grad 4); without variables, batch and other constants, also where their dtype "
        "was only relabelled to fp32_max_grad.",
    ]


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        (
            "model",
            "dtype",
            "contender",
            "trace s",
            "compile s",
            "step ms (min-max)",
            *(f"step / {base}" for base in BASELINES),
            "residuals KiB",
        )
    ]
    for row in results:
        step = {k: 1e3 * v for k, v in row["step_seconds"].items()}
        lines.append(
            (
                row["model"],
                row["dtype"],
                row["contender"],
                f"{row['trace_seconds']['median']:.2f}",
                f"{row['compile_seconds']['median']:.2f}",
                f"{step['median']:.2f} ({step['min']:.2f}-{step['max']:.2f})",
                *(f"{row['step_ratio_to'][base]['median']:.3f}" for base in BASELINES),
                f"{row['residual_bytes'] / 1024:.1f}",
            )
        )
    return aligned(lines, 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--rounds", type=int, default=40, help="timed steps per contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: says nothing about speed")
    parser.add_argument(
        "--out", type=Path, help=f"the JSON file to write ({RESULT}; with --quick none unless given)"
    )
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more.")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    sizes = QUICK if args.quick else Sizes()
    report = begin(
        QUESTION,
        method(sizes, args.rounds),
        machine(PACKAGES, ("cores", "load_average")),
        rounds=args.rounds,
        sizes=dataclasses.asdict(sizes),
        results=[],
    )
    for model, task in tasks(sizes).items():
        for dtype in DTYPES:
            with quiet():
                figures = measure(task, dtype, sizes, args.rounds)
            report["results"] += [
                {"model": model, "dtype": dtype, "contender": name, **figure}
                for name, figure in figures.items()
            ]
    print("\n" + table(report["results"]))
    out = args.out or (None if args.quick else RESULT)
    if out is not None:
        write(report, out)


if __name__ == "__main__":
    run(main)
