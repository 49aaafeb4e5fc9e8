"""Plots statistics: scales and amaxes over time, underflow by layer, and a tensor on its FP8 grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fp8flax._core.formats import as_fp8_dtype, fp8_limits
from fp8flax._core.quantize import quantize
from fp8flax._train.statistics import Statistics, SummaryRow, summarize

if TYPE_CHECKING:
    from jaxtyping import Float

History = Mapping[int, Mapping[str, Mapping[str, Statistics]]]
"""Statistics by the step at which they were measured."""

# The palette of Okabe and Ito: readers with any kind of colour vision can distinguish these colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MAPS_SHOWN = 40


def _figure(width: float, height: float) -> Any:
    """Returns an empty figure; raises ``ImportError`` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: python -m pip install 'fp8flax[plots]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _series(history: History) -> tuple[list[int], dict[str, list[SummaryRow | None]]]:
    """Returns the steps, and for each tensor its row at each step."""
    if not isinstance(history, Mapping) or not all(isinstance(step, Real) for step in history):
        got = f"the keys {list(history)[:2]}" if isinstance(history, Mapping) else type(history).__name__
        raise TypeError(
            "history must map steps to results of the function that fp8.statistics returned, as in "
            f"{{step: result}}; got {got}."
        )
    if not history:
        raise ValueError(
            "history is empty; it must map steps to results of the function that fp8.statistics returned."
        )
    steps = sorted(history)
    found: dict[str, list[SummaryRow | None]] = {}
    for i, step in enumerate(steps):
        for row in summarize(history[step]).rows:
            found.setdefault(row.name, [None] * len(steps))[i] = row
    return steps, found


def _numbers(rows: Sequence[SummaryRow | None], field: str) -> np.ndarray:
    return np.array([np.nan if row is None else getattr(row, field) for row in rows])


def plot_history(history: History, names: Sequence[str] | None = None) -> Any:
    """Draws amax and scale over time, with one line for each tensor.

    The upper plot shows the amax of each tensor, and as a dashed line the largest magnitude that its scale
    represents (amax × headroom). Values saturate where the dashed line is below the amax. The lower plot
    shows the scales.

    Args:
        history: statistics by step, ``{step: result of the function that statistics returned}``.
        names: names of up to seven tensors, as in ``summarize``, such as
            ``"Dense_0/Fp8DotGeneralOp_0/input"``. None takes the four that are worst at the last step.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed (``fp8flax[plots]`` installs it).
        TypeError: ``history`` does not map steps to such results, or ``names`` is one string.
        ValueError: ``history`` is empty, a name is not in it, or there are more than seven names.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: jnp.sum(model.apply(v, x)))(variables, x)
        >>> figure = fp8.plot_history({0: found, 10: found})
    """
    steps, series = _series(history)
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names; got {names!r}. Pass [{names!r}].")
    if names is None:
        worst = [row.name for row in summarize(history[steps[-1]]).rows]
        names = sorted(worst[:4])
    if len(names) > len(_COLOURS):
        raise ValueError(f"plot_history draws {len(_COLOURS)} tensors at most; got {len(names)} names.")
    if unknown := sorted(set(names) - set(series)):
        raise ValueError(f"The history has no tensor {unknown[0]!r}; it has {', '.join(sorted(series))}.")
    figure = _figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for name, colour in zip(names, _COLOURS):
        amax, headroom, scale = (_numbers(series[name], f) for f in ("amax", "headroom", "scale"))
        upper.plot(steps, _positive(amax), color=colour, marker="o", markersize=3, label=name)
        # A tensor of zeros has amax 0 and headroom inf.
        with np.errstate(invalid="ignore"):
            largest = amax * headroom
        upper.plot(steps, _positive(largest), color=colour, linestyle="--")
        lower.plot(steps, _positive(scale), color=colour, marker="o", markersize=3)
    upper.plot([], [], color="#666666", linestyle="--", label="largest value that the scale represents")
    for axes, label in ((upper, "amax (units of the tensor)"), (lower, "scale (units of the tensor)")):
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    lower.set_xlabel("step")
    figure.legend(*upper.get_legend_handles_labels(), loc="outside upper left", fontsize="small")
    return figure


def _positive(x: np.ndarray) -> np.ndarray:
    """Returns ``x`` for a logarithmic axis: numbers that are not positive and finite become NaN."""
    return np.where(np.isfinite(x) & (x > 0), x, np.nan)


