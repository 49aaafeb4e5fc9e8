"""Checks of options: what passes, and errors that name the option."""

import numpy as np
import pytest

from fp8flax._core.options import (
    check_bool,
    check_choice,
    check_epsilon,
    check_int,
)


@pytest.mark.parametrize(
    ("check", "args"),
    [
        (check_choice, ("a", ("a", "b"))),
        (check_epsilon, (0,)),
        (check_epsilon, (float(np.finfo(np.float32).tiny),)),
        (check_epsilon, (np.float32(10),)),
        (check_epsilon, (np.int32(3),)),
        (check_bool, (False,)),
    ],
)
def test_what_passes(check, args):
    assert check("option", *args) is None


@pytest.mark.parametrize("value", [1, 16, np.int64(16), np.uint8(2), np.array(3)])
def test_an_integer_becomes_an_int(value):
    passed = check_int("option", value, 1, 16)
    assert type(passed) is int
    assert passed == value


@pytest.mark.parametrize(
    ("check", "args", "error", "message"),
    [
        (check_choice, ("c", ("a", "b")), ValueError, "option .*'c'"),
        (check_choice, (1, ("a",)), ValueError, "got 1"),
        (check_int, (True, 0), TypeError, "option .*bool"),
        (check_int, (1.0, 0), TypeError, "option .*float"),
        (check_int, (np.bool_(True), 0), TypeError, "of type bool"),
        (check_int, (np.ones(1, int), 0), TypeError, "of type ndarray"),
        (check_int, (0, 1), ValueError, "option .*1 or more"),
        (check_int, (17, 1, 16, "Why."), ValueError, r"option .*16 or less.*Why\."),
        (check_epsilon, ("0",), TypeError, "option .*str"),
        (check_epsilon, (1e-40,), ValueError, "option .*1e-40"),
        (check_epsilon, (-1.0,), ValueError, "got -1.0"),
        (check_epsilon, (float("nan"),), ValueError, "got nan"),
        (check_epsilon, (True,), TypeError, "option .*bool"),
        (check_bool, (1,), TypeError, "option .*int"),
    ],
)
def test_errors_name_the_option(check, args, error, message):
    with pytest.raises(error, match=message):
        check("option", *args)
