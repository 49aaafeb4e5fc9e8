"""How far the loss of a model that trains in FP8 lies from that in bf16, beside what chance does to bf16.

Each run is written to the results as it ends, and a run that is there already is not repeated: stop the
script and start it again as you like.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops as flax_ops
from flax.training.train_state import TrainState as FlaxTrainState

import fp8flax as fp8
from benchmarks.common import PACKAGES, RESULTS, Row, add_json, aligned, begin, machine, quiet, run, write
from fp8flax.demo import training
from fp8flax.demo.data import Corpus, load_corpus, train_batch, validation_batches
from fp8flax.demo.model import ByteTransformer

RESULT = RESULTS / "fidelity.json"
PERTURBATION = 1e-3
QUESTION = "How far does the validation loss of FP8 training lie from that of bf16, and from chance?"
METHOD = [
    "The model and the data are the demo's: a Transformer on bytes, 4 layers of width 128, batches of 16 "
    "windows of 128 bytes of Python's standard library, AdamW, warm-up and cosine decay over all steps. "
    "All 25 linear layers are in FP8; activations are bfloat16, parameters float32.",
    "Runs of one seed start from the same weights and see the same batches.",
    "bf16-chance = bf16 from first weights that are each multiplied by 1 + 0.001 times a normal number. "
    "Two runs of one program give the same bits, so this is what chance does.",
    "validation_loss = the mean loss of 16 held-out batches after the last step, in nats per byte.",
    "flax-direct, flax-qdq = flax.linen.fp8_ops.Fp8DirectDotGeneralOp and Fp8DotGeneralOp, in Flax's own "
    "TrainState.",
]


class Contender(NamedTuple):
    """One way to train."""

    op: Any = None
    """The ``dot_general_cls`` of all linear layers."""
    is_flax: bool = False
    perturbation: float = 0.0


CONTENDERS = {
    "bf16": Contender(),
    "bf16-chance": Contender(perturbation=PERTURBATION),
    **{
        name: Contender(op=partial(fp8.Fp8DotGeneralOp, recipe=recipe))
        for name, recipe in training.RECIPES.items()
    },
    "flax-direct": Contender(op=flax_ops.Fp8DirectDotGeneralOp, is_flax=True),
    "flax-qdq": Contender(op=flax_ops.Fp8DotGeneralOp, is_flax=True),
}


def initial_state(contender: Contender, seed: int, settings: training.Settings) -> Any:
    """Returns a train state: for each seed the same weights, but for the perturbation."""
    tokens = jnp.zeros((1, settings.length), jnp.int32)
    sized = partial(
        ByteTransformer, width=settings.width, num_layers=settings.num_layers, max_length=settings.length
    )
    variables = sized().init(jax.random.key(seed), tokens)
    model = sized(dot_general_cls=contender.op)
    if contender.perturbation:
        rng = np.random.default_rng(seed)
        variables = jax.tree.map(
            lambda p: p * (1 + contender.perturbation * rng.standard_normal(p.shape, np.float32)), variables
        )
    if contender.op is not None:
        of_fp8 = model.init(jax.random.key(seed), tokens)
        variables = {**variables, **{k: v for k, v in of_fp8.items() if k != "params"}}
    kind = FlaxTrainState if contender.is_flax else fp8.TrainState
    return kind.create(apply_fn=model.apply, params=variables, tx=training.make_optimizer(settings))


def loss(variables: Any, state: Any, windows: jax.Array) -> jax.Array:
    """Returns the loss on windows of shape ``(batch, length + 1)``."""
    return training.loss_of(state.apply_fn(variables, windows[:, :-1]), windows[:, 1:])


def step_of(contender: Contender) -> Callable[[Any, jax.Array], Any]:
    """Returns the training step of a contender."""
    differentiated: Callable[..., Any] = (jax if contender.is_flax else fp8).value_and_grad

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, windows: jax.Array) -> Any:
        _, grads = differentiated(loss)(state.params, state, windows)
        return state.apply_gradients(grads=grads)

    return step


def train(contender: Contender, seed: int, settings: training.Settings, corpus: Corpus) -> Row:
    """Trains one model and returns its losses."""
    began = time.perf_counter()
    state, step = initial_state(contender, seed, settings), step_of(contender)
    evaluate = jax.jit(lambda state, windows: loss(state.params, state, windows))
    held_out = validation_batches(corpus, settings.validation_batches, settings.batch_size, settings.length)
    losses = []
    for i in range(settings.steps):
        windows = train_batch(corpus, seed, i, settings.batch_size, settings.length)
        state = step(state, jnp.asarray(windows))
        if i + 1 in settings.evaluation_steps:
            losses.append(float(np.mean([float(evaluate(state, windows)) for windows in held_out])))
    return {
        "validation_loss": losses[-1],
        "validation_losses": dict(zip(map(str, settings.evaluation_steps), losses)),
        "minutes": (time.perf_counter() - began) / 60,
    }


def compared(runs: Sequence[Row], steps: int) -> list[Row]:
    """Returns for each contender how far it lies above bf16 of the same seed, as a mean over seeds.

    Each row has ``contender``, ``seeds``, ``percent`` and ``nats`` (of each seed), their means, and the
    standard errors of the means, which are None of one seed.
    """
    losses = {(r["contender"], r["seed"]): r["validation_loss"] for r in runs if r["steps"] == steps}
    rows = []
    for name in CONTENDERS:
        seeds = sorted(seed for contender, seed in losses if contender == name and ("bf16", seed) in losses)
        if not seeds:
            continue
        nats = [losses[name, seed] - losses["bf16", seed] for seed in seeds]
        percent = [100 * difference / losses["bf16", seed] for difference, seed in zip(nats, seeds)]
        row: Row = {"contender": name, "seeds": seeds, "loss": [losses[name, seed] for seed in seeds]}
        for unit, values in (("nats", nats), ("percent", percent)):
            row[unit], row[f"mean_{unit}"] = values, statistics.mean(values)
            row[f"error_{unit}"] = (
                statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            )
        rows.append(row)
    return rows


def signed(value: float, digits: int = 2) -> str:
    """Returns a number with its sign, as the pages write it."""
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def mean_of(row: Row) -> str:
    """Returns the mean over seeds, in percent, and its standard error, as the pages write them."""
    error = "" if row["error_percent"] is None else f" ± {row['error_percent']:.2f}"
    return f"{signed(row['mean_percent'])}{error}"


def table(runs: Sequence[Row], steps: int) -> str:
    """Returns the table of docs/accuracy.md: losses of bf16, and percent above them."""
    rows = compared(runs, steps)
    seeds = rows[0]["seeds"]
    lines = [
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean ± standard error | in nats |",
        "|---" * (len(seeds) + 3) + "|",
    ]
    for row in rows:
        if row["contender"] == "bf16":
            lines.append(f"| bf16, nats per byte | {' | '.join(f'{x:.4f}' for x in row['loss'])} | | |")
            continue
        by_seed = dict(zip(row["seeds"], row["percent"]))
        cells = [f"{signed(by_seed[seed])} %" if seed in by_seed else "" for seed in seeds]
        nats = signed(row["mean_nats"], 4)
        lines.append(f"| `{row['contender']}` | {' | '.join(cells)} | {mean_of(row)} % | {nats} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> Row:
    parser = argparse.ArgumentParser(prog="make bench-fidelity", description=__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of each run (default %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTENDERS), default=tuple(CONTENDERS))
    add_json(parser, RESULT)
    options = parser.parse_args(argv)
    path: Path = options.json
    here = machine((*PACKAGES, "optax"), ("cores",))
    report = begin(QUESTION, METHOD, here, runs=[])
    if path.exists():
        report["runs"] = json.loads(path.read_text())["runs"]
    settings = training.Settings(steps=options.steps)
    corpus = load_corpus(None, settings.length)
    for seed in options.seeds:
        for name in options.only:
            key = {"contender": name, "seed": seed, "steps": options.steps}
            if any(key.items() <= old.items() for old in report["runs"]):
                continue
            with quiet(), jax.numpy_rank_promotion("allow"):
                done = train(CONTENDERS[name], seed, settings, corpus)
            report["runs"].append({**key, **done, "corpus": corpus.digest[:12], "jax": here["jax"]})
            print(f"\n{name}, seed {seed}: {done['validation_loss']:.4f} in {done['minutes']:.1f} minutes")
            write(report, path)
    lines = [("contender", "seeds", "mean %", "error", "mean nats")]
    for row in compared(report["runs"], options.steps):
        error = row["error_percent"]
        shown = "" if error is None else f"{error:.2f}"
        percent, nats = signed(row["mean_percent"]), signed(row["mean_nats"], 4)
        lines.append((row["contender"], str(len(row["seeds"])), percent, shown, nats))
    print("\n" + aligned(lines, 1))
    return report


if __name__ == "__main__":
    run(main, JAX_PLATFORMS="cpu")
