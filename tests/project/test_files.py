"""A replaced file is the old one or the new one; a limit on file sizes stands for a full disk."""

import errno
import os
import resource
import signal
import stat

import pytest

from fp8flax._host.files import replacing, write_text


@pytest.fixture
def full_disk():
    """No file can grow beyond 4 KiB."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_new_and_replaced(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    write_text(path, "ä")
    assert path.read_bytes() == b"\xc3\xa4"
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    link.symlink_to(path)
    write_text(link, "b")
    assert path.read_text() == "b"
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert len(list(tmp_path.iterdir())) == 3


def test_full_disk(tmp_path, full_disk):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(OSError, match="file") as caught:
        write_text(path, "x" * 5000)
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_nothing_is_lost_at_any_step(fails, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with replacing(path) as new:
            new.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
