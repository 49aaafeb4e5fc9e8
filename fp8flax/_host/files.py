"""Files that are replaced whole: whatever happens, there is the old one or all of the new one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a name to write under; what is there at the end, stored for good, takes the place of ``path``.

    If anything raises, ``path`` stays as it was and what was written goes. (A process that is killed leaves
    it, under a name that begins with a dot and ends in ``.tmp``.) Links are followed; what is no regular
    file, such as a pipe or ``/dev/stdout``, cannot be replaced, and is yielded itself.

    Raises:
        OSError: the file cannot be written; it names ``path``.
    """
    path = Path(path)
    # /dev/stdout may be a file, which another process holds open.
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
    with contextlib.suppress(OSError):  # of a folder some file systems know nothing; the file is there
        _to_disk(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file by one that holds this text, in UTF-8.

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
