"""Measures the quantization error of each tensor of each FP8 op: underflow, saturation and SQNR.

``statistics`` runs a loss forward and backward in a program of its own, in which every op reports its
numbers (see ``_core.measuring``). It is a pure function, so it can be a branch of ``lax.cond``. Steps that
do not measure then run none of it. Sowing into a collection would not do: every step would measure, the
backward pass cannot sow, and every ``nn.scan`` would have to name the collection.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.measuring import Numbers, measured, merged_calls
from fp8flax._core.names import ROLES
from fp8flax._core.options import check_function, check_int, check_loss, check_no_train_state
from fp8flax._core.shapes import Float32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["underflow", "saturation", "sqnr", "headroom", "amax", "scale", "nonfinite"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of one tensor of one FP8 op: what underflows and saturates, and the SQNR; float32 scalars.

    Fields have leading axes for layers that ``nn.scan`` or ``nn.vmap`` stacked, and for microbatches in a
    ``lax.scan``. A tensor enters two GEMMs; if its quantizers differ, as with scales per block, all counts
    are over both. For an op that is called several times all counts are over all calls. All fields are NaN
    if nothing was computed, as in a branch of ``lax.cond`` that was not taken.

    Attributes:
        underflow: share of the finite nonzero values whose code is zero, 0 to 1.
        saturation: share of the finite nonzero values that were clipped at the largest FP8 value, 0 to 1.
        sqnr: signal-to-quantization-noise ratio of the finite values in dB, ``10 log10(Σ x² / Σ (x - q *
            scale)²)``. At best it is about 31 for e4m3 and 25 for e5m2. It is inf if nothing is lost, and 0
            if nothing is left.
        headroom: the largest magnitude that the scale represents, divided by the current amax; the smallest
            over the scales of a tensor. Below 1 something saturates. It is inf for a tensor of zeros.
        amax: the largest finite magnitude.
        scale: the scale in use (``x ≈ q * scale``); the largest over the slices or blocks of a tensor that
            are not all zero.
        nonfinite: number of NaN and Inf.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.array([[1.0, 1e-4, 896.0]])
        >>> variables = layer.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: jnp.sum(layer.apply(v, x)))(variables, x)
        >>> one = found["Fp8DotGeneralOp_0"]["input"]
        >>> print(f"{one.underflow:.2f} {one.saturation:.2f} {one.headroom:.1f}")
        0.33 0.33 0.5

    Source: torchao and Transformer Engine, which log some of these.
    """

    underflow: Float32[jax.Array, "*stack"]
    saturation: Float32[jax.Array, "*stack"]
    sqnr: Float32[jax.Array, "*stack"]
    headroom: Float32[jax.Array, "*stack"]
    amax: Float32[jax.Array, "*stack"]
    scale: Float32[jax.Array, "*stack"]
    nonfinite: Float32[jax.Array, "*stack"]


