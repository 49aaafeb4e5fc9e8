"""Handles Ctrl-C while a command, ``python -m fp8flax …``, imports its modules: one line, then the end.

An exception would not do: a C++ library that it interrupts at its start aborts, or ignores it.
"""

import os
import signal
import sys
from typing import NoReturn


def _leave(*_: object) -> None:
    os.write(2, b"fp8flax: interrupted\n")
    os._exit(130)


def raise_from_now_on() -> None:
    """Makes Ctrl-C raise ``KeyboardInterrupt`` again; a command calls it after its imports."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(status: int) -> NoReturn:
    """Ends the process of a command with an exit status."""
    if status == 130:  # threads of libraries may still run, and crash when Python shuts down
        sys.stdout.flush()
        os._exit(status)
    raise SystemExit(status)  # an audited program may have replaced sys.exit


def _is_command() -> bool:
    """Returns whether this process runs a command of this package, which calls ``raise_from_now_on``."""
    if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:  # Python has not found the module to run yet
        return sys.orig_argv[sys.orig_argv.index("-m") + 1] in ("fp8flax", "fp8flax.audit", "fp8flax.demo")
    return os.path.basename(sys.argv[0] if sys.argv else "") == "fp8flax"  # the console script


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _leave)
