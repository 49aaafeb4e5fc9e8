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


def _is_command() -> bool:
    """Tells whether this process is a command of this package that calls ``raise_from_now_on``."""
    # So is the program called while Python looks for its module, and imports this package for that.
    if sys.argv[:1] != ["-m"] or "-m" not in sys.orig_argv:
        return False
    return sys.orig_argv[sys.orig_argv.index("-m") + 1] in ("fp8flax.audit", "fp8flax.demo")


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
