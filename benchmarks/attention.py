"""How much error does FP8 add in the two products of attention, q k^T and softmax v?

Run ``python -m benchmarks.attention``; ``--help`` for the options. Start it with ``JAX_PLATFORMS=cpu``
where JAX finds the CUDA plugin but no GPU. ``accuracy.py`` measures the projections of the layer.

SQNR in dB = 10 log10(sum(exact^2) / sum((measured - exact)^2)), both sums over all elements and all
seeds; more is better, 6.02 dB are one bit. exact = attention and its gradients in float64.

out = softmax(q k^T / sqrt(d)) v without a mask; the shape is batch, heads, length and d. In FP8, q and
the softmax are the inputs of Fp8DotGeneralOp, k and v its kernels; so dq, dk, dv and the softmax's
gradient are products in FP8 too. The softmax runs in float32.

FP8 rows: all that is not cast to FP8 is float32, also the product that is not in FP8. So on a CPU next to
nothing else adds to the error; a GPU adds that of its accumulation. bf16: all tensors and results of
products are bfloat16.

Delayed scaling is measured in its second step on the same data, so its scales come from the true amaxes.

Data: v and g standard normal. Gaussian: q and k too. peaked: to every query, and to 4 keys, one vector of
norm 8 is added, another for each head. The 4 keys with the largest weights have on average 12.0% of a
query's weight (Gaussian), 94.6% (peaked).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8flax as fp8
from benchmarks import common
from benchmarks.accuracy import RECIPES as ALL_RECIPES
from benchmarks.accuracy import (
    Arrays,
    in_dtype_of,
    in_float64,
    ratios,
    recipes_text,
    rounded,
    wide_table,
)
from benchmarks.common import Row, Shape

BF16 = "bf16"
RECIPES = {
    name: ALL_RECIPES[name]
    for name in (
        *(BF16, "delayed", "current", "current-e4m3", "axiswise"),
        *("mxfp8", "block128", "block128-f32"),
    )
}
"""None stands for attention without FP8, in bfloat16."""
PRODUCTS = {"both": ("qk", "pv"), "q k^T only": ("qk",), "softmax v only": ("pv",)}
"""Which of the two run in FP8."""
PARTS = ("out", "dq", "dk", "dv")
OPTIONS: dict[str, Any] = {"shape": (2, 4, 256, 64), "seeds": 3}
NUM_SINKS, PULL = 4, 8.0

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
def jitted_step(name: str, products: str) -> tuple[Attention, Callable[..., tuple[Any, ...]]]:
    layer = Attention(RECIPES[name], PRODUCTS[products])
    return layer, jax.jit(common.make_step(layer.apply))


def results(name: str, products: str, *tensors: np.ndarray) -> Arrays:
    """Returns what attention gives for float32 tensors, by ``PARTS``."""
    layer, step = jitted_step(name, products)
    q, k, v, g = in_dtype_of(RECIPES[name], tensors)
    variables = jax.jit(layer.init)(jax.random.key(0), q, k, v)
    out, _, *gradients = common.second_step(step, variables, q, k, v, g)
    return in_float64(out, *gradients)


def measure(name: str, products: str, kind: str, shape: Shape, seeds: int) -> dict[str, float]:
    """Returns the SQNR in dB, by ``PARTS``, over the seeds 0 to ``seeds - 1``."""
    drawn = (data(kind, shape, seed)[:2] for seed in range(seeds))
    return ratios(partial(results, name, products), drawn, PARTS)


def measure_all(shape: Shape, seeds: int) -> Row:
    return {
        "rows": [
            {
                "recipe": name,
                "products": "none" if name == BF16 else products,
                "kind": kind,
                **rounded(measure(name, products, kind, shape, seeds)),
            }
            for name in RECIPES
            for products in (PRODUCTS if name != BF16 else ("both",))
            for kind in KINDS
        ]
    }


def main(argv: Sequence[str] | None = None) -> None:
    table = partial(wide_table, words=("recipe", "products"), names=PARTS)
    common.command(
        __doc__, "attention", measure_all, table, argv, options=OPTIONS, method=[recipes_text(RECIPES)]
    )


if __name__ == "__main__":
    common.run(main)