def statistics(
    fun: Callable[..., Any], has_aux: bool = False
) -> Callable[..., dict[str, dict[str, Statistics]]]:
    """Returns a function that measures, for each FP8 op and role, what is lost in the cast to FP8.

    The returned function runs ``fun`` forward and backward, separately from the training step. It computes
    two of the three GEMMs of each layer, because no gradient of a kernel is needed. It is pure and works
    with every recipe. To measure every so many steps see ``every``.

    It works under ``jax.jit`` (without it, each call compiles again), ``jax.vmap`` and sharding, inside of
    ``jax.shard_map``, and in models of ``quantize_model``. ``fun`` may contain ``nn.scan``, ``nn.remat``,
    ``lax.scan`` and ``lax.cond``.

    Not covered are

    * frozen models
    * ``in_qdq`` and ``out_qdq`` on their own
    * ops of NNX models that ``fp8flax.nnx.quantize_model`` did not return, because these ops do not know
      their paths
    * ops that get no gradient from the loss
    * a ``jax.shard_map`` inside of ``fun``
    * layers of one kind in ``nn.jit``, which traces all of them as the first one; measure the model without
      ``nn.jit``

    ``MLP`` is measured layer by layer, with activations rounded to their dtype before they are cast. Ops of
    two models that have the same path count as one.

    Args:
        fun: ``fun(variables, *args, **kwargs)``, a loss; returns a scalar, or a pair ``(scalar, aux)``.
        has_aux: whether ``fun`` returns auxiliary data.

    Returns:
        A function of the same arguments that returns ``{path: {role: Statistics}}``. The path of an op is
        that of its scaling state, if it has one: ``"encoder/Dense_0/Fp8DotGeneralOp_0"``. The roles are
        those of ``input``, ``kernel`` and ``output_grad`` that the recipe quantizes.

    Raises:
        TypeError: ``fun`` is not a function, but for instance a model; or (when called) it returns no
            scalar, or its first argument is a whole ``TrainState``.
        ValueError: (when called) no FP8 op was reached, one is inside of a ``jax.shard_map`` or
            ``lax.while_loop`` of ``fun``, or ``nn.jit`` gives several layers one path.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> measure = jax.jit(fp8.statistics(lambda v, x: 1e-9 * jnp.sum(model.apply(v, x))))
        >>> found = measure(variables, x)["Fp8DotGeneralOp_0"]
        >>> found["input"].underflow, found["output_grad"].underflow
        (Array(0., dtype=float32), Array(1., dtype=float32))
    """
    check_function("fun", fun, "lambda variables, x: jnp.mean(model.apply(variables, x) ** 2)")

    def measure(variables: Any, *args: Any, **kwargs: Any) -> dict[str, dict[str, Statistics]]:
        check_no_train_state(variables)

        def loss(variables: Any) -> Any:
            out = fun(variables, *args, **kwargs)
            check_loss(out, has_aux, "fun")
            return out

        def gradient(variables: Any) -> Any:
            grads = jax.grad(loss, has_aux=has_aux, allow_int=True)(variables)
            grads = grads[0] if has_aux else grads
            return [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]

        @partial(jax.jit, inline=True)
        def run(variables: Any) -> Any:
            return measured(gradient, variables)[1]

        reported = run(variables)
        if not reported:
            raise ValueError(
                "No FP8 op was reached: the gradient of fun with respect to its first argument contains "
                "none. fun must apply a model with FP8 ops to the variables that it is given, with a "
                "recipe that quantizes. A model that freeze returned cannot be measured."
            )
        found: dict[str, dict[str, Statistics]] = {}
        for path, role in sorted(reported, key=lambda key: (key[0], ROLES.index(key[1]))):
            numbers = merged_calls(reported[path, role])
            found.setdefault("/".join(path), {})[role] = _statistics(numbers)
        return found

    return measure


def _statistics(numbers: Numbers) -> Statistics:
    count = jnp.maximum(numbers.values, np.float32(1))
    is_exact = numbers.noise == 0
    ratio = numbers.signal / jnp.where(is_exact, np.float32(1), numbers.noise)
    found = Statistics(
        underflow=numbers.underflowed / count,
        saturation=numbers.saturated / count,
        sqnr=jnp.where(is_exact, np.float32(np.inf), np.float32(10) * jnp.log10(ratio)),
        headroom=numbers.headroom,
        amax=numbers.amax,
        scale=numbers.scale,
        nonfinite=numbers.nonfinite,
    )
    is_measured = numbers.amax >= 0
    return jax.tree.map(lambda x: jnp.where(is_measured, x, np.float32(np.nan)), found)


