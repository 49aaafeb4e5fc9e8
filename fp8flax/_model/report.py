"""``report``: every contraction of a converted model, whether it runs in FP8, why not, what that gains."""

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
from fp8flax._core.autocast import autocast, recipe_in_use
from fp8flax._core.gemm.gpus import GPUS, Gpu, compile_target
from fp8flax._core.gemm.units import runs_in_fp8
from fp8flax._core.names import COUNTED, NOT_CONVERTED, OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import if_of_other_api
from fp8flax._core.plans.ops import RAGGED_DOT, GemmSizes
from fp8flax._core.recipes import CustomRecipe, DelayedScaling
from fp8flax._linen.conversion import reporting
from fp8flax._model.calls import seen_of
from fp8flax._model.converted import trace_apply
from fp8flax._model.jaxprs import contractions_in
from fp8flax._train.bridge import eval_init, split_arrays
from fp8flax._train.gradients import value_and_grad

_LEAST_QUANTIZATION_BYTES = 5.2
"""``Quantizer.quantization_bytes`` where nothing is quantized forward: as with delayed scaling."""

_ONE_PASS_BYTES = 4.1
"""Of scales per block on Hopper, where one kernel quantizes a tensor for both of its GEMMs."""


def seconds(
    sizes: GemmSizes, gpu: Gpu, gemms: CustomRecipe | None, is_matmul: bool, is_ragged: bool = False
) -> float:
    """Returns the time of the forward and both backward GEMMs, with quantization, on a roofline."""
    b, m, k, n = sizes
    operations, elements = 3 * sizes.flops, b * (m * k + k * n + m * n)
    wide = max(operations / gpu.bf16, 6 * elements / gpu.bandwidth)
    if gemms is None:
        return wide
    used = [quantizer for quantizer in (gemms.forward.lhs, gemms.forward.rhs) if quantizer is not None]
    most = max((quantizer.quantization_bytes for quantizer in used), default=_LEAST_QUANTIZATION_BYTES)
    per_block = any(quantizer.scales_along_contraction for quantizer in used)
    if per_block and not gpu.has_block_scales and runs_in_fp8(gemms.forward, gpu.compute_capability):
        most = _ONE_PASS_BYTES
    quantization = most * elements / gpu.bandwidth
    if not is_matmul or (is_ragged and per_block and gpu.has_block_scales):
        return wide + quantization
    total = 0.0
    for gemm in (gemms.forward, gemms.dgrad, gemms.wgrad):
        in_fp8 = runs_in_fp8(gemm, gpu.compute_capability)
        peak, size = (gpu.fp8, 4) if in_fp8 else (gpu.bf16, 6)
        total += max(sizes.flops / peak, size * elements / 3 / gpu.bandwidth)
    return total + quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contraction of a model.

    Attributes:
        path: the module's.
        kernel: path of the parameter that it multiplies with; None for a product of two activations.
        batch, m, k, n: the contraction is ``batch`` matmuls of (m, k) by (k, n).
        count: how often it is computed in one forward pass.
        converted: whether the rules have it run in FP8.
        reason: which rule said so, or why it is not converted.
        flops: of all its forward passes.
        speedup: predicted time in bf16 over that in FP8, forward and backward; 1 if it is not converted.
    """

    path: str
    kernel: str | None
    batch: int
    m: int
    k: int
    n: int
    count: int
    converted: bool
    reason: str
    flops: int
    speedup: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Table of a model's contractions, and whether each of them runs in FP8.

    Attributes:
        rows: the contractions, in the order in which the model computes them.
        target: the GPU of the predictions.
        speedup: predicted speed-up of all contractions together.
        unseen: contractions in places that ``quantize_model`` does not convert, by place and shapes: in a
            ``lax.scan``, in ``jax.checkpoint``, or in a function with a derivative of its own.
        fp8: ``AuditReport`` of the forward and backward pass, compiled for the target; None if not
            compiled.
        wide: the same ``AuditReport`` without FP8, in the dtypes that the model has by itself.
    """

    rows: tuple[Row, ...]
    target: str
    speedup: float
    unseen: tuple[str, ...] = ()
    fp8: AuditReport | None = None
    wide: AuditReport | None = None

    @property
    def converted(self) -> tuple[Row, ...]:
        """Returns the rows that run in FP8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def fp8_share(self) -> float:
        """Returns the share of FLOPs that run in FP8."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.converted) / total if total else 0.0

    @property
    def step_speedup(self) -> float | None:
        """Returns the predicted speed-up of the whole forward and backward pass; None if not compiled."""
        if self.fp8 is None or self.wide is None:
            return None
        return self.wide.predicted_seconds["total"] / self.fp8.predicted_seconds["total"]

    def plot(self) -> Any:
        """Draws the predicted time of the forward and backward pass by part, in FP8 and without.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed (``fp8flax[demo]`` installs it).
            ValueError: the model was not compiled.
        """
        if self.fp8 is None or self.wide is None:
            raise ValueError(
                "plot needs a compiled model, and this report has none. Make it with fp8flax.report(…, "
                "compiled=True)."
            )
        return self.fp8.plot(wide=self.wide)

    def __str__(self) -> str:
        total = sum(row.flops for row in self.rows) or 1
        table = [("contraction", "kernel", "B×M×K×N", "times", "% FLOPs", "FP8?", "speed-up", "why")]
        for row in self.rows:
            sizes = (row.batch, row.m, row.k, row.n)[0 if row.batch != 1 else 1 :]
            name = (row.kernel or "").removeprefix(f"{row.path}/") if row.path else row.kernel or ""
            table.append(
                (
                    row.path or "(the model)",
                    name or "-",
                    "×".join(map(str, sizes)),
                    str(row.count),
                    f"{100 * row.flops / total:.1f}",
                    "FP8" if row.converted else "no",
                    f"{row.speedup:.2f}" if row.converted else "",
                    row.reason,
                )
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "-" * max(map(len, lines)))
        unseen = "".join(f"\nNot looked into: {text}." for text in self.unseen)
        return "\n".join(lines) + (
            f"\n\n{len(self.converted)} of {len(self.rows)} contractions are converted "
            f"({100 * self.fp8_share:.1f} % of their FLOPs).\nPredicted for all of them on {self.target}, "
            f"forward and backward: {self.speedup:.2f} times as fast as in bf16.{unseen}{self._step()}"
        )

    def _step(self) -> str:
        if self.fp8 is None or self.wide is None:
            return ""
        table = [
            ("", "predicted ms", "GEMMs", "in FP8", "launches", "MiB beside the GEMMs", "temporary MiB")
        ]
        for name, one in (("FP8", self.fp8), ("without", self.wide)):
            table.append(
                (
                    name,
                    f"{1e3 * one.predicted_seconds['total']:.3g}",
                    str(one.num_gemms),
                    str(one.num_fp8_gemms),
                    str(one.num_launches),
                    f"{one.other_bytes / 2**20:.1f}",
                    f"{one.temp_bytes / 2**20:.1f}",
                )
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in table]
        return (
            "\n\nCompiled, forward and backward, with all that the model computes:\n"
            + "\n".join(lines)
            + f"\n{self.step_speedup:.2f} times as fast in FP8, as predicted from these counts."
        )


