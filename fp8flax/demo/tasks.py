"""The three tasks: a language model on bytes, the sentiment of film reviews, and images of digits."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

import fp8flax as fp8
from fp8flax.demo import data
from fp8flax.demo.data import Corpus, DemoError, Examples
from fp8flax.demo.model import ByteTransformer, ReviewClassifier, VisionTransformer
from fp8flax.demo.training import RECIPES, Task

RUNS = Path("runs")
WIDE = r"block_0/attn"
"""The layers of the language model that stay in bf16: the loss is most sensitive to its first attention."""
EVALUATION_BATCH = 256


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


def _schedule(peak: float, steps: int, end: float) -> optax.Schedule:
    """Returns learning rates with warm-up and cosine decay."""
    return optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 10), max(2, steps), end)


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay and clipping."""
    adamw = optax.adamw(_schedule(settings.learning_rate, settings.steps, 1e-5), b2=0.98, weight_decay=0.01)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def language_model(settings: Settings, corpus: Corpus) -> Task:
    """Returns the task of predicting the next byte at each position."""
    model = ByteTransformer(
        width=settings.width, num_layers=settings.num_layers, max_length=settings.length
    )
    model8 = fp8.quantize_model(model, RECIPES[settings.recipe], include=".*", exclude=WIDE)
    sizes = (settings.batch_size, settings.length)
    held_out = data.validation_batches(corpus, settings.validation_batches, *sizes)

    def examples(windows: np.ndarray) -> Examples:
        return Examples(windows[:, :-1], windows[:, 1:])

    return Task(
        about=f"{corpus.source}: {corpus.num_files} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out",
        models={"bf16": model, "fp8": model8},
        optimizer=make_optimizer(settings),
        keys=lambda key: (key, key),
        steps=settings.steps,
        evaluations=8,
        batch=lambda seed, step: examples(data.train_batch(corpus, seed, step, *sizes)),
        held_out=lambda seed, part: [examples(windows) for windows in held_out],
    )


def classifier(
    options: Namespace,
    source: str,
    model: nn.Module,
    load: Callable[[int], dict[str, Examples]],
    epochs: int,
    batch_size: int,
    optimizer: Callable[[int], optax.GradientTransformation],
    **files: str,
) -> Task:
    """Returns the task of training a classifier; each of its layers that can be converted runs in FP8.

    The model maps inputs to logits, ``(batch, classes)``, or ``(batch, 1)`` for two classes. ``load`` maps
    a seed to the parts of the data, which have the same sizes for each seed. ``optimizer`` maps the number
    of steps to an optimizer. The files are those of ``Task``.
    """
    parts = functools.cache(load)
    sizes = {name: len(part.labels) for name, part in parts(0).items()}
    per_epoch = sizes["train"] // batch_size
    if not per_epoch:
        raise DemoError(f"{source}: {sizes['train']} to train on fill no batch, which has {batch_size}.")
    steps = options.steps or epochs * per_epoch
    model8 = fp8.quantize_model(model, RECIPES[options.recipe], include=".*")

    def batch(seed: int, step: int) -> Examples:
        epoch, place = divmod(step, per_epoch)  # an epoch leaves out the examples that fill no batch
        order = np.random.default_rng((seed, epoch)).permutation(sizes["train"])
        return parts(seed)["train"].take(order[place * batch_size : (place + 1) * batch_size])

    def held_out(seed: int, name: str) -> list[Examples]:
        part, missing = parts(seed)[name], -sizes[name] % EVALUATION_BATCH
        inputs = np.pad(part.inputs, [(0, missing)] + [(0, 0)] * (part.inputs.ndim - 1))
        labels = np.pad(part.labels, (0, missing), constant_values=-1)  # so that all batches have one shape
        rows = np.arange(len(labels)).reshape(-1, EVALUATION_BATCH)
        return [Examples(inputs, labels).take(chosen) for chosen in rows]

    test = f", {sizes['test']:,} to test" if "test" in sizes else ""
    return Task(
        about=f"{source}: {sizes['train']:,} to train on, {sizes['validation']:,} held out for "
        f"validation{test}",
        models={"bf16": model, "fp8": model8},
        optimizer=optimizer(steps),
        keys=jax.random.split,
        steps=steps,
        evaluations=-(-steps // per_epoch),
        batch=batch,
        held_out=held_out,
        accuracy_of="test" if "test" in sizes else "validation",
        files={"layers.txt": f"{fp8.report(model8, batch(0, 0).inputs)}\n", **files},
    )


def lm(options: Namespace) -> Task:
    """Returns the task ``lm``: a byte-level Transformer on text."""
    given = {"steps": options.steps} if options.steps else {}
    settings = Settings(recipe=options.recipe, **given)
    corpus = data.load_corpus(options.data, settings.length, but_not=(RUNS, Path(options.out)))
    return language_model(settings, corpus)


def imdb(options: Namespace) -> Task:
    """Returns the task ``imdb``: Keras's float8 example, the sentiment of film reviews."""
    model = ReviewClassifier()
    reviews, tokenizer = data.load_reviews(options.data, model.vocabulary, model.length)
    words, files = tokenizer.get_vocab_size(), {"tokenizer.json": tokenizer.to_str(pretty=True)}
    source, model = f"Reviews in {options.data}, {words:,} word pieces", model.clone(vocabulary=words)
    adam = optax.adam(1e-3, eps=1e-7)
    return classifier(options, source, model, lambda seed: reviews, 3, 32, lambda steps: adam, **files)


def digits(options: Namespace) -> Task:
    """Returns the task ``digits``: a Vision Transformer on the images that scikit-learn includes."""

    def optimizer(steps: int) -> optax.GradientTransformation:
        return optax.adam(_schedule(3e-3, steps, 0.0))

    source = "8×8 digits of scikit-learn"
    return classifier(options, source, VisionTransformer(), data.load_digits, 15, 64, optimizer)
