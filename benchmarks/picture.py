"""Draws the picture of the README: one measured training step, by recipe, from ``results/gpu.json``.

python -m benchmarks.picture
"""

import json

import matplotlib
from matplotlib.figure import Figure

from benchmarks import common

PICTURE = common.RESULTS.parents[1] / "docs" / "images" / "step_h200.svg"
NAMES = {
    "bf16": "bf16",
    "flax-direct": "Flax's Fp8DirectDotGeneralOp",
    "delayed": "fp8flax, DelayedScaling (default)",
    "current": "fp8flax, Float8CurrentScaling",
    "axiswise": "fp8flax, Float8CurrentScaling, axiswise",
    "block128": "fp8flax, Float8BlockScaling",
    "mxfp8": "fp8flax, MXFP8BlockScaling",
}
"""What was measured, in the order of the picture and of the README's table."""

INK, GREY, BLUE, LIGHT = "#1d2733", "#b4bcc6", "#1a56b0", "#8fb0dd"


def rows() -> list[tuple[str, float, float]]:
    """Returns the name, the milliseconds of a step, and the speed beside bf16 of each bar."""
    measured = json.loads((common.RESULTS / "gpu.json").read_text())["entries"]["llama"]
    medians = [(measured[key]["seconds"]["median"], measured[key]["times_bf16"]["median"]) for key in NAMES]
    return [(name, 1e3 * seconds, speed) for name, (seconds, speed) in zip(NAMES.values(), medians)]


def draw() -> Figure:
    """Returns the picture."""
    figure = Figure(figsize=(7.4, 2.9), layout="constrained")
    axes = figure.subplots()
    for place, (name, ms, speed) in enumerate(rows()):
        colour = BLUE if "default" in name else LIGHT if name.startswith("fp8flax") else GREY
        axes.barh(-place, ms, 0.66, color=colour)
        axes.text(ms + 0.5, -place, f"{ms:.1f} ms   {speed:.2f}×", va="center", color=INK, fontsize=9)
    axes.set_yticks([-place for place in range(len(NAMES))], NAMES.values(), color=INK, fontsize=9)
    axes.set_title(
        "One training step on an H200, and its speed beside bf16", loc="left", fontsize=10, color=INK
    )
    axes.set(xlim=(0, 63), xticks=[])
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    return figure


if __name__ == "__main__":
    # Text stays text, and equal results give equal files.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "fp8flax", "font.family": "sans-serif"}
    ):
        draw().savefig(PICTURE, metadata={"Date": None}, facecolor="white")
    print(PICTURE.name)