def plot_underflow(history: History, role: str | None = None) -> Any:
    """Draws a map of layers × steps that shows which share of each tensor underflows.

    Args:
        history: statistics by step, as in ``plot_history``.
        role: ``"input"``, ``"kernel"`` or ``"output_grad"``; None for the 40 tensors of all roles that
            underflow most at any step.

    Returns:
        A ``matplotlib.figure.Figure``: underflow in % of the nonzero values, from dark (0) to light (100).

    Raises:
        ImportError: matplotlib is not installed (``fp8flax[plots]`` installs it).
        TypeError: as in ``plot_history``.
        ValueError: ``history`` is empty, or has no tensor of this role.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: jnp.sum(model.apply(v, x)))(variables, x)
        >>> figure = fp8.plot_underflow({0: found, 10: found}, role="output_grad")
    """
    steps, series = _series(history)
    lost = {
        name: 100 * _numbers(rows, "underflow")
        for name, rows in series.items()
        if role is None or name.rsplit("/", 1)[-1].split("[")[0] == role
    }
    if not lost:
        raise ValueError(f"The history has no tensor of the role {role!r}.")
    most = sorted(lost, key=lambda name: -np.nanmax([*lost[name], -1]))[:_MAPS_SHOWN]
    names = sorted(lost) if role is not None else sorted(most)
    figure = _figure(8, 1.5 + 0.25 * len(names))
    axes = figure.subplots()
    image = axes.imshow(
        np.stack([lost[name] for name in names]),
        aspect="auto",
        cmap="cividis",
        vmin=0,
        vmax=100,
        interpolation="nearest",
    )
    shown = range(0, len(steps), -(-len(steps) // 8))
    axes.set_xticks(shown, [str(steps[i]) for i in shown])
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_xlabel("step")
    figure.colorbar(image, ax=axes, label="underflow, %")
    return figure


def plot_histogram(x: Float[ArrayLike, "*dims"], dtype: DTypeLike, scale: float) -> Any:
    """Draws a histogram of a tensor's magnitudes, and the range that an FP8 dtype with a scale represents.

    Args:
        x: the tensor, floats of any shape; zeros, NaN and Inf are left out.
        dtype: an FP8 dtype, such as ``jax.numpy.float8_e4m3fn``.
        scale: the scale in use (``x ≈ q * scale``), a positive float.

    Returns:
        A ``matplotlib.figure.Figure``: shares of the values in half-octaves of their magnitudes, the grid
        of FP8 values below them, and three limits as lines. Below the first line everything becomes zero,
        below the second precision falls, and above the third everything saturates.

    Raises:
        ImportError: matplotlib is not installed (``fp8flax[plots]`` installs it).
        TypeError: ``dtype`` is not FP8, or ``x`` does not hold floats.
        ValueError: ``scale`` is not a positive finite number, or ``x`` has no finite value other than 0.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> x = jax.random.normal(jax.random.key(0), (64, 64))
        >>> figure = fp8.plot_histogram(x, jnp.float8_e4m3fn, scale=4 / 448)
    """
    dtype = as_fp8_dtype(dtype, "dtype")
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be a positive finite number; got {scale!r}.")
    q = np.asarray(jax.device_get(quantize(x, dtype, np.float32(scale))), np.float32)
    x = np.asarray(jax.device_get(x), np.float64)
    is_value = np.isfinite(x) & (x != 0)
    if not is_value.any():
        raise ValueError(f"x has no finite value other than 0 among {x.size}; there is nothing to draw.")
    limits = fp8_limits(dtype)
    magnitude, codes = np.abs(x[is_value]), np.abs(q[is_value])
    underflow = np.mean(codes == 0)
    saturation = np.mean(magnitude > limits.max * scale)
    figure = _figure(8, 4)
    axes = figure.subplots()
    low = min(np.log2(magnitude.min()), np.log2(limits.smallest_subnormal * scale))
    high = max(np.log2(magnitude.max()), np.log2(limits.max * scale))
    edges = np.arange(2 * np.floor(low) - 2, 2 * np.ceil(high) + 3) / 2
    weights = np.full(magnitude.size, 100 / magnitude.size)
    axes.hist(np.log2(magnitude), edges, weights=weights, color=_COLOURS[5])
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    grid = np.log2(values[np.isfinite(values) & (values > 0)] * scale)
    axes.plot(
        grid, np.zeros_like(grid), "|", color=_COLOURS[6], markersize=10, label=f"values of {dtype.name}"
    )
    for value, style, label in (
        (limits.smallest_subnormal / 2, ":", f"zero below: {100 * underflow:.1f} % of the values"),
        (limits.smallest_normal, "--", "subnormal below: less precision"),
        (limits.max, "-", f"saturated above: {100 * saturation:.1f} % of the values"),
    ):
        axes.axvline(np.log2(value * scale), color=_COLOURS[1], linestyle=style, label=label)
    axes.set_xlabel("log2 of the magnitude")
    axes.set_ylabel("% of the values that are not 0")
    figure.legend(loc="outside upper left", ncols=2, fontsize="small")
    return figure
