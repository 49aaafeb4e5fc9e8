"""Runs the command: ``python -m fp8flax.audit --help``."""

import os

from fp8flax.audit.command import main

if __name__ == "__main__":
    # JAX would look for CUDA's libraries as it starts; the compiler does not need them.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    raise SystemExit(main())  # not by sys.exit, which the program may have replaced