def report(
    model: nn.Module, *args: Any, target: str = "h200", compiled: bool = False, **kwargs: Any
) -> ModelReport:
    """Lists every contraction of a converted model: sizes, whether it runs in FP8, and why or why not.

    Nothing is computed: the shapes come from tracing ``init`` and ``apply``. Sizes are those of one call
    with these inputs; under ``nn.vmap`` and ``jax.vmap`` they are those of the whole batch. In ``nn.scan``
    and ``nn.RNN`` a contraction counts as often as the loop runs; in ``nn.while_loop`` it counts once,
    because the number is not known. Layers that have an FP8 op by themselves, such as ``MoE``, are not
    listed.

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
        compiled: whether to compile the forward and backward pass too, with FP8 and without. The compiled
            loss is the mean of the squares of everything that the model returns. This takes twice as long
            as one compilation for the GPU, and needs the extra ``fp8flax[audit]``; see ``audit``.
        **kwargs: keyword inputs of the model.

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
    if not hasattr(model, "_fp8_rules"):
        raise TypeError(
            f"model must come from fp8flax.quantize_model; got {type(model).__name__}. For any other "
            "function, fp8flax.audit reads the compiled program."
            + if_of_other_api(model, "flax.linen", "report")
        )
    if target not in GPUS:
        raise ValueError(f"target must be one of {sorted(GPUS)}; got {target!r}.")
    gpu = GPUS[target]
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
    rows, wide, time = [], 0.0, 0.0
    for (scope, sizes), count in counts.items():
        site, decision = by_scope[scope].site, by_scope[scope].decision
        recipe = recipe_in_use(decision.recipe, DelayedScaling()) if decision.converts else None
        gemms = None if recipe is None else recipe.gemms
        is_ragged = site.op is RAGGED_DOT
        before, after = (count * seconds(sizes, gpu, g, site.is_matmul, is_ragged) for g in (None, gemms))
        wide, time = wide + before, time + after
        rows.append(
            Row(
                path=site.path,
                kernel=site.kernel,
                **sizes._asdict(),
                count=count,
                converted=decision.converts,
                reason=decision.reason,
                flops=count * sizes.flops,
                speedup=before / after if after else 1.0,
            )
        )
    return ModelReport(
        rows=tuple(rows),
        target=gpu.name,
        speedup=wide / time if time else 1.0,
        unseen=tuple(unseen),
        fp8=_compiled(model, args, kwargs, target, is_fp8=True) if compiled else None,
        wide=_compiled(model, args, kwargs, target, is_fp8=False) if compiled else None,
    )


def _compiled(model: nn.Module, args: Any, kwargs: Any, target: str, *, is_fp8: bool) -> AuditReport:
    """Returns what the forward and the backward pass are compiled to."""
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
