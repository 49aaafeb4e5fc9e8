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
        TypeError: ``history`` does not map steps to such results.
        ValueError: ``history`` is empty.

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
    tensors = _tensors(history)
    losses = {name: max(map(_loss, by_step.values())) for name, by_step in tensors.items()}
    names = sorted(sorted(tensors, key=lambda name: -losses[name])[:_ROWS_SHOWN])
    steps = sorted(history)

    def rows(number: str) -> np.ndarray:
        return np.array([[tensors[n].get(step, {}).get(number, np.nan) for step in steps] for n in names])

    scales = rows("scale")
    log_scales = np.log2(scales, out=np.full_like(scales, np.nan), where=scales > 0)
    figure = Figure(figsize=(14, 1.5 + 0.25 * len(names)), layout="constrained")
    for i, (axes, label, values, limits) in enumerate(
        zip(
            figure.subplots(1, 3),
            ("underflow, %", "saturation, %", "log2 of the scale"),
            (100 * rows("underflow"), 100 * rows("saturation"), log_scales),
            ({"vmin": 0, "vmax": 100}, {"vmin": 0, "vmax": 100}, {}),
        )
    ):
        image = axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", **limits)
        shown = range(0, len(steps), -(-len(steps) // 8))
        axes.set_xticks(shown, [str(steps[j]) for j in shown])
        axes.set_yticks(range(len(names)), names if i == 0 else [""] * len(names), fontsize="small")
        axes.set_xlabel("step")
        figure.colorbar(image, ax=axes, label=label)
    return figure


def _tensors(history: Any) -> dict[str, dict[int, dict[str, float]]]:
    """Returns the numbers of each tensor, by its name and by step."""
    if not isinstance(history, Mapping) or not all(
        isinstance(step, int | np.integer) and isinstance(found, Mapping) for step, found in history.items()
    ):
        raise TypeError(
            "history must map steps to results of the function that fp8.statistics returned, as in "
            f"{{step: result}}; got {type(history).__name__}."
        )
    if not history:
        raise ValueError("history is empty; it must map steps to results of fp8.statistics.")
    tensors: dict[str, dict[int, dict[str, float]]] = {}
    for step, found in history.items():
        for path, roles in found.items():
            for role, numbers in roles.items():
                tensors.setdefault(f"{path}/{role}", {})[step] = numbers
    return tensors


def _loss(numbers: Mapping[str, float]) -> float:
    return float(np.nan_to_num(numbers["underflow"] + numbers["saturation"]))
