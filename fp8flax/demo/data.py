"""The data of the demo: bytes of text, and film reviews."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class Corpus(NamedTuple):
    """Two disjoint streams of bytes, split by file."""

    train: np.ndarray
    validation: np.ndarray


def load_corpus(folder: str | None, length: int) -> Corpus:
    """Reads the text files under ``folder``; each tenth of them is for validation.

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
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(validation, np.uint8))


def train_batch(corpus: Corpus, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
    """Returns the windows of one step, int32 of shape ``(batch_size, length + 1)``.

    The windows depend on seed and step alone, so both precisions see the same bytes.
    """
    last = len(corpus.train) - length - 1
    starts = np.random.default_rng((seed, step)).integers(0, last, size=batch_size)
    return np.stack([corpus.train[s : s + length + 1] for s in starts]).astype(np.int32)


def validation_batches(corpus: Corpus, num_batches: int, batch_size: int, length: int) -> list[np.ndarray]:
    """Returns batches of fixed windows, evenly spread over the validation text."""
    starts = np.linspace(0, len(corpus.validation) - length - 2, num_batches * batch_size).astype(int)
    windows = np.stack([corpus.validation[s : s + length + 1] for s in starts]).astype(np.int32)
    return list(windows.reshape(num_batches, batch_size, length + 1))


class Examples(NamedTuple):
    """Inputs and their labels: arrays with the examples as their first dimension."""

    inputs: Any
    labels: Any

    def take(self, chosen: Any) -> Examples:
        """Returns the examples at the chosen indices."""
        return Examples(self.inputs[chosen], self.labels[chosen])

    def batches(self, size: int) -> list[Examples]:
        """Returns all examples in batches; the last batch may be smaller."""
        return [self.take(slice(i, i + size)) for i in range(0, len(self.labels), size)]


def make_tokenizer(texts: list[str], size: int, length: int) -> Any:
    """Returns a ``tokenizers.Tokenizer`` with at most ``size`` word pieces, learnt from ``texts``.

    The trainer numbers the characters in an order that differs from process to process, and breaks ties by
    these numbers. Here it gets the characters as special tokens, so that equal texts give equal
    vocabularies. The tokenizer converts texts to lower case, and pads or cuts them to ``length`` tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    def make(**vocabulary: Any) -> Any:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", **vocabulary))
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        return tokenizer

    characters = sorted(c for c in set().union(*(text.lower() for text in texts)) if not c.isspace())
    first = ["[PAD]", "[UNK]", *(start + c for c in characters for start in ("", "##"))]
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=first, show_progress=False)
    learning = make()
    learning.train_from_iterator(texts, trainer)
    tokenizer = make(vocab=learning.get_vocab())  # in this one the characters are ordinary pieces
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=tokenizer.token_to_id("[PAD]"), pad_token="[PAD]")
    return tokenizer


def load_reviews(folder: str | None, size: int, length: int) -> tuple[dict[str, Examples], int]:
    """Reads film reviews; returns their tokens, ``(reviews, length)``, and the size of the vocabulary.

    A fifth of the training reviews is for validation. The tokenizer learns from the other four fifths.
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
        return Examples(np.array(texts, object), labels)

    train, test = read("train"), read("test")
    order, count = np.random.default_rng(0).permutation(len(train.labels)), len(train.labels) // 5
    parts = {"train": train.take(order[count:]), "validation": train.take(order[:count]), "test": test}
    tokenizer = make_tokenizer(list(parts["train"].inputs), size, length)
    for name, (texts, labels) in parts.items():
        tokens = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        parts[name] = Examples(np.array(tokens, np.int32), labels)
    return parts, tokenizer.get_vocab_size()
