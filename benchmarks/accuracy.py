"""How much error does each recipe add to the three GEMMs of one Dense layer, on which data?

Run ``python -m benchmarks.accuracy``; ``--help`` for the options. Start it with ``JAX_PLATFORMS=cpu`` where
JAX finds the CUDA plugin but no GPU.

The figure is the signal-to-quantization-noise ratio, in dB, more is better::

    SQNR = 10 log10(sum(exact**2) / sum((measured - exact)**2))

for the output (forward), the gradient of the input (dgrad) and that of the kernel (wgrad). Both sums run
over all elements and all seeds, so the noise power is averaged, and so is the power of the signal. 6.02 dB
are one bit.

Assumptions: ``exact`` is the float64 product of the float32 tensors, before anything is cast; activations,
gradients and results of the FP8 rows are float32, so that on a CPU next to nothing but the FP8 casts adds
to the error (a GPU adds that of its accumulation); the layer has no bias; the kernel is Gaussian whatever
the data; delayed scaling has seen the same data one step before.

Compare recipes of one FP8 format and one kind of scale. A float32 scale makes the amax of its tensor, slice
or block the largest FP8 value, without rounding error: the finer its granularity, the more of the large
values are exact. A power of two only moves the exponent: in the range of normal FP8 values its granularity
makes no difference to the rounding, and nearly all of the power of this data lies in that range.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import fp8flax as fp8
from benchmarks.common import (
    RESULTS,
    Row,
    Shape,
    add_json,
    aligned,
    begin,
    machine,
    parse_shape,
    quiet,
    run,
    sqnr,
    text_of,
    write,
)

QUESTION = (
    "How much error does each recipe add to the forward GEMM, dgrad and wgrad of one nn.Dense, on which "
    "data?"
)
BF16 = "bf16"
RECIPES: dict[str, fp8.Recipe | None] = {
    BF16: None,
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "current-e4m3": fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3),
    "current-e4m3-pow2": fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3, use_power_2_scales=True),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "axiswise-e4m3": fp8.Float8CurrentScaling(granularity="axiswise", fp8_format=fp8.Format.E4M3),
    "axiswise-e4m3-pow2": fp8.Float8CurrentScaling(
        granularity="axiswise", fp8_format=fp8.Format.E4M3, use_power_2_scales=True
    ),
    "axiswise-hp-wgrad": fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True),
    "mxfp8": fp8.MXFP8BlockScaling(),
    "mxfp8-floor": fp8.MXFP8BlockScaling(scale_rounding="floor"),
    "block128": fp8.Float8BlockScaling(),
    "block128-f32": fp8.Float8BlockScaling(use_f32_scales=True),
}
"""None stands for the layer without FP8, in bfloat16."""
GEMMS = ("forward", "dgrad", "wgrad")
SHAPE = (1024, 1024, 1024)
SEEDS = 3
OUTLIER_RATE, OUTLIER_FACTOR = 1e-3, 100.0
RESULT = RESULTS / "accuracy.json"

Arrays = tuple[np.ndarray, ...]


def _gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.standard_normal(shape)


def _outliers(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    values = rng.standard_normal(shape)
    return np.where(rng.random(shape) < OUTLIER_RATE, OUTLIER_FACTOR * values, values)


def _log_normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return 1e-4 * rng.choice((-1.0, 1.0), shape) * np.exp(2 * rng.standard_normal(shape))


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "Gaussian": _gaussian,
    "outliers": _outliers,
    "log-normal": _log_normal,
}


@functools.lru_cache(maxsize=16)
def data(kind: str, sizes: Shape, seed: int) -> tuple[Arrays, Arrays]:
    """Returns input, kernel and output gradient in float32, and the exact results, by ``GEMMS``."""
    M, K, N = sizes
    rng = np.random.default_rng(seed)
    w = _gaussian(rng, (K, N)) / math.sqrt(K)  # first, so that it is the same for all kinds
    x, g = KINDS[kind](rng, (M, K)), KINDS[kind](rng, (M, N))
    narrow = tuple(array.astype(np.float32) for array in (x, w, g))
    x, w, g = (array.astype(np.float64) for array in narrow)
    return narrow, (x @ w, g @ w.T, x.T @ g)


def make_layer(name: str, features: int) -> nn.Dense:
    recipe = RECIPES[name]
    op = None if recipe is None else partial(fp8.Fp8DotGeneralOp, recipe=recipe)
    return nn.Dense(features, use_bias=False, dot_general_cls=op)


@functools.cache
def make_step(name: str, features: int) -> Callable[..., tuple[jax.Array, jax.Array, Any]]:
    """Returns the jitted function that is measured: output, gradients of the input and of the variables."""
    layer = make_layer(name, features)

    @jax.jit
    def step(variables: Any, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        def loss(variables: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = layer.apply(variables, x)
            return jnp.sum(out * g), out

        (_, out), (dvariables, dx) = fp8.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return out, dx, dvariables

    return step


def results(name: str, x: Any, w: Any, g: Any) -> Arrays:
    """Returns what the layer gives for float32 tensors, by ``GEMMS``."""
    step = make_step(name, w.shape[1])
    dtype = jnp.bfloat16 if RECIPES[name] is None else jnp.float32
    x, w, g = (jnp.asarray(array, dtype) for array in (x, w, g))
    variables: Any = {"params": {"kernel": w}}
    if RECIPES[name] is not None:
        variables = fp8.add_fp8_state(variables, make_layer(name, w.shape[1]), x)
    if fp8.OVERWRITE_WITH_GRADIENT in variables:
        # The gradient of the scaling state is the next state, which knows the amaxes of this data.
        variables = {**step(variables, x, g)[2], "params": variables["params"]}
    out, dx, dvariables = step(variables, x, g)
    return tuple(np.asarray(array, np.float64) for array in (out, dx, dvariables["params"]["kernel"]))


def measure(recipe_name: str, kind: str, sizes: Shape = SHAPE, seeds: int = SEEDS) -> dict[str, float]:
    """Returns the SQNR in dB of each GEMM, by ``GEMMS``, over the seeds 0 to ``seeds - 1``."""
    runs = []
    for seed in range(seeds):
        tensors, exact = data(kind, sizes, seed)
        with quiet():
            runs.append(zip(exact, results(recipe_name, *tensors), strict=True))
    return {gemm: sqnr(pairs) for gemm, pairs in zip(GEMMS, zip(*runs), strict=True)}


# The report.


def method(sizes: Shape, seeds: int) -> list[str]:
    recipes = "; ".join(f"{name} = {recipe_text(name)}" for name in RECIPES)
    return [
        "SQNR in dB = 10 log10(sum(exact^2) / sum((measured - exact)^2)), both sums over all elements and "
        "all seeds; more is better, 6.02 dB are one bit. exact = the float64 product of the tensors "
        "before anything is cast: x w (forward), g w^T (dgrad), x^T g (wgrad).",
        "The layer: nn.Dense(N, use_bias=False), loss = sum(out * g), fp8flax.value_and_grad with respect "
        "to variables and input, jitted. Input x (M, K), kernel w (K, N) and output gradient g (M, N) are "
        "float32 and so are the results, except for bf16, where all are bfloat16; MxKxN is "
        f"{text_of(sizes)}, the seeds are 0 to {seeds - 1}.",
        f"Recipes: {recipes}. Delayed scaling is measured in its second step on the same data, so its "
        "scales come from the true amaxes.",
        "Data: x and g of one kind, w always Gaussian with variance 1/K. Gaussian = standard normal z; "
        f"outliers = z, times {OUTLIER_FACTOR:g} with probability {OUTLIER_RATE:g}; log-normal = "
        "sign * exp(2 z) * 1e-4.",
        "SQNR weighs every element by its power: what a recipe does to small values next to large ones "
        "hardly counts.",
    ]


def recipe_text(name: str) -> str:
    """Returns a recipe as it is written in code, without what is the default."""
    recipe: Any = RECIPES[name]
    if recipe is None:
        return "nn.Dense without FP8"
    defaults = vars(type(recipe)())
    changed = {field: value for field, value in vars(recipe).items() if value != defaults[field]}
    options = (f"{k}={v!r}" if isinstance(v, str | bool) else f"{k}={v}" for k, v in changed.items())
    return f"{type(recipe).__name__}({', '.join(options)})"


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text: one line for each recipe, one column for each kind of data and GEMM."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cells = {(row["recipe"], row["kind"]): [f"{row[gemm]:.2f}" for gemm in GEMMS] for row in rows}
    lines = [["SQNR, dB", *(f"{kind} {gemm}" for kind in kinds for gemm in GEMMS)]]
    for name in dict.fromkeys(row["recipe"] for row in rows):
        lines.append([name, *(cell for kind in kinds for cell in cells[name, kind])])
    return aligned(lines, 1)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument(
        "--shape", type=parse_shape, default=SHAPE, metavar="MxKxN", help=f"({text_of(SHAPE)})"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (%(default)s)")
    add_json(parser, RESULT)
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be 1 or more.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    arguments = {"shape": list(args.shape), "seeds": args.seeds}
    report = begin(QUESTION, method(args.shape, args.seeds), machine(), arguments=arguments, rows=[])
    for kind in KINDS:
        for name in RECIPES:
            ratios = measure(name, kind, args.shape, args.seeds)
            rounded = {gemm: round(ratio, 2) for gemm, ratio in ratios.items()}
            report["rows"].append({"recipe": name, "kind": kind, **rounded})
    print("\n" + table(report["rows"]), flush=True)
    write(report, args.json)


if __name__ == "__main__":
    run(main)
