"""The data of the demo: bytes of text, and film reviews."""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


def load_corpus(folder: str | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Reads the text files under ``folder`` as bytes: nine of ten files for training, one for validation.

    Hidden files, files with a NUL byte and folders of tests are skipped. The folder None stands for the
    modules of Python's standard library. Each stream must hold more than ``length + 1`` bytes.
    """
    root, suffix = (sysconfig.get_paths()["stdlib"], ".py") if folder is None else (folder, "")
    found = []
    for where, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n not in _SKIPPED_FOLDERS]
        found += [Path(where, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    texts = [path.read_bytes() for path in sorted(found) if path.is_file()]
    texts = [text for text in texts if text and b"\0" not in text]
    train, validation = b"".join(text for i, text in enumerate(texts) if i % 10), b"".join(texts[::10])
    if min(len(train), len(validation)) <= length + 1:
        raise ValueError(f"{root} holds too little text: {len(texts)} text files.")
    return np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8)


def train_batch(text: np.ndarray, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
    """Returns the windows of one step, int32 of shape ``(batch_size, length + 1)``.

    The windows depend on seed and step alone, so both precisions see the same bytes.
    """
    last = len(text) - length - 1
    starts = np.random.default_rng((seed, step)).integers(0, last, size=batch_size)
    return np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)


def validation_batches(
    text: np.ndarray, num_batches: int, batch_size: int, length: int
) -> list[np.ndarray]:
    """Returns batches of fixed windows, evenly spread over the validation text."""
    starts = np.linspace(0, len(text) - length - 2, num_batches * batch_size).astype(int)
    windows = np.stack([text[s : s + length + 1] for s in starts]).astype(np.int32)
    return list(windows.reshape(num_batches, batch_size, length + 1))


class Examples(NamedTuple):
    """Inputs and their labels: arrays with the examples as their first dimension."""

    inputs: Any
    labels: Any


def load_reviews(folder: str | None, vocabulary: int, length: int) -> tuple[Examples, Examples]:
    """Reads film reviews for training and for validation; returns their words as integers.

    As in Keras's IMDB data, a word is its rank among the words of the training reviews. The ranks begin
    at 2 with the most frequent word. All words from rank ``vocabulary`` on are 1. A long review keeps its
    last ``length`` words, and a short one ends in zeros.
    """
    root = folder or "aclImdb"

    def read(part: str) -> Examples:
        files = [sorted(Path(root, part, name).glob("*.txt")) for name in ("neg", "pos")]
        if not all(files):
            raise ValueError(
                f"{root} needs film reviews in {part}/neg and {part}/pos. Unpack https://ai.stanford.edu/"
                "~amaas/data/sentiment/aclImdb_v1.tar.gz, and pass the folder aclImdb as --data."
            )
        texts = [path.read_bytes().decode(errors="replace") for paths in files for path in paths]
        labels = np.repeat(np.arange(2, dtype=np.int32), list(map(len, files)))
        return Examples([re.findall(r"[\w']+", text.lower()) for text in texts], labels)

    train, validation = read("train"), read("test")
    words = Counter(word for review in train.inputs for word in review)
    ranks = {word: rank for rank, (word, _) in enumerate(words.most_common(vocabulary - 2), 2)}

    def as_integers(reviews: Examples) -> Examples:
        rows = np.zeros((len(reviews.labels), length), np.int32)
        for row, review in zip(rows, reviews.inputs):
            row[: len(review)] = [ranks.get(word, 1) for word in review[-length:]]
        return Examples(rows, reviews.labels)

    return as_integers(train), as_integers(validation)
