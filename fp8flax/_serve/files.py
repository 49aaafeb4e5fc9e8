"""Replaces files atomically: after any failure a path holds the whole old file or the whole new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path; at the end the file that was written there replaces ``path``.

    The new file is flushed to the disk first. If the block raises an error, ``path`` does not change and
    the temporary file is removed. A process that is killed leaves the temporary file. Its name begins with
    a dot and ends in ``.tmp``. Symbolic links are followed. A pipe, ``/dev/stdout`` or another path that is
    no regular file cannot be replaced; ``path`` itself is then yielded.

    Raises:
        OSError: the file cannot be written; the error names ``path``.
    """
    path = Path(path)
    # /dev/stdout may be a regular file that another process holds open.
    is_special = (path.exists() and not path.is_file()) or str(path).startswith(("/dev/std", "/dev/fd/"))
    if not is_special:
        path = path.resolve()
    new = path if is_special else path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.tmp")
    try:
        yield new
        if is_special:
            return
        _to_disk(new)
        with contextlib.suppress(FileNotFoundError):
            new.chmod(path.stat().st_mode & 0o7777)
        new.replace(path)
    except BaseException as error:
        if not is_special:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(new)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    with contextlib.suppress(OSError):  # some file systems cannot flush a folder; the file is safe already
        _to_disk(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by one that holds ``text`` in UTF-8.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as new:
        new.write_text(text, encoding="utf-8")


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
