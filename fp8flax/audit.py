"""Keeps ``python -m fp8flax.audit`` working, which is now ``python -m fp8flax audit``."""

import sys
from typing import Any

import fp8flax

if __name__ == "__main__":
    from fp8flax.__main__ import leave, main

    leave(main(["audit", *sys.argv[1:]]))

# ``import fp8flax.audit`` would otherwise replace the function of the same name with this module.
_modules: dict[str, Any] = sys.modules
_modules[__name__] = fp8flax.audit
