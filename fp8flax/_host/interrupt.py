"""Ctrl-C while a command of this package, ``python -m fp8flax …``, still imports: one line, and the end.

Libraries in C++ that are interrupted by an exception as they start abort, or go on.
"""

import os
import signal
import sys
from typing import NoReturn


def _leave(*_: object) -> None:
    os.write(2, b"fp8flax: interrupted\n")
    os._exit(130)


def raise_from_now_on() -> None:
    """Makes Ctrl-C a ``KeyboardInterrupt`` again: for a command that has imported what it needs."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(status: int) -> NoReturn:
    """Ends the process of a command with an exit status."""
    if status == 130:  # threads of libraries may be at work, and crash where Python ends under them
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)  # not by sys.exit, which an audited program may have replaced


def _is_command() -> bool:
    """Tells whether this process is a command of this package, which calls ``raise_from_now_on``."""
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:  # while Python looks for the module to run
        return sys.orig_argv[sys.orig_argv.index("-m") + 1] in ("fp8flax", "fp8flax.audit", "fp8flax.demo")
    return os.path.basename(sys.argv[0] if sys.argv else "") == "fp8flax"  # the console script


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
