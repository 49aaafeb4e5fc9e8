"""The data of the demo: bytes of text, film reviews, and small images of digits."""

from __future__ import annotations

import dataclasses
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


class DemoError(Exception):
    """An error that the user can correct; it is printed as one line, with exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Two disjoint streams of bytes, split by file."""

    source: str
    num_files: int
    train: np.ndarray
    validation: np.ndarray


def _text_files(root: str, suffix: str, is_skipped: Callable[[Path], bool]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and not is_skipped(Path(folder, n))]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(path for path in found if path.is_file())


def load_corpus(folder: str | None, length: int, but_not: tuple[Path, ...] = ()) -> Corpus:
    """Reads the text files under ``folder``; each tenth of them is for validation.

    Args:
        folder: a folder of text files, searched recursively; files with a NUL byte are skipped. None
            stands for the modules of Python's standard library, without their tests.
        length: the sequence length; each of the two streams must hold two bytes more.
        but_not: folders to skip, such as the folder of the results; hidden folders are always skipped.

    Raises:
        DemoError: the folder is missing, or holds too little text.
    """
    if folder is None:
        source = f"standard library of Python {sysconfig.get_python_version()}"
        root = sysconfig.get_paths()["stdlib"]
        paths = _text_files(root, ".py", lambda path: path.name in _SKIPPED_FOLDERS)
    else:
        source = folder
        if not folder or not Path(folder).is_dir():
            raise DemoError(f"--data: {folder!r} is not a folder.")
        left_out = {path.resolve() for path in but_not}
        paths = _text_files(folder, "", lambda path: path.resolve() in left_out)
    texts = [text for text in (path.read_bytes() for path in paths) if text and b"\0" not in text]
    train = b"".join(text for i, text in enumerate(texts) if i % 10)
    validation = b"".join(texts[::10])
    if min(len(train), len(validation)) <= length + 1:
        raise DemoError(
            f"{source} holds too little text: {len(texts)} text files, {len(train)} bytes to train on, "
            f"{len(validation)} for validation; at least {length + 2} bytes on each side are needed."
        )
    streams = {"train": np.frombuffer(train, np.uint8), "validation": np.frombuffer(validation, np.uint8)}
    return Corpus(source=source, num_files=len(texts), **streams)


def train_batch(corpus: Corpus, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
    """Returns the windows of one step, int32 of shape ``(batch_size, length + 1)``.

    The windows depend on seed and step alone, so a resumed run and both precisions see the same bytes.
    """
    starts = np.random.default_rng((seed, step)).integers(
        0, len(corpus.train) - length - 1, size=batch_size
    )
    return np.stack([corpus.train[s : s + length + 1] for s in starts]).astype(np.int32)


def validation_batches(corpus: Corpus, num_batches: int, batch_size: int, length: int) -> list[np.ndarray]:
    """Returns batches of fixed windows, evenly spread over the validation text."""
    starts = np.linspace(0, len(corpus.validation) - length - 2, num_batches * batch_size).astype(int)
    windows = np.stack([corpus.validation[s : s + length + 1] for s in starts]).astype(np.int32)
    return list(windows.reshape(num_batches, batch_size, length + 1))


class Examples(NamedTuple):
    """Inputs and their classes: arrays with the examples as their first dimension."""

    inputs: Any
    labels: Any

    def take(self, chosen: Any) -> Examples:
        """Returns the examples at the chosen indices."""
        return Examples(self.inputs[chosen], self.labels[chosen])

    def split(self, share: float, seed: int) -> dict[str, Examples]:
        """Splits the examples at random; ``share`` of them are for validation."""
        order = np.random.default_rng(seed).permutation(len(self.labels))
        count = round(share * len(order))
        return {"train": self.take(order[count:]), "validation": self.take(order[:count])}


def load_digits(seed: int) -> dict[str, Examples]:
    """Returns scikit-learn's images, ``(1797, 8, 8, 1)`` in [-1, 1]; each seed holds out another 40 %."""
    from sklearn import datasets  # type: ignore

    digits = datasets.load_digits()
    images = (digits.images / 8 - 1).astype(np.float32)[..., None]
    return Examples(images, digits.target.astype(np.int32)).split(0.4, seed)


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


def load_reviews(folder: str | None, size: int, length: int) -> tuple[dict[str, Examples], Any]:
    """Reads film reviews; returns their tokens, ``(reviews, length)``, and the tokenizer.

    A fifth of the training reviews is for validation. The tokenizer learns from the other four fifths.

    Raises:
        DemoError: no folder is given, or it does not have the layout of ``aclImdb``.
    """
    if folder is None:
        raise DemoError(
            "imdb reads film reviews from a folder: download "
            "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz, unpack it with tar -xzf, and "
            "pass --data aclImdb."
        )
    from sklearn import datasets

    def read(part: str) -> Examples:
        options = {"encoding": "utf-8", "decode_error": "replace", "allowed_extensions": [".txt"]}
        found = datasets.load_files(Path(folder, part), categories=["neg", "pos"], shuffle=False, **options)
        if set(found.target) != {0, 1}:
            raise DemoError(f"--data: {folder} needs reviews, files *.txt, in {part}/neg and {part}/pos.")
        return Examples(np.array(found.data, object), found.target.astype(np.int32))

    parts = {**read("train").split(0.2, seed=0), "test": read("test")}
    tokenizer = make_tokenizer(list(parts["train"].inputs), size, length)
    for name, (texts, labels) in parts.items():
        tokens = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        parts[name] = Examples(np.array(tokens, np.int32), labels)
    return parts, tokenizer
