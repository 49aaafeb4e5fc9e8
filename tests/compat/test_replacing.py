import threading

import pytest

from fp8flax._compat.replacing import Replacing

pytestmark = pytest.mark.newest


def test_an_error_restores_the_function():
    table = {"f": len}
    with pytest.raises(ZeroDivisionError), Replacing(table, "f", lambda original: print):
        raise ZeroDivisionError
    assert table["f"] is len


def test_threads_share_the_replacement():
    table = {"f": len}
    replacing = Replacing(table, "f", lambda original: lambda x: original(x) + 1)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with replacing:
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with replacing:
        thread.start()
        entered.wait()
    assert table["f"]("ab") == 3
    leave.set()
    thread.join()
    assert table["f"] is len
