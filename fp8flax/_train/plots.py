"""Plots statistics: what each tensor loses in the cast to FP8, over the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fp8flax._train.statistics import Statistics

_ROWS_SHOWN = 40


def plot_statistics(history: Mapping[int, Statistics]) -> Any:
    """Draws underflow, saturation and scale of each tensor over time.

    The figure has three maps, with a row for each tensor and a column for each step. Rows have the path of
    the op and the role of the tensor as names. The 40 tensors are shown that underflow or saturate most at
    any step. A number that was not measured leaves its place white.

    Args:
        history: statistics by step, ``{step: result of the function that statistics returned}``.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed (``fp8flax[plots]`` installs it).

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 8))
        >>> variables = model.init(jax.random.key(0), x)
        >>> found = fp8.statistics(lambda v, x: jnp.sum(model.apply(v, x)))(variables, x)
        >>> figure = fp8.plot_statistics({0: found, 10: found})
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: python -m pip install 'fp8flax[plots]'.") from error
    steps = sorted(history)
    tensors = sorted({(path, role) for found in history.values() for path in found for role in found[path]})
    underflow, saturation, scale = np.array(
        [
            [
                [history[i].get(path, {}).get(role, {}).get(name, np.nan) for i in steps]
                for path, role in tensors
            ]
            for name in ("underflow", "saturation", "scale")
        ]
    )
    losses = np.nanmax(underflow + saturation, axis=1)
    shown = np.sort(np.argsort(-losses, kind="stable")[:_ROWS_SHOWN])
    names = ["/".join(tensors[j]) for j in shown]
    log_scale = np.log2(scale, out=np.full_like(scale, np.nan), where=scale > 0)
    figure = Figure(figsize=(14, 1.5 + 0.25 * len(names)), layout="constrained")
    for i, (axes, label, values, limits) in enumerate(
        zip(
            figure.subplots(1, 3),
            ("underflow, %", "saturation, %", "log2 of the scale"),
            (100 * underflow[shown], 100 * saturation[shown], log_scale[shown]),
            ({"vmin": 0, "vmax": 100}, {"vmin": 0, "vmax": 100}, {}),
        )
    ):
        image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", **limits)
        ticks = range(0, len(steps), -(-len(steps) // 8))
        axes.set_xticks(ticks, [str(steps[j]) for j in ticks])
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), fontsize="small")
        axes.set_xlabel("step")
        figure.colorbar(image, ax=axes, label=label)
    return figure
