"""How much error does each recipe add to the forward GEMM, dgrad and wgrad of one nn.Dense, on which data?

Run ``make bench-accuracy``.

SQNR in dB = 10 log10(sum(exact^2) / sum((measured - exact)^2)), the signal-to-quantization-noise ratio;
both sums over all elements and all seeds; more is better, 6.02 dB are one bit. exact = the float64
product of the tensors before anything is cast: x w (forward), g w^T (dgrad), x^T g (wgrad).

The layer: nn.Dense(N, use_bias=False). Input x (M, K), kernel w (K, N) and output gradient g (M, N) are
float32 and so are the results, except for bf16, where all are bfloat16. So on a CPU next to nothing but
the FP8 casts adds to the error; a GPU adds that of its accumulation.

Delayed scaling is measured in its second step on the same data, so its scales come from the true amaxes.

Data: x and g of one kind, w always Gaussian with variance 1/K. Gaussian = standard normal z; outliers =
z, times 100 with probability 0.001; log-normal = sign * exp(2 z) * 1e-4.

SQNR weighs every element by its power: what a recipe does to small values next to large ones hardly
counts.

Compare recipes of one FP8 format and one kind of scale. A float32 scale makes the amax of its tensor,
slice or block the largest FP8 value, without rounding error: the finer its granularity, the more of the
large values are exact. A power of two only moves the exponent: in the range of normal FP8 values its
granularity makes no difference to the rounding, and nearly all of the power of this data lies in that
range.
"""

from __future__ import annotations

import dataclasses
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
from benchmarks import common
from benchmarks.common import GEMMS, Row, Shape

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
    "nvfp4": fp8.NVFP4BlockScaling(),
    "block128": fp8.Float8BlockScaling(),
    "block128-f32": fp8.Float8BlockScaling(use_f32_scales=True),
}
"""None stands for the layer without FP8, in bfloat16."""
OPTIONS: dict[str, Any] = {"shape": (1024, 1024, 1024), "seeds": 3}

Arrays = tuple[np.ndarray, ...]


def _gaussian(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return rng.standard_normal(shape)


def _outliers(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    values = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 1e-3, 100.0 * values, values)


def _log_normal(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    return 1e-4 * rng.choice((-1.0, 1.0), shape) * np.exp(2 * rng.standard_normal(shape))


KINDS: dict[str, Callable[[np.random.Generator, Shape], np.ndarray]] = {
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


def applied(layer: nn.Module) -> Callable[..., Any]:
    """Returns the layer's function of variables and input; its random key is always the same."""
    return partial(layer.apply, rngs={"fp8": jax.random.key(0)})


@functools.cache
def jitted_step(name: str, features: int) -> Callable[..., tuple[Any, ...]]:
    return jax.jit(common.make_step(applied(make_layer(name, features))))


def results(name: str, x: Any, w: Any, g: Any) -> Arrays:
    """Returns what the layer gives for float32 tensors, by ``GEMMS``."""
    dtype = jnp.bfloat16 if RECIPES[name] is None else jnp.float32
    x, w, g = (jnp.asarray(array, dtype) for array in (x, w, g))
    variables: Any = {"params": {"kernel": w}}
    if RECIPES[name] is not None:
        variables = fp8.add_fp8_state(variables, make_layer(name, w.shape[1]), x)
    out, dvariables, dx = common.second_step(jitted_step(name, w.shape[1]), variables, x, g)
    return tuple(np.asarray(array, np.float64) for array in (out, dx, dvariables["params"]["kernel"]))


def measure(recipe_name: str, kind: str, sizes: Shape, seeds: int) -> dict[str, float]:
    """Returns the SQNR in dB of each GEMM, by ``GEMMS``, over the seeds 0 to ``seeds - 1``."""
    drawn = (data(kind, sizes, seed) for seed in range(seeds))
    with common.quiet():
        runs = [zip(exact, results(recipe_name, *tensors), strict=True) for tensors, exact in drawn]
    return {gemm: common.sqnr(pairs) for gemm, pairs in zip(GEMMS, zip(*runs), strict=True)}


# The report.


def recipe_text(recipe: Any) -> str:
    """Returns a recipe as it is written in code, without what is the default."""
    if recipe is None:
        return "without FP8"
    changed = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    changed = {name: value for name, value in changed.items() if value != getattr(type(recipe)(), name)}
    options = (f"{k}={v!r}" if isinstance(v, str | bool) else f"{k}={v}" for k, v in changed.items())
    return f"{type(recipe).__name__}({', '.join(options)})"


METHOD = "Recipes: " + "; ".join(f"{name} = {recipe_text(recipe)}" for name, recipe in RECIPES.items())


def measure_all(shape: Shape, seeds: int) -> Row:
    return {
        "rows": [
            {"recipe": name, "kind": kind}
            | {gemm: round(ratio, 2) for gemm, ratio in measure(name, kind, shape, seeds).items()}
            for kind in KINDS
            for name in RECIPES
        ]
    }


def table(report: Row) -> str:
    """Returns the table of docs/accuracy.md: forward, dgrad and wgrad for each kind of data."""
    found = {(row["recipe"], row["kind"]): row for row in report["rows"]}

    def cell(kind: str, row: Row) -> str:
        return " / ".join(f"{found[row['recipe'], kind][gemm]:.1f}" for gemm in GEMMS)

    columns: common.Columns = {
        "recipe": lambda row: f"`{row['recipe']}`",
        **{kind: partial(cell, kind) for kind in KINDS},
    }
    return common.markdown(columns, [{"recipe": name} for name in RECIPES])


def main(argv: Sequence[str] | None = None) -> None:
    common.command(__doc__, "accuracy", measure_all, table, argv, options=OPTIONS, method=[METHOD])


if __name__ == "__main__":
    main()
