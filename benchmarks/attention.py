"""How much error does FP8 in attention's own two products add, with which recipe, on which data?

Run ``python -m benchmarks.attention``; ``--help`` for the options. Start it with ``JAX_PLATFORMS=cpu``
where JAX finds the CUDA plugin but no GPU.

The products are ``S = q k^T / sqrt(d)`` and ``out = softmax(S) v``: not those of the layer's projections,
which ``accuracy.py`` measures. The figure is its signal-to-quantization-noise ratio, in dB, more is
better::

    SQNR = 10 log10(sum(exact**2) / sum((measured - exact)**2))

for the output and for the gradients of q, k and v. Both sums run over all elements and all seeds. 6.02 dB
are one bit.

Assumptions: ``exact`` is computed in float64 from the float32 tensors; in the FP8 rows everything but the
FP8 casts is float32, so that on a CPU next to nothing else adds to the error (a GPU adds that of its
accumulation, a fused kernel that of its online softmax); there is no mask; delayed scaling has seen the
same data one step before.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8flax as fp8
from benchmarks.accuracy import RECIPES as ALL_RECIPES
from benchmarks.accuracy import recipe_text
from benchmarks.common import RESULTS, Row, add_json, aligned, begin, machine, quiet, run, sqnr, write

QUESTION = "How much error does FP8 add in the two products of attention, q k^T and softmax v?"
BF16 = "bf16"
RECIPES = {
    name: ALL_RECIPES[name]
    for name in (
        BF16,
        "delayed",
        "current",
        "current-e4m3",
        "axiswise",
        "mxfp8",
        "block128",
        "block128-f32",
    )
}
"""None stands for attention without FP8, in bfloat16."""
PRODUCTS = {"both": ("qk", "pv"), "q k^T only": ("qk",), "softmax v only": ("pv",)}
"""Which of the two run in FP8."""
PARTS = ("out", "dq", "dk", "dv")
SHAPE = (2, 4, 256, 64)
"""Batch, heads, length and head dimension."""
SEEDS = 3
NUM_SINKS, PULL = 4, 8.0
RESULT = RESULTS / "attention.json"

Shape = tuple[int, int, int, int]
Arrays = tuple[np.ndarray, ...]
QK = (((3,), (3,)), ((0, 1), (0, 1)))
PV = (((3,), (2,)), ((0, 1), (0, 1)))


def _gaussian(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal(shape), rng.standard_normal(shape)


def _peaked(rng: np.random.Generator, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Every query leans towards one direction of its head, along which a few keys lie."""
    q, k = _gaussian(rng, shape)
    batch, heads, _, dim = shape
    direction = rng.standard_normal((batch, heads, 1, dim))
    direction *= PULL / np.linalg.norm(direction, axis=-1, keepdims=True)
    k[:, :, :NUM_SINKS] += direction
    return q + direction, k


KINDS: dict[str, Callable[[np.random.Generator, Shape], tuple[np.ndarray, np.ndarray]]] = {
    "Gaussian": _gaussian,
    "peaked": _peaked,
}


@functools.lru_cache(maxsize=16)
def data(kind: str, shape: Shape, seed: int) -> tuple[Arrays, Arrays, float]:
    """Returns q, k, v and output gradient in float32, the exact results, and the share of the top keys."""
    rng = np.random.default_rng(seed)
    v, g = _gaussian(rng, shape)  # first, so that they are the same for all kinds
    narrow = tuple(array.astype(np.float32) for array in (*KINDS[kind](rng, shape), v, g))
    q, k, v, g = (array.astype(np.float64) for array in narrow)
    scores = np.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bhtd,bhsd->bhts", g, v)
    ds = p * (dp - np.sum(p * dp, -1, keepdims=True)) / math.sqrt(shape[-1])
    exact = (
        np.einsum("bhts,bhsd->bhtd", p, v),
        np.einsum("bhts,bhsd->bhtd", ds, k),
        np.einsum("bhts,bhtd->bhsd", ds, q),
        np.einsum("bhts,bhtd->bhsd", p, g),
    )
    top = np.sort(p, axis=-1)[..., -NUM_SINKS:].sum(-1).mean()
    return narrow, exact, float(top)


