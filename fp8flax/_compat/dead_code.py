"""Finds which inputs a program that JAX has traced (a jaxpr) needs after its dead code is removed.

Why: ``freeze`` must know whether anything but an FP8 op reads a kernel. JAX has no public way to find it.

Internals: ``jax._src.interpreters.partial_eval``, whose ``dce_jaxpr`` removes dead code, also inside of
loops, branches and ``jax.checkpoint``.
"""

from __future__ import annotations

from jax._src.interpreters import partial_eval

from fp8flax._compat.jaxprs import Program


def needed_inputs(program: Program) -> list[bool]:
    """Returns for each input of a closed jaxpr whether a result of the program depends on it."""
    jaxpr = program.jaxpr
    _, needed = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(needed)
