"""How far is an FP8 Dense layer from the product that its codes and scales mean, by Flax's ops and by ours?

Run ``python -m benchmarks.flax_scales``; ``--help`` for the options. Start it with ``JAX_PLATFORMS=cpu``
where JAX finds the CUDA plugin but no GPU.

With delayed scaling an op divides each tensor by a float32 scale, rounds to FP8, multiplies the codes and
multiplies the result by the scales. What that *means* is, in exact arithmetic::

    codes(t) = round_to_fp8(t / scale)    meant = codes(a) codes(b) * scale_a * scale_b

Flax's ops cast the scale to the dtype of the layer before they divide by it, and divide in that dtype: 8
bits in bfloat16, 11 in float16. The figures, relative errors in the Frobenius norm, are::

    off   = |result - meant| / |meant|
    error = |result - exact| / |exact|    exact = a b, of the wide tensors

for the output (forward), the gradient of the input (dgrad) and that of the kernel (wgrad). ``error`` of
``meant`` itself is what FP8 costs: a code that was rounded the other way is about as near as the right one,
so what is ``off`` adds little to it.

Assumptions: Gaussian data, new in each step, the kernel the same; ``meant`` takes the scale that the op
itself hands on as that of the step, and is computed in float64; jitted, on the device at hand; a CPU
emulates FP8.
"""

from __future__ import annotations

import argparse
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
from benchmarks.accuracy import GEMMS
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
    text_of,
    write,
)

QUESTION = (
    "How far is what an FP8 nn.Dense computes in bfloat16 and float16 from the product that its codes and "
    "float32 scales mean, with Flax's ops and with ours?"
)
OPS: dict[str, Callable[[], nn.Module]] = {
    "flax-direct": fp8_ops.Fp8DirectDotGeneralOp,
    "flax-qdq": fp8_ops.Fp8DotGeneralOp,
    "fp8flax": fp8.Fp8DotGeneralOp,
    "fp8flax-qdq": partial(fp8.Fp8DotGeneralOp, form="qdq"),
}
CASES = (("bfloat16", 1.0), ("float16", 1.0), ("float16", 1e-4))
"""Dtypes, and standard deviations of the output gradient."""
SHAPES: tuple[Shape, ...] = ((64, 96, 128), (256, 256, 256), (512, 256, 384))
AFTER = (1, 5)
SEEDS = 10
OWG = fp8.OVERWRITE_WITH_GRADIENT
RESULT = RESULTS / "flax_scales.json"