class Attention(nn.Module):
    """Attention without projections, either of its products in FP8."""

    recipe: fp8.Recipe | None
    products: tuple[str, ...]

    @nn.compact
    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Maps three arrays of ``(batch, heads, length, dim)`` to one."""
        scores = self._dot("qk", q, k, QK) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
        p = nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
        return self._dot("pv", p, v, PV)

    def _dot(self, name: str, lhs: jax.Array, rhs: jax.Array, dims: Any) -> jax.Array:
        if self.recipe is None or name not in self.products:
            return lax.dot_general(lhs, rhs, dims, lax.Precision.HIGHEST)
        return fp8.Fp8DotGeneralOp(recipe=self.recipe, name=name)(lhs, rhs, dims)


@functools.cache
def make_step(name: str, products: str) -> Callable[..., tuple[Any, ...]]:
    """Returns the jitted function that is measured: output, gradients of q, k and v, next state."""
    layer = Attention(RECIPES[name], PRODUCTS[products])

    @jax.jit
    def step(variables: Any, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> tuple[Any, ...]:
        def loss(variables: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            out = layer.apply(variables, q, k, v)
            return jnp.sum(out * g), out

        (_, out), grads = fp8.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(variables, q, k, v)
        return out, *grads[1:], grads[0]

    return step


def results(name: str, products: str, tensors: Arrays) -> Arrays:
    """Returns what attention gives for float32 tensors, by ``PARTS``."""
    step = make_step(name, products)
    q, k, v, g = (jnp.asarray(a, jnp.bfloat16 if RECIPES[name] is None else jnp.float32) for a in tensors)
    layer = Attention(RECIPES[name], PRODUCTS[products])
    variables: Any = jax.jit(layer.init)(jax.random.key(0), q, k, v)
    if variables:
        # The gradient of the scaling state is the next state, which knows the amaxes of this data.
        variables = step(variables, q, k, v, g)[-1]
    return tuple(np.asarray(array, np.float64) for array in step(variables, q, k, v, g)[:-1])


def measure(
    name: str, products: str, kind: str, shape: Shape = SHAPE, seeds: int = SEEDS
) -> dict[str, float]:
    """Returns the SQNR in dB, by ``PARTS``, over the seeds 0 to ``seeds - 1``."""
    runs = []
    for seed in range(seeds):
        tensors, exact, _ = data(kind, shape, seed)
        with quiet():
            runs.append(zip(exact, results(name, products, tensors), strict=True))
    return {result: sqnr(pairs) for result, pairs in zip(PARTS, zip(*runs), strict=True)}


# The report.


def method(shape: Shape, seeds: int) -> list[str]:
    batch, heads, length, dim = shape
    recipes = "; ".join(f"{n} = {recipe_text(n)}" for n in RECIPES if n != BF16)
    shares = {kind: sum(data(kind, shape, seed)[2] for seed in range(seeds)) / seeds for kind in KINDS}
    return [
        "SQNR in dB = 10 log10(sum(exact^2) / sum((measured - exact)^2)), both sums over all elements and "
        "all seeds; more is better, 6.02 dB are one bit. exact = attention and its gradients in float64.",
        f"out = softmax(q k^T / sqrt(d)) v without a mask; batch {batch}, {heads} heads, length {length}, "
        f"d = {dim}; loss = sum(out * g), seeds 0 to {seeds - 1}. In FP8, q and the softmax are the inputs "
        "of Fp8DotGeneralOp, k and v its kernels; so dq, dk, dv and the softmax's gradient are products in "
        "FP8 too. The softmax runs in float32.",
        "FP8 rows: all that is not cast to FP8 is float32, also the product that is not in FP8. bf16: all "
        "tensors and results of products are bfloat16.",
        f"Recipes: {recipes}. Delayed scaling is measured in its second step on the same data, so its "
        "scales come from the true amaxes.",
        "Data: v and g standard normal. Gaussian: q and k too. peaked: to every query, and to "
        f"{NUM_SINKS} keys, one vector of norm {PULL:g} is added, another for each head. The {NUM_SINKS} "
        "keys with the largest weights have on average "
        + ", ".join(f"{share:.1%} of a query's weight ({kind})" for kind, share in shares.items())
        + ".",
    ]


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text: one line for each recipe, one column for each kind of data and result."""
    lines = [["SQNR, dB", "in FP8", *(f"{kind} {result}" for kind in KINDS for result in PARTS)]]
    for recipe, products in dict.fromkeys((row["recipe"], row["products"]) for row in rows):
        of_line = {
            row["kind"]: row for row in rows if (row["recipe"], row["products"]) == (recipe, products)
        }
        cells = (f"{of_line[kind][result]:.2f}" for kind in KINDS for result in PARTS)
        lines.append([recipe, products, *cells])
    return aligned(lines, 2)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--length", type=int, default=SHAPE[2], help="of the sequence (%(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many (%(default)s)")
    add_json(parser, RESULT)
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.length < NUM_SINKS:
        parser.error(f"--seeds must be 1 or more, --length {NUM_SINKS} or more.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    shape = (*SHAPE[:2], args.length, SHAPE[3])
    arguments = {"shape": list(shape), "seeds": args.seeds}
    report = begin(QUESTION, method(shape, args.seeds), machine(), arguments=arguments, rows=[])
    for name in RECIPES:
        for products in PRODUCTS if name != BF16 else ("both",):
            for kind in KINDS:
                ratios = measure(name, products, kind, shape, args.seeds)
                rounded = {result: round(ratio, 2) for result, ratio in ratios.items()}
                written = "none" if name == BF16 else products
                report["rows"].append({"recipe": name, "products": written, "kind": kind, **rounded})
    print("\n" + table(report["rows"]), flush=True)
    write(report, args.json)


if __name__ == "__main__":
    run(main)
