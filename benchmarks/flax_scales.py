"""How far is an FP8 Dense layer from the product that its codes and scales mean, by Flax's ops and by ours?

Run ``make bench-flax-scales``; ``ARGS=--help`` for the options.

With delayed scaling an op divides each tensor by a float32 scale, rounds to FP8, multiplies the codes and
multiplies the result by the scales. Flax's ops cast the scale to the dtype of the layer before they
divide by it, and divide in that dtype: 8 bits in bfloat16, 11 in float16.

off = |result - meant| / |meant|, error = |result - exact| / |exact|, in percent, Frobenius norms. meant =
the float64 product of the FP8 codes of tensor / scale (correctly rounded, saturated) times the two
scales. exact = the float64 product of the wide tensors. The products are x w (forward), g w^T (dgrad) and
x^T g (wgrad). null stands for a result that is not finite. FP8 costs the error of "meant": a code that
was rounded the other way is about as near as the right one, so the figure off adds little to it.

The layer: nn.Dense(N, use_bias=False) with delayed scaling, jitted, dtype and param_dtype as given. Input
x (M, K) standard normal, output gradient g (M, N) normal with the standard deviation 'gradient', both new
in each step, the kernel w (K, N) normal with variance 1/K; shapes are MxKxN. A CPU emulates FP8.

Measured in the step after 1 and after 5 steps, with the scale that the op hands on as that of this step.
(In the very first step it is 1, which is not rounded.)

flax-direct = flax.linen.fp8_ops.Fp8DirectDotGeneralOp; flax-qdq = that module's Fp8DotGeneralOp; fp8flax
= fp8flax.Fp8DotGeneralOp; fp8flax-qdq = the same with form='qdq'.

In the summary off and error are means over shapes, steps and seeds; 'least' and 'most' over all.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.linen import fp8_ops

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import GEMMS, OWG, Row, Shape

OPS: dict[str, Callable[[], nn.Module]] = {
    "flax-direct": fp8_ops.Fp8DirectDotGeneralOp,
    "flax-qdq": fp8_ops.Fp8DotGeneralOp,
    "fp8flax": fp8.Fp8DotGeneralOp,
    "fp8flax-qdq": partial(fp8.Fp8DotGeneralOp, form="qdq"),
}
CASES = (("bfloat16", 1.0), ("float16", 1.0), ("float16", 1e-4))
"""Dtypes, and standard deviations of the output gradient."""
OPTIONS: dict[str, Any] = {"shapes": ((64, 96, 128), (256, 256, 256), (512, 256, 384)), "seeds": 10}
AFTER = (1, 5)
ROLES = {
    "input": ml_dtypes.float8_e4m3fn,
    "kernel": ml_dtypes.float8_e4m3fn,
    "output_grad": ml_dtypes.float8_e5m2,
}
FIGURES: dict[str, Callable[[list[float]], float]] = {
    "off": statistics.mean,
    "off, least": min,
    "off, most": max,
    "error": statistics.mean,
    "error of meant": statistics.mean,
}


@functools.cache
def make_layer(name: str, dtype: str, sizes: Shape) -> tuple[Any, Callable[..., Any]]:
    """Returns a fresh state, and the jitted step."""
    M, K, N = sizes
    dtypes: Any = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    with common.quiet():
        layer = nn.Dense(N, use_bias=False, dot_general_cls=OPS[name], **dtypes)
        variables = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((M, K), jnp.dtype(dtype)))
    return variables[OWG], jax.jit(common.make_step(layer.apply))


def meant_tensor(x: np.ndarray, scale: float, dtype: Any) -> np.ndarray:
    """Returns the codes of a tensor times their scale, float64."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x / scale, -limit, limit).astype(dtype).astype(np.float64) * scale


