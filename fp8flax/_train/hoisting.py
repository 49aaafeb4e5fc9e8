"""What FP8 makes of kernels alone, computed once before a loop over microbatches.

Internals: ``jax._src.interpreters.partial_eval``, whose ``partial_eval_jaxpr_custom`` splits a function
into what depends on known arguments and what does not, keeping of the former what a policy names: that is
how ``jax.checkpoint`` splits a forward pass. And ``jax.extend.core``, to run both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src.interpreters import partial_eval
from jax.extend.core import jaxpr_as_fun

from fp8flax._core.names import KERNEL_FORWARD_NAME, RESIDUAL_NAMES

_is_kept = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES, KERNEL_FORWARD_NAME)


def hoisted(f: Callable[[Any, Any], Any], invariant: Any, example: Any) -> Callable[[Any], Any]:
    """Returns ``lambda varying: f(invariant, varying)``, with the codes of kernels computed here.

    Codes, scales and amaxes of kernels that depend on ``invariant`` alone are arrays around the function
    that is returned; all else is computed in it.

    Args:
        f: a function of two trees of arrays.
        invariant: the first.
        example: a second of the shapes and dtypes that will come.
    """
    fixed, varying = jax.tree.leaves(invariant), jax.tree.leaves(example)
    closed, out = jax.make_jaxpr(f, return_shape=True)(invariant, example)
    jaxpr = closed.jaxpr
    unknown = [False] * len(fixed) + [True] * len(varying)
    try:
        known, rest, _, _, _ = partial_eval.partial_eval_jaxpr_custom(
            jaxpr, unknown, True, True, True, _is_kept
        )
    except (NotImplementedError, ValueError):
        # A primitive that jax.checkpoint could not split either, or a mutable array.
        return lambda varying: f(invariant, varying)
    kept = jaxpr_as_fun(closed.replace(jaxpr=known))(*fixed)
    treedef = jax.tree.structure(out)

    def of_rest(varying: Any) -> Any:
        args = *kept, *fixed, *jax.tree.leaves(varying)
        return treedef.unflatten(jaxpr_as_fun(closed.replace(jaxpr=rest))(*args))

    return of_rest
