"""Computes the part of a loop's body that is the same in each iteration once, before the loop.

Why: the microbatches of a step share the kernels of the model, whose codes need be computed once. XLA does
not move them out of a loop by itself.

Internals: ``jax._src.interpreters.partial_eval``, whose ``partial_eval_jaxpr_custom`` splits a program into
what depends on known operands alone and the rest (``jax.checkpoint`` splits a forward pass with it), and
``jax.extend.core``, to run both. Without them each iteration computes everything. The values are the same;
a step of many microbatches is slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

_split: Any = None
"""Splits a program; None if JAX lacks a part."""

try:
    from jax._src.interpreters import partial_eval
    from jax.extend.core import jaxpr_as_fun

    _split = partial_eval.partial_eval_jaxpr_custom
except (ImportError, AttributeError):
    pass


def hoisted(
    f: Callable[[Any, Any], Any], invariant: Any, example: Any, is_kept: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Returns ``lambda varying: f(invariant, varying)``, of which some results are computed now.

    Args:
        f: a function of two trees of arrays.
        invariant: the first tree.
        example: a second tree, with the shapes and dtypes of those that will come.
        is_kept: a policy of ``jax.checkpoint``: which results that depend on ``invariant`` alone are
            computed now. The returned function computes all others.
    """
    if _split is None:
        return lambda varying: f(invariant, varying)
    fixed, varying = jax.tree.leaves(invariant), jax.tree.leaves(example)
    closed, out = jax.make_jaxpr(f, return_shape=True)(invariant, example)
    is_unknown = [False] * len(fixed) + [True] * len(varying)
    try:
        known, rest, *_ = _split(closed.jaxpr, is_unknown, True, True, True, is_kept)
    except (NotImplementedError, ValueError):
        # The program has a primitive that jax.checkpoint could not split either, or a mutable array.
        return lambda varying: f(invariant, varying)
    kept = jaxpr_as_fun(closed.replace(jaxpr=known))(*fixed)
    treedef = jax.tree.structure(out)

    def with_rest(varying: Any) -> Any:
        args = *kept, *fixed, *jax.tree.leaves(varying)
        return treedef.unflatten(jaxpr_as_fun(closed.replace(jaxpr=rest))(*args))

    return with_rest
