"""Ctrl-C while a command of this package, ``python -m fp8flax.…``, still imports: one line, and the end.

Libraries in C++ that are interrupted by an exception as they start abort, or go on.
"""

import os
import signal
import sys


def _leave(*_: object) -> None:
    os.write(2, b"fp8flax: interrupted\n")
    os._exit(130)


def raise_from_now_on() -> None:
    """Makes Ctrl-C a ``KeyboardInterrupt`` again: for a command that has imported what it needs."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# While Python looks for the module that it is to run, and imports this package, it calls the program "-m".
if (
    sys.argv[:1] == ["-m"]
    and any(argument.startswith("fp8flax.") for argument in sys.orig_argv)
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, _leave)
