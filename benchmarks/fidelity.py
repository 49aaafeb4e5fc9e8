"""How far does the validation loss of FP8 training lie from that of bf16, and from chance?

Run ``make bench-fidelity``; ``ARGS=--help`` for the options. It takes hours on two cores. Each run is
written to the results as it ends, and a run that is there already is not repeated: stop the script and
start it again as you like. ``--workers`` models train at the same time.

The model is the demo's, a Transformer on bytes with 4 layers; AdamW, warm-up and cosine decay over all
steps. small: width 64, batches of 8 windows of 64 bytes. demo: width 128, 16 windows of 128 bytes. The data
are Python's standard library.

All 25 linear layers are in FP8 unless said; activations are bfloat16, parameters float32.

Runs of one seed start from the same weights and see the same batches.

Another processor adds numbers in another order, so each run is compared with the bf16 run of its seed on
the same kind of processor.

bf16-chance = bf16 from first weights that are each multiplied by 1 + 0.001 times a normal number. Two runs
of one program give the same bits, so this is what chance does.

validation_loss = the mean loss of 32,768 held-out bytes after the last step, in nats per byte.

loss_in_bf16 = the same of the same weights, computed in bf16; loss_in_fp8 = computed with all layers in FP8
and current scaling.

emulated = FP8 written from the specification, in float32, without fp8flax; -13-bits, -9-bits = the sums of
dgrad and wgrad cut to so many bits of mantissa after each 32 products.

nvfp4 = fp8.NVFP4BlockScaling() in all 25 layers; nvfp4-mlps = in the 8 of the MLPs alone; not-rotated,
nearest = without rotation, without stochastic rounding; then-bf16 = the last fifth of the steps, and the
validation, in bf16; four-over-six = the block scale that errs less, of those that map the largest value
to 6 and to 4 (arXiv:2512.02010), where rounding is to the nearest; only commit a4084c93 can run it.

first-attention-wide, wide-block-0 and others = delayed, with these layers in bf16; wide-forward-input and
others = delayed, with one operand of one GEMM of all layers not cast to FP8, so that this GEMM runs in
bf16; rowwise-input = delayed, with a scale for each row of the input in the forward product.

flax-direct, flax-qdq = flax.linen.fp8_ops.Fp8DirectDotGeneralOp and Fp8DotGeneralOp, in Flax's own
TrainState.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import fp8_ops as flax_ops
from flax.training.train_state import TrainState as FlaxTrainState

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Row
from benchmarks.emulation import EmulatedDotGeneral
from fp8flax.demo import training
from fp8flax.demo.data import load_corpus, train_batch, validation_batches
from fp8flax.demo.model import ByteTransformer
from fp8flax.demo.training import Settings, make_optimizer

RESULT = common.RESULTS / "fidelity.json"
QUESTION, METHOD = common.question_and_method(__doc__)
SMALL = Settings(steps=2000, width=64, length=64, batch_size=8, validation_batches=64)
Corpus = tuple[np.ndarray, np.ndarray]
"""The bytes for training and for validation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to train: a recipe, an op of others, or bf16."""

    recipe: fp8.Recipe | None = None
    exclude: str | tuple[str, ...] = ()
    """Layers that stay in bf16, as ``quantize_model`` takes them."""
    op: Any = None
    """The ``dot_general_cls`` of all linear layers."""
    is_flax: bool = False
    perturbation: float = 0.0
    low_precision_until: float = 1.0
    """The share of the steps after which training goes on in bf16."""

    def model(self, settings: Settings) -> nn.Module:
        """Returns the model."""
        model = ByteTransformer(
            width=settings.width,
            num_layers=settings.num_layers,
            max_length=settings.length,
            dot_general_cls=self.op,
        )
        if self.recipe is None:
            return model
        return fp8.quantize_model(model, self.recipe, include=".*", exclude=self.exclude)


def _without(gemm: str, side: str) -> fp8.Recipe:
    """Returns delayed scaling, but that one operand of one GEMM is not cast to FP8."""
    gemms = fp8.DelayedScaling().gemms
    return dataclasses.replace(gemms, **{gemm: dataclasses.replace(getattr(gemms, gemm), **{side: None})})


def _with_rowwise_input() -> fp8.Recipe:
    """Returns delayed scaling, but with a scale for each row of the input in the forward product."""
    gemms, rows = fp8.DelayedScaling().gemms, fp8.Float8CurrentScaling(granularity="axiswise").gemms
    return dataclasses.replace(gemms, forward=dataclasses.replace(gemms.forward, lhs=rows.forward.lhs))


_PRODUCTS = {
    "forward": ("input", "kernel"),
    "dgrad": ("output-grad", "kernel"),
    "wgrad": ("input", "output-grad"),
}
_LAYERS = ("query", "key", "value", "out", "up", "down")
_PARTS = {
    **{f"wide-{layer}": f"/{layer}$" for layer in _LAYERS},
    "wide-logits": "logits",
    **{f"wide-block-{i}": f"block_{i}/" for i in (0, 2, 3)},
}
WIDE = {
    **{
        f"wide-{gemm}-{operand}": Contender(recipe=_without(gemm, side))
        for gemm, operands in _PRODUCTS.items()
        for side, operand in zip(("lhs", "rhs"), operands, strict=True)
    },
    **{name: Contender(recipe=fp8.DelayedScaling(), exclude=pattern) for name, pattern in _PARTS.items()},
}
"""Delayed scaling, but for one cast of all layers, or for some layers."""

CONTENDERS = {
    "bf16": Contender(),
    "bf16-chance": Contender(perturbation=1e-3),
    **{name: Contender(recipe=recipe) for name, recipe in training.RECIPES.items()},
    "flax-direct": Contender(op=flax_ops.Fp8DirectDotGeneralOp, is_flax=True),
    "flax-qdq": Contender(op=flax_ops.Fp8DotGeneralOp, is_flax=True),
    "emulated": Contender(op=EmulatedDotGeneral),
    "emulated-13-bits": Contender(op=partial(EmulatedDotGeneral, bits_of_sums=13)),
    "emulated-9-bits": Contender(op=partial(EmulatedDotGeneral, bits_of_sums=9)),
    "nvfp4": Contender(recipe=fp8.NVFP4BlockScaling()),
    "nvfp4-mlps": Contender(recipe=fp8.NVFP4BlockScaling(), exclude=("attn", "logits")),
    "nvfp4-not-rotated": Contender(recipe=fp8.NVFP4BlockScaling(disable_rht=True)),
    "nvfp4-nearest": Contender(recipe=fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)),
    "nvfp4-then-bf16": Contender(recipe=fp8.NVFP4BlockScaling(), low_precision_until=0.8),
    "first-attention-wide": Contender(recipe=fp8.DelayedScaling(), exclude="block_0/attn"),
    "rowwise-input": Contender(recipe=_with_rowwise_input()),
    "rowwise-input-first-attention-wide": Contender(recipe=_with_rowwise_input(), exclude="block_0/attn"),
    **WIDE,
}
IN_FP8 = Contender(recipe=fp8.Float8CurrentScaling())


def initial_state(contender: Contender, seed: int, settings: Settings) -> Any:
    """Returns a train state: for each seed the same weights, but for the perturbation."""
    tokens, key = jnp.zeros((1, settings.length), jnp.int32), jax.random.key(seed)
    variables = Contender().model(settings).init(key, tokens)
    model = contender.model(settings)
    if contender.perturbation:
        rng = np.random.default_rng(seed)
        variables = jax.tree.map(
            lambda p: p * (1 + contender.perturbation * rng.standard_normal(p.shape, np.float32)), variables
        )
    rest = {k: v for k, v in model.init(key, tokens).items() if k != "params"}
    kind = FlaxTrainState if contender.is_flax else fp8.TrainState
    tx = make_optimizer(settings)
    return kind.create(apply_fn=model.apply, params={**variables, **rest}, tx=tx)


def loss(variables: Any, apply: Callable[..., Any], windows: jax.Array) -> jax.Array:
    """Returns the loss on windows of shape ``(batch, length + 1)``."""
    return training.loss_of(apply(variables, windows[:, :-1]), windows[:, 1:])


def step_of(contender: Contender) -> Callable[[Any, jax.Array, jax.Array], Any]:
    """Returns the training step of a contender; its key is for stochastic rounding."""
    differentiated: Callable[..., Any] = (jax if contender.is_flax else fp8).value_and_grad

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, windows: jax.Array, key: jax.Array) -> Any:
        apply = partial(state.apply_fn, rngs={"fp8": key})
        _, grads = differentiated(loss)(state.params, apply, windows)
        return state.apply_gradients(grads=grads)

    return step


def train(contender: Contender, seed: int, settings: Settings, corpus: Corpus) -> Row:
    """Trains one model and returns its losses."""
    began = time.perf_counter()
    state, step = initial_state(contender, seed, settings), step_of(contender)
    text, held_out_text = corpus
    sizes = settings.batch_size, settings.length
    held_out = validation_batches(held_out_text, settings.validation_batches, *sizes)

    def validation_loss(apply: Callable[..., Any], variables: Any) -> float:
        evaluate = jax.jit(partial(loss, apply=apply))
        return float(np.mean([float(evaluate(variables, windows=windows)) for windows in held_out]))

    for i in range(settings.steps):
        windows, key = jnp.asarray(train_batch(text, seed, i, *sizes)), jax.random.key(seed)
        with fp8.autocast(enabled=i < contender.low_precision_until * settings.steps):
            state = step(state, windows, jax.random.fold_in(key, i))
    weights = {"params": state.params["params"]}
    with fp8.autocast(enabled=contender.low_precision_until == 1):
        found = validation_loss(state.apply_fn, state.params)
    return {
        "validation_loss": found,
        "loss_in_bf16": validation_loss(Contender().model(settings).apply, weights),
        "loss_in_fp8": validation_loss(IN_FP8.model(settings).apply, weights),
        "minutes": (time.perf_counter() - began) / 60,
    }


# Runs, in processes of their own.


def _processor() -> str:
    """Identifies the kind of processor: equal ones give the same bits."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text().split("\n\n")[0] if cpuinfo.exists() else platform.processor()
    lines = text.splitlines()
    kind = [line for line in lines if line.startswith(("model", "flags"))] or lines
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:8]


