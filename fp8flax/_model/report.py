"""``report``: lists the contractions of a converted model, whether each runs in FP8, why, and its gain."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8flax._audit.auditing import audit
from fp8flax._audit.report import AuditReport
from fp8flax._core.autocast import autocast
from fp8flax._core.gemm.gpus import GPUS, compile_target
from fp8flax._core.names import COUNTED, NOT_CONVERTED, OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import wrong_model
from fp8flax._core.plans.row import GemmSizes
from fp8flax._linen.conversion import reporting
from fp8flax._model.converted_call import seen_of
from fp8flax._model.interception import contractions_in
from fp8flax._model.model_report import SEE_AUDIT, ModelReport, gpu_named, table_of
from fp8flax._model.wrapped_module import trace_apply
from fp8flax._train.bridge import eval_init, split_arrays
from fp8flax._train.gradients import value_and_grad


def report(
    model: nn.Module, *args: Any, target: str = "h200", compiled: bool = False, **kwargs: Any
) -> ModelReport:
    """Lists every contraction of a converted model: sizes, whether it runs in FP8, and why or why not.

    Nothing is computed: the shapes come from tracing ``init`` and ``apply``. Sizes are those of one call
    with these inputs; under ``nn.vmap`` and ``jax.vmap`` they are those of the whole batch. In ``nn.scan``
    and ``nn.RNN`` a contraction counts as often as the loop runs; in ``nn.while_loop`` it counts once,
    because the number is not known. Layers that have an FP8 op by themselves are not listed.

    The prediction of each contraction is a roofline of its GEMMs, forward and backward, at the rates of
    large matmuls: 80 % of a GPU's published bf16 peak, 71 % of its FP8 peak, its full bandwidth. It
    includes the bytes that quantizing moves, which were read from compiled programs. It leaves out
    everything else that a model computes. ``compiled=True`` compiles the model, in FP8 and without, and
    predicts the time of all GPU kernels; see ``AuditReport.predicted_seconds``. Neither prediction has been
    compared with a GPU.

    Args:
        model: the model that ``quantize_model`` returned.
        *args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        target: the GPU of the prediction, as for ``audit``: ``"h100"``, ``"h200"``, ``"b200"``, …
        **kwargs: keyword inputs of the model.
        compiled: whether to compile the forward and backward pass too, with FP8 and without. The compiled
            loss is the mean of the squares of everything that the model returns. This takes twice as long
            as one compilation for the GPU, and needs the extra ``fp8flax[audit]``; see ``audit``.

    Returns:
        A ``ModelReport``; print it, or look at its ``rows``.

    Raises:
        TypeError: ``model`` does not come from ``quantize_model``.
        ValueError: a rule of ``quantize_model`` matched nothing; or ``target`` is unknown.
        ImportError: ``compiled`` is True, and the extra is missing.

    Example:
        >>> import flax.linen as nn, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(4)]))
        >>> print(fp8.report(model8, jnp.ones((8192, 4096))))
        contraction  kernel  B×M×K×N         times  % FLOPs  FP8?  speed-up  why
        -------------------------------------------------------------------------------------------------
        layers_0     kernel  8192×4096×1024  1      99.9     FP8   1.32      by default
        layers_2     kernel  8192×1024×4     1      0.1      no              K=1024, N=4: a size below 16
        <BLANKLINE>
        1 of 2 contractions are converted (99.9 % of their FLOPs).
        Predicted for all of them on NVIDIA H200, forward and backward: 1.31 times as fast as in bf16.

    Source: torchao's ``float8_roofline``; the peaks are NVIDIA's, times the shares that large matmuls
    reach.
    """
    if not hasattr(model, "_fp8_rules") or model._fp8_serving is not None:
        must = "come from fp8flax.quantize_model, not from freeze"
        raise wrong_model(model, must, "flax.linen", "report", SEE_AUDIT)
    gpu = gpu_named(target)
    with reporting(counting=True):
        shapes, _ = eval_init(model, args, kwargs)
        program = trace_apply(model, shapes, args, kwargs)
    by_scope = {found.scope: found for found in seen_of(model).sites}
    counts: Counter[tuple[str, GemmSizes]] = Counter()
    unseen = []
    for row, one in contractions_in(program):
        eqn, scopes = one.eqn, one.scopes
        scope = next(reversed(re.findall(f"{COUNTED}[0-9a-f]{{8}}", scopes)), "")
        lhs, rhs, *more = (var.aval for var in eqn.invars)
        if scope in by_scope:
            sizes = row.sizes(lhs.shape, rhs.shape, *more, *row.arguments(eqn.params))
            if by_scope[scope].is_swapped:
                sizes = sizes._replace(m=sizes.n, n=sizes.m)
            counts[scope, sizes] += one.times
        elif not re.search(rf"\b{NOT_CONVERTED}\b", scopes):
            unseen.append(f"{scopes or 'the model'}, {lhs.shape} by {rhs.shape}")
    decided = {scope: (found.site, found.decision) for scope, found in by_scope.items()}
    return dataclasses.replace(
        table_of(counts, decided, gpu),
        unseen=tuple(unseen),
        fp8=_compiled(model, args, kwargs, target, is_fp8=True) if compiled else None,
        wide=_compiled(model, args, kwargs, target, is_fp8=False) if compiled else None,
    )


def _compiled(model: nn.Module, args: Any, kwargs: Any, target: str, *, is_fp8: bool) -> AuditReport:
    """Returns the audit of the compiled forward and backward pass."""
    with reporting(), compile_target(GPUS[target].compute_capability):
        shapes, _ = eval_init(model, args, kwargs)
    arrays, fill = split_arrays(args, kwargs)
    learned = {name: shapes[name] for name in (PARAMS, OVERWRITE_WITH_GRADIENT) if name in shapes}
    others = {name: tree for name, tree in shapes.items() if name not in learned}

    def loss(learned: Any, others: Any, arrays: Any) -> jax.Array:
        args, kwargs = fill(arrays)
        variables = {**others, **learned}
        out, _ = model.apply(variables, *args, rngs=jax.random.key(0), mutable=list(others), **kwargs)
        leaves = [x for x in jax.tree.leaves(out) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        return sum((jnp.mean(jnp.square(x.astype(jnp.float32))) for x in leaves), jnp.float32(0))

    def step(*args: Any) -> Any:
        with contextlib.nullcontext() if is_fp8 else autocast(enabled=False), reporting():
            return value_and_grad(loss, allow_int=True)(*args)

    return audit(step, flax.core.unfreeze(learned), others, arrays, target=target)
