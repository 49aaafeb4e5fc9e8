"""``report``: lists the contractions of a converted model, whether each runs in FP8, and why."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import flax.linen as nn

from fp8flax._core.names import COUNTED, NOT_CONVERTED
from fp8flax._core.ops.row import GemmSizes
from fp8flax._core.options import wrong_model
from fp8flax._linen.conversion import counting
from fp8flax._model.converted_call import seen_of
from fp8flax._model.interception import contractions_in
from fp8flax._model.model_report import SEE_AUDIT, ModelReport, table_of
from fp8flax._model.wrapped_module import trace_apply
from fp8flax._train.bridge import eval_init


def report(model: nn.Module, *args: Any, **kwargs: Any) -> ModelReport:
    """Lists every contraction of a converted model: sizes, whether it runs in FP8, and why or why not.

    Nothing is computed: the shapes come from tracing ``init`` and ``apply``. Sizes are those of one call
    with these inputs; under ``nn.vmap`` and ``jax.vmap`` they are those of the whole batch. In ``nn.scan``
    and ``nn.RNN`` a contraction counts as often as the loop runs; in ``nn.while_loop`` it counts once,
    because the number is not known. Layers that have an FP8 op by themselves are not listed.

    What a GPU runs, and a predicted time, is in the compiled program: see ``audit``.

    Args:
        model: the model that ``quantize_model`` returned.
        *args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        **kwargs: keyword inputs of the model.

    Returns:
        A ``ModelReport``; print it, or look at its ``rows``.

    Raises:
        TypeError: ``model`` does not come from ``quantize_model``.
        ValueError: a rule of ``quantize_model`` matched nothing.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(4)]))
        >>> print(fp8.report(model8, jnp.ones((8192, 4096))))
        contraction  kernel  B×M×K×N         times  % FLOPs  FP8?  why
        ---------------------------------------------------------------------------------------
        layers_0     kernel  8192×4096×1024  1      99.9     FP8   by default
        layers_2     kernel  8192×1024×4     1      0.1      no    K=1024, N=4: a size below 16
        <BLANKLINE>
        1 of 2 contractions are converted (99.9 % of their FLOPs).
    """
    if not hasattr(model, "_fp8_rules") or model._fp8_serving is not None:
        must = "come from fp8flax.quantize_model, not from freeze"
        raise wrong_model(model, must, "flax.linen", "report", SEE_AUDIT)
    with counting():
        shapes, _ = eval_init(model, args, kwargs)
        program = trace_apply(model, shapes, args, kwargs)
    decided = {site.scope: (site, decision) for site, decision in seen_of(model).decided}
    counts: Counter[tuple[str, GemmSizes]] = Counter()
    unseen = []
    for row, one in contractions_in(program):
        eqn, scopes = one.eqn, one.scopes
        scope = next(reversed(re.findall(f"{COUNTED}[0-9a-f]{{8}}", scopes)), "")
        lhs, rhs, *more = (var.aval for var in eqn.invars)
        if scope in decided:
            sizes = row.sizes(lhs.shape, rhs.shape, *more, *row.arguments(eqn.params))
            if decided[scope][0].is_swapped:
                sizes = sizes._replace(m=sizes.n, n=sizes.m)
            counts[scope, sizes] += one.times
        elif not re.search(rf"\b{NOT_CONVERTED}\b", scopes):
            unseen.append(f"{scopes or 'the model'}, {lhs.shape} by {rhs.shape}")
    return table_of(counts, decided, unseen)