def _trained(name: str, seed: int, settings: Settings) -> Row:
    """Trains one model; returns the row of the results."""
    corpus = load_corpus(None, settings.length)
    with common.quiet(), jax.numpy_rank_promotion("allow"):
        done = train(CONTENDERS[name], seed, settings, corpus)
    return {
        "contender": name,
        "seed": seed,
        "size": "small",
        "steps": settings.steps,
        "processor": _processor(),
        **done,
        "corpus": hashlib.sha256(b"|".join(text.tobytes() for text in corpus)).hexdigest()[:12],
        "jax": jax.__version__,
    }


# The report.


def compared(runs: Sequence[Row], steps: int = SMALL.steps, base: str = "bf16") -> list[Row]:
    """Returns for each contender how far it lies above another one of the same seed and processor.

    ``steps`` is the length of the runs, ``base`` the other contender. Each row has ``contender``,
    ``seeds``, ``percent`` (of each seed), its ``mean``, and the standard ``error`` of the mean, which is
    None for one seed.
    """
    losses = {
        (r["contender"], r["seed"], r.get("processor", "")): r["validation_loss"]
        for r in runs
        if (r["size"], r["steps"]) == ("small", steps)
    }
    rows = []
    # Also contenders that only an earlier commit could run.
    for name in dict.fromkeys([*CONTENDERS, *(r["contender"] for r in runs)]):
        found = sorted(key[1:] for key in losses if key[0] == name and (base, *key[1:]) in losses)
        if not found:
            continue
        percent = [100 * (losses[name, *key] / losses[base, *key] - 1) for key in found]
        rows.append(
            {
                "contender": name,
                "seeds": [seed for seed, _ in found],
                "percent": percent,
                "mean": statistics.mean(percent),
                "error": statistics.stdev(percent) / len(percent) ** 0.5 if len(percent) > 1 else None,
            }
        )
    return rows