def errors(
    name: str, dtype: str, gradient: float, sizes: Shape, after: int, seed: int
) -> dict[str, dict[str, float]]:
    """Returns the figures of each GEMM in percent; not finite where the result is not."""
    M, K, N = sizes
    rng = np.random.default_rng(seed)
    state, step = make_layer(name, dtype, sizes)

    def draw(deviation: float, *shape: int) -> jax.Array:
        return jnp.asarray(deviation * rng.standard_normal(shape), jnp.dtype(dtype))

    w = draw(1 / math.sqrt(K), K, N)
    variables = {"params": {"kernel": w}, OWG: state}
    with common.quiet():
        for _ in range(after + 1):
            x, g = draw(1.0, M, K), draw(gradient, M, N)
            out, gradients, dx = step(variables, x, g)
            variables = common.with_next_state(variables, gradients)
    (scales,) = variables[OWG].values()
    wide = [np.asarray(array, np.float64) for array in (x, w, g)]
    narrow = [
        meant_tensor(array, float(scales[f"{role}_scale"][0]), of)
        for array, (role, of) in zip(wide, ROLES.items())
    ]
    figures = {}
    results = (out, dx, gradients["params"]["kernel"])
    for gemm, result, meant, exact in zip(
        GEMMS, results, common.three_gemms(*narrow), common.three_gemms(*wide)
    ):
        with np.errstate(all="ignore"):
            got = np.asarray(result, np.float64)
            off = 100 * common.relative_error(got, meant)
            figures[gemm] = {
                **dict.fromkeys(("off", "off, least", "off, most"), off),
                "error": 100 * common.relative_error(got, exact),
                "error of meant": 100 * common.relative_error(meant, exact),
            }
    return figures


def reduced(cells: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Returns the figures of one GEMM over several measurements, ``None`` where one was not finite."""
    is_finite = all(cell["off"] is not None and math.isfinite(cell["off"]) for cell in cells)
    return {
        key: round(reduce([cell[key] for cell in cells]), 3) if is_finite else None
        for key, reduce in FIGURES.items()
    }


def measure(name: str, dtype: str, gradient: float, sizes: Shape, after: int, seeds: int) -> Row:
    """Returns one row."""
    found = [errors(name, dtype, gradient, sizes, after, seed) for seed in range(seeds)]
    case = {
        "op": name,
        "dtype": dtype,
        "gradient": gradient,
        "shape": common.text_of(sizes),
        "after steps": after,
    }
    return case | {gemm: reduced([figures[gemm] for figures in found]) for gemm in GEMMS}


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each op and case, over all shapes and steps."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"], row["gradient"]), []).append(row)
    return [
        dict(zip(("op", "dtype", "gradient"), case))
        | {gemm: reduced([row[gemm] for row in of_case]) for gemm in GEMMS}
        for case, of_case in groups.items()
    ]


def measure_all(shapes: Sequence[Shape], seeds: int) -> Row:
    rows = [
        measure(name, *case, sizes, after, seeds)
        for case, name, sizes, after in itertools.product(CASES, OPS, shapes, AFTER)
    ]
    return {"rows": rows, "summary": summarize(rows)}


def table(report: Row) -> str:
    """Returns the summary as text."""

    def shown(gemm: str, *keys: str) -> Callable[[Row], str]:
        def cell(row: Row) -> str:
            values = [row[gemm][key] for key in keys]
            return "not finite" if None in values else "-".join(f"{value:.2f}" for value in values)

        return cell

    columns: dict[str, Callable[[Row], str]] = {
        key: common.word(key) for key in ("dtype", "gradient", "op")
    }
    for gemm in GEMMS:
        columns[f"{gemm} off"] = shown(gemm, "off")
        columns[f"{gemm} from-to"] = shown(gemm, "off, least", "off, most")
        columns[f"{gemm} error"] = shown(gemm, "error")
    return "Percent:\n" + common.text_table(columns, report["summary"], 3)


def main(argv: Sequence[str] | None = None) -> None:
    common.command(__doc__, "flax_scales", measure_all, table, argv, options=OPTIONS)


if __name__ == "__main__":
    common.run(main)
