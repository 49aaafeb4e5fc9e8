import threading

import flax.linen as nn
import jax
import pytest
from flax.core import lift

import fp8flax as fp8
from fp8flax._compat.replacing import Replacing
from tests.cases import normal

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


def test_other_threads_see_no_change_while_a_converted_model_runs():
    seen, before = [], lift.pack

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            def record(groups):
                seen.append(set(groups))
                return groups

            op = nn.fp8_ops.Fp8DotGeneralOp
            layer = nn.map_variables(nn.Dense, True, record, record, init=self.is_initializing())
            return layer(4, dot_general_cls=op)(x)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            assert lift.pack is not before
            thread = threading.Thread(target=Mapped().init, args=(jax.random.key(0), normal(0, 2, 8)))
            thread.start()
            thread.join()
            return nn.Dense(4)(x)

    model8 = fp8.quantize_model(Model(), include=".*")
    model8.init(jax.random.key(0), normal(0, 2, 8))
    assert seen[-1] == {"params", fp8.OVERWRITE_WITH_GRADIENT}
    assert lift.pack is before
