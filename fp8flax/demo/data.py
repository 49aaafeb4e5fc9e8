"""Bytes to train on: the source of the standard library, or any folder of text files."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

VALIDATION_EVERY = 10
"""Of the sorted files, each tenth is held out."""

_MAX_BYTES = 64 * 2**20
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
)


class DemoError(Exception):
    """Something that the user can put right; printed as one line, exit code 2."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Two disjoint streams of bytes, split by file."""

    source: str
    num_files: int
    train: np.ndarray
    validation: np.ndarray

    @property
    def digest(self) -> str:
        """Identifies the bytes, so that a resumed run can tell whether the data changed."""
        sha = hashlib.sha256(self.train.tobytes())
        sha.update(b"|")
        sha.update(self.validation.tobytes())
        return sha.hexdigest()[:16]


def _files(root: Path, suffix: str, skipped: frozenset[str], but_not: tuple[Path, ...]) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            s
            for s in subfolders
            if s not in skipped and not s.startswith(".") and Path(folder, s).resolve() not in but_not
        ]
        found += [Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")]
    return sorted(path for path in found if path.is_file())


def load_corpus(folder: str | None, length: int, but_not: tuple[Path, ...] = ()) -> Corpus:
    """Reads the text files under ``folder`` (None: the standard library's modules, without its tests).

    Files that cannot be read, are empty or hold a NUL byte (binary) are passed over; reading stops after
    64 MiB.

    Args:
        folder: a folder of text files, searched recursively, or None.
        length: sequence length; each of the two streams must hold more bytes than this.
        but_not: folders to leave out, such as that of the results; hidden ones always are.

    Raises:
        DemoError: the folder is missing, or holds too little text.
    """
    if folder is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = _files(root, ".py", _SKIPPED_FOLDERS, ())
        source = f"standard library of Python {sysconfig.get_python_version()}"
    else:
        root = Path(folder)
        if not folder or not root.is_dir():
            raise DemoError(f"--data: {folder!r} is not a folder.")
        paths = _files(root, "", frozenset(), tuple(path.resolve() for path in but_not))
        source = folder
    texts: list[bytes] = []
    total = 0
    for path in paths:
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if not text or b"\0" in text:
            continue
        texts.append(text)
        total += len(text)
        if total >= _MAX_BYTES:
            break
    parts = {True: b"", False: b""}
    for held_out in parts:
        parts[held_out] = b"".join(
            t for i, t in enumerate(texts) if (i % VALIDATION_EVERY == 0) == held_out
        )
    for held_out, part in parts.items():
        if len(part) <= length + 1:
            name = "validation" if held_out else "training"
            raise DemoError(
                f"{source} holds too little text: {len(texts)} readable text files, {len(part)} bytes of "
                f"{name} text; at least two files and {length + 2} bytes on each side are needed."
            )
    return Corpus(
        source=source,
        num_files=len(texts),
        train=np.frombuffer(parts[False], np.uint8),
        validation=np.frombuffer(parts[True], np.uint8),
    )


def train_batch(corpus: Corpus, seed: int, step: int, batch_size: int, length: int) -> np.ndarray:
    """Returns the windows of one step, int32 of shape ``(batch_size, length + 1)``.

    A function of seed and step alone, so a resumed run and both precisions see the same bytes.
    """
    starts = np.random.default_rng((seed, step)).integers(
        0, len(corpus.train) - length - 1, size=batch_size
    )
    return np.stack([corpus.train[s : s + length + 1] for s in starts]).astype(np.int32)


def validation_batches(corpus: Corpus, num_batches: int, batch_size: int, length: int) -> list[np.ndarray]:
    """Returns fixed windows spread evenly over the validation text, as in ``train_batch``."""
    starts = np.linspace(0, len(corpus.validation) - length - 2, num_batches * batch_size).astype(int)
    windows = np.stack([corpus.validation[s : s + length + 1] for s in starts]).astype(np.int32)
    return list(windows.reshape(num_batches, batch_size, length + 1))