def mean_of(row: Row) -> str:
    """Returns the mean over seeds, in percent, and its standard error, as the pages write them."""
    error = "" if row["error"] is None else f" ± {row['error']:.2f}"
    return f"{row['mean']:+.2f}{error} %".replace("-", "\N{MINUS SIGN}")


COLUMNS: common.Columns = {
    "": lambda row: f"`{row['contender']}`",
    "seeds": lambda row: str(len(row["seeds"])),
    "loss above bf16": mean_of,
}


def table(runs: Sequence[Row], steps: int = SMALL.steps) -> str:
    """Returns the first table of docs/accuracy.md: how far contenders lie above bf16."""
    rows = compared(runs, steps)[1:]
    return common.markdown(COLUMNS, [row for row in rows if row["contender"] not in WIDE])


def table_of_wide(runs: Sequence[Row]) -> str:
    """Returns the second table of docs/accuracy.md: delayed scaling where one part of it is wide."""
    columns = {**dict(list(COLUMNS.items())[:2]), "beside `delayed`": mean_of}
    rows = compared(runs, base="delayed")
    return common.markdown(columns, [row for row in rows if row["contender"] in WIDE])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench-fidelity", description=QUESTION)
    parser.add_argument("--steps", type=int, default=SMALL.steps, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTENDERS), default=tuple(CONTENDERS))
    parser.add_argument("--workers", type=int, default=2, help="models that train at once (%(default)s)")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="PATH", help="(%(default)s)")
    options = parser.parse_args(argv)
    settings = dataclasses.replace(SMALL, steps=options.steps)
    report = common.begin(QUESTION, METHOD, common.machine((*common.PACKAGES, "optax")), runs=[])
    if options.json.exists():
        report["runs"] = json.loads(options.json.read_text())["runs"]
    same = {"size": "small", "steps": settings.steps, "processor": _processor()}
    jobs = [{"contender": name, "seed": seed, **same} for seed in options.seeds for name in options.only]
    jobs = [job for job in jobs if not any(job.items() <= old.items() for old in report["runs"])]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        tasks = [pool.submit(_trained, job["contender"], job["seed"], settings) for job in jobs]
        for task in concurrent.futures.as_completed(tasks):
            done = task.result()
            report["runs"].append(done)
            print(f"\n{done['contender']}, seed {done['seed']}: {done['validation_loss']:.4f}")
            common.write(report, options.json)
    print(f"\n{table(report['runs'], settings.steps)}")


if __name__ == "__main__":
    main()