@functools.cache
def make_step(name: str, dtype: str, sizes: Shape) -> tuple[Any, Callable[..., Any]]:
    """Returns a fresh state, and the jitted step: output, and next state, gradients of kernel and input."""
    M, K, N = sizes
    with quiet():
        layer = nn.Dense(
            N,
            use_bias=False,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            dot_general_cls=OPS[name],
        )
        state = jax.jit(layer.init)(jax.random.key(0), jnp.zeros((M, K), jnp.dtype(dtype)))[OWG]

    @jax.jit
    def step(state: Any, w: jax.Array, x: jax.Array, g: jax.Array) -> tuple[jax.Array, Any]:
        def apply(state: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            return layer.apply({"params": {"kernel": w}, OWG: state}, x)

        out, vjp = jax.vjp(apply, state, w, x)
        return out, vjp(g)

    return state, step


def meant_tensor(x: np.ndarray, scale: float, dtype: Any) -> np.ndarray:
    """Returns the codes of a tensor times their scale, float64."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x / scale, -limit, limit).astype(dtype).astype(np.float64) * scale


def relative(difference: np.ndarray, of: np.ndarray) -> float:
    return float(np.linalg.norm(difference) / np.linalg.norm(of))


def errors(
    name: str, dtype: str, gradient: float, sizes: Shape, after: int, seed: int
) -> dict[str, dict[str, float]]:
    """Returns ``off``, ``error`` and ``error of meant`` by GEMM; not finite where the result is not."""
    M, K, N = sizes
    rng = np.random.default_rng(seed)
    state, step = make_step(name, dtype, sizes)

    def draw(deviation: float, *shape: int) -> jax.Array:
        return jnp.asarray(deviation * rng.standard_normal(shape), jnp.dtype(dtype))

    w = draw(1 / math.sqrt(K), K, N)
    with quiet():
        for _ in range(after + 1):
            x, g = draw(1.0, M, K), draw(gradient, M, N)
            out, (state, dw, dx) = step(state, w, x, g)
    (scales,) = state.values()
    wide = [np.asarray(array, np.float64) for array in (x, w, g)]
    roles = (
        ("input", ml_dtypes.float8_e4m3fn),
        ("kernel", ml_dtypes.float8_e4m3fn),
        ("output_grad", ml_dtypes.float8_e5m2),
    )
    narrow = [
        meant_tensor(array, float(scales[f"{role}_scale"][0]), of) for array, (role, of) in zip(wide, roles)
    ]
    figures = {}
    for gemm, result, meant, exact in zip(GEMMS, (out, dx, dw), three_gemms(*narrow), three_gemms(*wide)):
        with np.errstate(all="ignore"):
            got = np.asarray(result, np.float64)
            figures[gemm] = {
                "off": relative(got - meant, meant),
                "error": relative(got - exact, exact),
                "error of meant": relative(meant - exact, exact),
            }
    return figures


def three_gemms(x: np.ndarray, w: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, ...]:
    return x @ w, g @ w.T, x.T @ g


def measure(name: str, dtype: str, gradient: float, sizes: Shape, after: int, seeds: int) -> Row:
    """Returns one row: percentages, ``None`` where a result was not finite in every seed."""
    found = [errors(name, dtype, gradient, sizes, after, seed) for seed in range(seeds)]
    row: Row = {
        "op": name,
        "dtype": dtype,
        "gradient": gradient,
        "shape": text_of(sizes),
        "after steps": after,
    }
    for gemm in GEMMS:
        off = [100 * figures[gemm]["off"] for figures in found]
        is_finite = all(map(math.isfinite, off))
        row[gemm] = {
            "off": round(statistics.mean(off), 3) if is_finite else None,
            "off, least": round(min(off), 3) if is_finite else None,
            "off, most": round(max(off), 3) if is_finite else None,
            **{
                key: round(100 * statistics.mean(figures[gemm][key] for figures in found), 3)
                if is_finite
                else None
                for key in ("error", "error of meant")
            },
        }
    return row


def summarize(rows: Sequence[Row]) -> list[Row]:
    """Returns a row for each op and case: over all shapes and steps the means, and the range of ``off``."""
    keys = ("op", "dtype", "gradient")
    summary = []
    for values in dict.fromkeys(tuple(row[key] for key in keys) for row in rows):
        those = [row for row in rows if tuple(row[key] for key in keys) == values]
        line: Row = dict(zip(keys, values))
        for gemm in GEMMS:
            cells = [row[gemm] for row in those]
            is_finite = all(cell["off"] is not None for cell in cells)
            reduced: dict[str, Callable[[list[float]], float]] = {
                "off": statistics.mean,
                "off, least": min,
                "off, most": max,
                "error": statistics.mean,
                "error of meant": statistics.mean,
            }
            line[gemm] = {
                key: round(reduce([cell[key] for cell in cells]), 3) if is_finite else None
                for key, reduce in reduced.items()
            }
        summary.append(line)
    return summary


def method(shapes: Sequence[Shape], after: Sequence[int], seeds: int) -> list[str]:
    return [
        "off = |result - meant| / |meant|, error = |result - exact| / |exact|, in percent, Frobenius "
        "norms; meant = the float64 product of the FP8 codes of tensor / scale (correctly rounded, "
        "saturated) times the two scales; exact = the float64 product of the wide tensors. x w (forward), "
        "g w^T (dgrad), x^T g (wgrad). null: not finite.",
        "The layer: nn.Dense(N, use_bias=False) with delayed scaling, jitted, dtype and param_dtype as "
        "given. Input x (M, K) standard normal, output gradient g (M, N) normal with the standard "
        "deviation 'gradient', both new in each step, the kernel w (K, N) normal with variance 1/K; MxKxN "
        f"is {', '.join(map(text_of, shapes))}; seeds 0 to {seeds - 1}.",
        f"Measured in the step after {' and after '.join(map(str, after))} step(s), with the scale that "
        "the op hands on as that of this step. (In the very first step it is 1, which is not rounded.)",
        "flax-direct = flax.linen.fp8_ops.Fp8DirectDotGeneralOp; flax-qdq = that module's "
        "Fp8DotGeneralOp; fp8flax = fp8flax.Fp8DotGeneralOp; fp8flax-qdq = the same with form='qdq'.",
        "In the summary off and error are means over shapes, steps and seeds; 'least' and 'most' over all.",
    ]


def table(rows: Sequence[Row]) -> str:
    """Returns the summary as text."""

    def text(value: float | None) -> str:
        return "not finite" if value is None else f"{value:.2f}"

    lines = [
        [
            "dtype",
            "gradient",
            "op",
            *(f"{gemm} {key}" for gemm in GEMMS for key in ("off", "from-to", "error")),
        ]
    ]
    for row in rows:
        cells = []
        for gemm in GEMMS:
            cell = row[gemm]
            span = "" if cell["off"] is None else f"{text(cell['off, least'])}-{text(cell['off, most'])}"
            cells += [text(cell["off"]), span, text(cell["error"])]
        lines.append([row["dtype"], f"{row['gradient']:g}", row["op"], *cells])
    return aligned(lines, 3)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--shapes", type=parse_shape, nargs="+", default=SHAPES, metavar="MxKxN")
    parser.add_argument("--after", type=int, nargs="+", default=AFTER, help="steps before the one measured")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (%(default)s)")
    add_json(parser, RESULT)
    args = parser.parse_args(argv)
    if args.seeds < 1 or min(args.after) < 0:
        parser.error("--seeds must be 1 or more, --after 0 or more.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    arguments = {
        "shapes": [list(sizes) for sizes in args.shapes],
        "after": list(args.after),
        "seeds": args.seeds,
    }
    report = begin(
        QUESTION, method(args.shapes, args.after, args.seeds), machine(), arguments=arguments, rows=[]
    )
    for case, name, sizes, after in itertools.product(CASES, OPS, args.shapes, args.after):
        report["rows"].append(measure(name, *case, sizes, after, args.seeds))
        print(".", end="", flush=True)
    report["summary"] = summarize(report["rows"])
    print("\nPercent:\n" + table(report["summary"]), flush=True)
    write(report, args.json)


if __name__ == "__main__":
    run(main)
