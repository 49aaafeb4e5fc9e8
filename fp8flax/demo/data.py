"""The data of the demo: bytes of text."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

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