def every(num_steps: int, fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs ``fun`` at every ``num_steps``-th step, under ``lax.cond``.

    The GPU kernels of ``fun`` are part of the compiled step, but they run only at these steps. (Under
    ``jax.vmap`` over the step they always run.) Memory for them is allocated at all steps: one program of
    four layers, compiled for a CPU, had 16.0 MiB of temporaries without ``statistics`` and 22.0 MiB with
    it.

    Args:
        num_steps: 1 or more.
        fun: a function that returns a tree of floats, such as that of ``statistics``.

    Returns:
        A function ``(step, *args, **kwargs)``, where ``step`` is an integer scalar. It returns the result
        of ``fun`` if ``step`` is a multiple of ``num_steps``; otherwise it returns NaN in the same shapes.

    Raises:
        TypeError: ``num_steps`` is not an integer; or (when called) ``fun`` returns something other than
            floats.
        ValueError: ``num_steps`` is less than 1.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> measure = jax.jit(fp8.every(100, jnp.sum))
        >>> measure(200, jnp.ones(3)), measure(201, jnp.ones(3))
        (Array(3., dtype=float32), Array(nan, dtype=float32))
    """
    num_steps = check_int("num_steps", num_steps, 1)

    def call(step: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return fun(*args, **kwargs)

        shapes = jax.eval_shape(run)
        others = [x for x in jax.tree.leaves(shapes) if not jnp.issubdtype(x.dtype, jnp.floating)]
        if others:
            raise TypeError(f"The function of every must return floats; this one returned {others}.")

        def skip() -> Any:
            return jax.tree.map(lambda x: jnp.full(x.shape, np.nan, x.dtype), shapes)

        return lax.cond(jnp.asarray(step) % num_steps == 0, run, skip)

    return call


class SummaryRow(NamedTuple):
    """Row of a ``Summary``: one tensor of one op, with the numbers of ``Statistics``."""

    name: str
    """Path and role, ``"Dense_0/Fp8DotGeneralOp_0/input"``; for one layer of a stack ``"…/input[3]"``."""
    underflow: float
    saturation: float
    sqnr: float
    headroom: float
    amax: float
    scale: float
    nonfinite: float


_HEADER = ("tensor", "SQNR dB", "underflow %", "saturation %", "headroom", "amax", "scale", "NaN, Inf")
_SHOWN = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """Table of statistics, the worst tensor first; ``print`` and notebooks show the first 20 rows.

    Attributes:
        rows: named tuples, one for each tensor of each op. ``name`` is the path of the op and the role,
            ``"Dense_0/Fp8DotGeneralOp_0/input"``; for one layer of a stack ``"…/input[3]"``. The other
            fields are the numbers of ``Statistics``.
    """

    rows: tuple[SummaryRow, ...]

    @property
    def scalars(self) -> dict[str, float]:
        """Returns all numbers by name, ``"Dense_0/Fp8DotGeneralOp_0/input/sqnr"``, for metric writers."""
        return {
            f"{row.name}/{field}": value
            for row in self.rows
            for field, value in zip(row._fields[1:], row[1:])
        }

    def __str__(self) -> str:
        cells = [_HEADER, *self._cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADER))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
            for row in cells
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self._rest()])

    def _repr_html_(self) -> str:
        head, *rows = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
            for tag, row in [("th", _HEADER), *(("td", row) for row in self._cells())]
        )
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        rest = "".join(f"<div>{line}</div>" for line in self._rest())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.name,
                f"{row.sqnr:.1f}",
                f"{100 * row.underflow:.2f}",
                f"{100 * row.saturation:.2f}",
                *(f"{number:.3g}" for number in (row.headroom, row.amax, row.scale)),
                f"{row.nonfinite:.0f}" if row.nonfinite == row.nonfinite else "nan",
            )
            for row in self.rows[:_SHOWN]
        ]

    def _rest(self) -> list[str]:
        more = len(self.rows) - _SHOWN
        lines = [f"… and {more} more."] if more > 0 else []
        if any(row.name.endswith("]") for row in self.rows):
            lines.append("[i] counts, from 0, layers that nn.scan or nn.vmap stacked, or lax.scan steps.")
        return lines


def summarize(statistics: Mapping[str, Mapping[str, Statistics]]) -> Summary:
    """Returns statistics as a table, the worst tensor first.

    Tensors that hold a NaN or an Inf come first, then those with the lowest SQNR; equal rows are sorted by
    name. Tensors that were not measured (see ``every``) come last.

    Args:
        statistics: the result of a function that ``statistics`` returned, outside of ``jax.jit``.

    Returns:
        A ``Summary``; print it, or look at its ``rows``.

    Raises:
        TypeError: ``statistics`` is not such a result, or holds tracers.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: 1e-9 * jnp.sum(model.apply(v, x)))(variables, x)
        >>> summary = fp8.summarize(found)
        >>> summary.rows[0].name, summary.rows[0].underflow
        ('Fp8DotGeneralOp_0/output_grad', 1.0)
        >>> summary.scalars["Fp8DotGeneralOp_0/input/amax"]
        1.0
    """
    if not isinstance(statistics, Mapping):
        raise TypeError(
            "summarize takes the result of a function that fp8flax.statistics returned, as in "
            "summarize(fp8flax.statistics(loss)(variables, batch)); got a value of type "
            f"{type(statistics).__name__}."
        )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(statistics)):
        raise TypeError(
            "summarize needs numbers, and jax.jit has not computed them yet. Return the statistics from "
            "the jitted function, and summarize them outside."
        )
    rows = []
    for path, of_op in statistics.items():
        for role, one in of_op.items():
            fields = [np.asarray(getattr(one, name)) for name in SummaryRow._fields[1:]]
            for index in np.ndindex(fields[0].shape):
                place = f"[{', '.join(map(str, index))}]" if index else ""
                rows.append(SummaryRow(f"{path}/{role}{place}", *(float(field[index]) for field in fields)))
    return Summary(rows=tuple(sorted(rows, key=_worst_first)))


def _worst_first(row: SummaryRow) -> tuple[Any, ...]:
    is_measured = not np.isnan(row.amax)
    return not is_measured, not row.nonfinite > 0, row.sqnr if is_measured else 0.0, row.name
