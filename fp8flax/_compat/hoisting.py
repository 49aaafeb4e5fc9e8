"""Computes once, before a loop, those values of the loop's body that are the same in each iteration.

Why: the microbatches of a step share the kernels of the model, so the FP8 codes of the kernels need to be
computed only once. XLA does not move this computation out of the loop by itself.

Internals: ``jax._src.interpreters.partial_eval``, whose ``partial_eval_jaxpr_custom`` splits a program into
a part that depends on known operands only, and the rest. (``jax.checkpoint`` splits a forward pass by the
same function.) ``NamedAxisEffect`` of ``jax._src.core``, which is no side effect. ``jax.extend.core``, to
run both parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import core
from jax._src.interpreters import partial_eval
from jax.extend.core import jaxpr_as_fun


def hoisted(
    f: Callable[[Any, Any], Any], invariant: Any, example: Any, is_kept: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Returns ``lambda varying: f(invariant, varying)``; this call computes some intermediate values.

    They are those that depend on ``invariant`` only and that ``is_kept``, a policy of ``jax.checkpoint``,
    saves. The returned function computes all others. Both arguments of ``f`` are trees of arrays;
    ``example`` has the shapes and dtypes of ``varying``.
    """
    fixed, varying = jax.tree.leaves(invariant), jax.tree.leaves(example)
    closed, out = jax.make_jaxpr(f, return_shape=True)(invariant, example)
    if any(not isinstance(effect, core.NamedAxisEffect) for effect in closed.effects):
        # A side effect of a known value, such as a print, would not happen once in each iteration.
        return lambda varying: f(invariant, varying)
    is_unknown = [False] * len(fixed) + [True] * len(varying)
    try:
        known, rest, *_ = partial_eval.partial_eval_jaxpr_custom(
            closed.jaxpr, is_unknown, True, True, True, is_kept
        )
    except (NotImplementedError, ValueError):
        # The program has a primitive that jax.checkpoint could not split either, or a mutable array.
        return lambda varying: f(invariant, varying)
    kept = jaxpr_as_fun(closed.replace(jaxpr=known))(*fixed)
    of_rest, treedef = jaxpr_as_fun(closed.replace(jaxpr=rest)), jax.tree.structure(out)
    return lambda varying: treedef.unflatten(of_rest(*kept, *fixed, *jax.tree.leaves(varying)))
