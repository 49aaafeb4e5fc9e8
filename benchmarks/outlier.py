"""Which rule for the scales of delayed scaling bears an outlier, and data whose size changes?

Run ``make bench-outlier``; ``ARGS=--help`` for the options.

A good rule neither saturates nor flushes to zero. The network: Dense(64), a norm without parameters,
Dense(64), relu, Dense(4); inputs of 16, batches of 64; Adam (5e-3, cosine) after clipping by the global
norm. It learns what a random network computes of the input's direction, so what the data are multiplied
by leaves the task as it is. FP8 is emulated on a CPU: its values are those of a GPU, up to the order of
accumulation.

Outliers are 1e6: in the input at a tenth of the steps, at the ten from there, or at every 50th; added to
the output gradient of one element at that step. An outlier in the input has loss weight zero, and one in
the gradient meets clipping, so the float32 run bears both.

loss = mean squared error on fresh data after the last step, in the arithmetic of the training, the median
of the seeds. flushed, saturated = shares of elements, mean over steps and seeds, of the first layer's
input or the last layer's output gradient, whichever is larger.

max of N = Flax's and Transformer Engine's rule with a history of N. A window of the newest N in a longer
history is the same. entries within 16x = an amax enters the history as at most 16 times its maximum.
reset = the history forgets all but its newest 16 entries if these are 448 times smaller. DelayedScaling()
= max of 1024, bounded by the second largest of the newest 16.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import OWG, Columns, Row

BATCH, WIDTH, HIDDEN, OUTPUTS = 64, 16, 64, 4
OPTIONS: dict[str, Any] = {"steps": 1000, "seeds": 3}
OUTLIER, GUARD, WINDOW = 1e6, 16.0, 16
SHARES = ("flushed", "saturated")


class Case(NamedTuple):
    """The events at each step."""

    factor: np.ndarray
    """The factor of the input."""
    x_outlier: np.ndarray
    """Replaces one element of the input, in an example without weight; 0 for nothing."""
    g_outlier: np.ndarray
    """Added to one element of the output gradient."""


def cases(steps: int) -> dict[str, Case]:
    at, noise = np.arange(steps), np.random.default_rng(0).standard_normal(steps)
    zeros, ones, half = np.zeros(steps), np.ones(steps), at >= steps // 2
    once = np.where(at == steps // 10, OUTLIER, 0.0)
    ten = np.where((at >= steps // 10) & (at < steps // 10 + 10), OUTLIER, 0.0)
    recurring = np.where(at % 50 == 25, OUTLIER, 0.0)
    of_factor = {
        "1000 times larger from half-time": np.where(half, 1e3, 1.0),
        "1000 times smaller from half-time": np.where(half, 1e-3, 1.0),
        "growing 1000 times": 1e3 ** (at / steps),
        "noisy, log-normal, sigma 1.5": np.exp(1.5 * noise),
    }
    return {
        "no outlier": Case(ones, zeros, zeros),
        "one in the input": Case(ones, once, zeros),
        "in the input of ten steps": Case(ones, ten, zeros),
        "in the input of every 50th": Case(ones, recurring, zeros),
        "one in the gradient": Case(ones, zeros, once),
        **{name: Case(factor, zeros, zeros) for name, factor in of_factor.items()},
    }


class MaxOp(nn.Module):
    """Flax's rule, and Transformer Engine's: the maximum of the history, whatever is in it."""

    length: int = 1024

    @nn.compact
    def __call__(self, lhs: Any, rhs: Any, dims: Any, precision: Any = None, dtype: Any = None) -> Any:
        """Is called like ``lax.dot_general``."""

        def state(role: str) -> Any:
            scale = self.variable(OWG, f"{role}_scale", jnp.ones, (1,), jnp.float32)
            history = self.variable(OWG, f"{role}_amax_history", jnp.zeros, (self.length,), jnp.float32)
            return scale.value, history.value

        lhs = fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, lhs, *state("input"))
        rhs = fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, rhs, *state("kernel"))
        out = lax.dot_general(lhs, rhs, dims, precision, dtype)
        return fp8.out_qdq(jnp.float32, jnp.float8_e5m2, out, *state("output_grad"))


def guarded(history: jax.Array) -> jax.Array:
    """Returns a history that the newest amax entered at no more than ``GUARD`` times what was there."""
    before = jnp.max(history[1:])
    return history.at[0].set(jnp.where(before > 0, jnp.minimum(history[0], GUARD * before), history[0]))


def reset(history: jax.Array) -> jax.Array:
    """Returns a history that forgets all but the newest where these have become 448 times smaller."""
    position = jnp.arange(history.size)
    newest = jnp.where((position == 0) | (position > history.size - WINDOW), history, 0.0)
    return jnp.where(jnp.max(history) > 448 * jnp.max(newest), newest, history)


class Rule(NamedTuple):
    """A contender: the op of its layers, and what it does to each amax history after a step."""

    op: Callable[[], Any] | None
    edit: Callable[[jax.Array], jax.Array] = lambda history: history


RULES = {
    "float32": Rule(None),
    "max of 1024": Rule(MaxOp),
    f"max of {WINDOW}": Rule(partial(MaxOp, length=WINDOW)),
    f"max of 1024, entries within {GUARD:g}x": Rule(MaxOp, guarded),
    "max of 1024, reset": Rule(MaxOp, reset),
    "DelayedScaling()": Rule(fp8.Fp8DotGeneralOp),
}


def normalized(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-8)


class Net(nn.Module):
    """The network that learns."""

    op: Callable[[], Any] | None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the outputs."""
        x = nn.Dense(HIDDEN, use_bias=False, dot_general_cls=self.op)(x)
        x = normalized(x)
        x = nn.relu(nn.Dense(HIDDEN, dot_general_cls=self.op)(x))
        return nn.Dense(OUTPUTS, dot_general_cls=self.op)(x)


def teacher(x: jax.Array) -> jax.Array:
    """Returns what is to be learned of the direction of ``x``."""
    first, second = jax.random.split(jax.random.key(12345))
    hidden = jnp.tanh(normalized(x) @ jax.random.normal(first, (WIDTH, 16)) / WIDTH**0.5)
    return hidden @ jax.random.normal(second, (16, OUTPUTS)) / 4


def shares(x: jax.Array, state: Any, role: str, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the shares of a tensor that were flushed to zero and that saturated in a step."""
    limits, scale = fp8.fp8_limits(dtype), state[f"{role}_scale"][0]
    codes = jnp.abs(x) / scale
    flushed = (codes > 0) & (codes <= limits.smallest_subnormal / 2)
    return jnp.mean(flushed, dtype=jnp.float32), jnp.mean(codes > 1.01 * limits.max, dtype=jnp.float32)


def make_run(name: str, steps: int) -> Callable[[Case, jax.Array], Any]:
    """Returns the jitted training of a contender: the final loss, and the shares of the two tensors."""
    rule = RULES[name]
    net = Net(rule.op)
    schedule = optax.cosine_decay_schedule(5e-3, steps)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, b2=0.99))

    def step(carry: Any, at: Any) -> Any:
        (variables, opt_state), (factor, x_outlier, g_outlier, key) = carry, at
        x = factor * jax.random.normal(key, (BATCH, WIDTH))
        targets = teacher(x)
        x = x.at[0, 0].set(jnp.where(x_outlier > 0, x_outlier, x[0, 0]))
        weight = jnp.ones((BATCH, 1)).at[0].set(jnp.where(x_outlier > 0, 0.0, 1.0))

        def loss(variables: Any) -> Any:
            out = net.apply(variables, x)
            # Its value is zero; only its gradient counts.
            outlier = g_outlier * (out[1, 0] - lax.stop_gradient(out[1, 0]))
            return jnp.mean(weight * (out - targets) ** 2) + outlier, out

        (_, out), grads = fp8.value_and_grad(loss, has_aux=True)(variables)
        updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
        new = {"params": optax.apply_updates(variables["params"], updates)}
        seen = jnp.zeros((2, 2))
        if rule.op is not None:
            new[OWG] = jax.tree.map(lambda leaf: rule.edit(leaf) if leaf.size > 1 else leaf, grads[OWG])
            first, last = ((*grads[OWG][layer].values(),)[0] for layer in ("Dense_0", "Dense_2"))
            g = (2 / out.size * weight * (out - targets)).at[1, 0].add(g_outlier)
            seen = jnp.array(
                [
                    shares(x, first, "input", jnp.float8_e4m3fn),
                    shares(g, last, "output_grad", jnp.float8_e5m2),
                ]
            )
        return (new, opt_state), seen

    @jax.jit
    def run(case: Case, key: jax.Array) -> Any:
        init, fresh, key = jax.random.split(key, 3)
        variables = net.init(init, jnp.ones((BATCH, WIDTH)))
        start = variables, tx.init(variables["params"])
        keys = jax.random.split(key, steps)
        (variables, _), seen = lax.scan(step, start, (*case, keys))
        x = jax.random.normal(fresh, (16 * BATCH, WIDTH))
        error = net.apply(variables, case.factor[-1] * x) - teacher(x)
        return jnp.mean(error**2), jnp.mean(seen, axis=0)

    return run


def measure(name: str, chosen: dict[str, Case], steps: int, seeds: int) -> list[Row]:
    """Returns a row for each case: the median loss, and the mean shares of the worse of both tensors."""
    train = make_run(name, steps)
    rows = []
    for kind, case in chosen.items():
        arrays = Case(*(jnp.asarray(array, jnp.float32) for array in case))
        results = [train(arrays, jax.random.key(seed)) for seed in range(seeds)]
        losses = [float(loss) for loss, _ in results]
        seen = np.mean([np.asarray(shares) for _, shares in results], axis=0)
        rows.append(
            {
                "case": kind,
                "rule": name,
                "loss": statistics.median(losses),
                **dict(zip(SHARES, map(float, np.max(seen, axis=0)))),
                "losses": losses,
                "shares": {
                    tensor: dict(zip(SHARES, map(float, row)))
                    for tensor, row in zip(("input", "output_grad"), seen)
                },
            }
        )
    return rows


def measure_all(steps: int, seeds: int) -> Row:
    chosen = cases(steps)
    rows = [row for name in RULES for row in measure(name, chosen, steps, seeds)]
    return {"rows": sorted(rows, key=lambda row: list(chosen).index(row["case"]))}


def table(report: Row) -> str:
    """Returns a line of text for each case and rule."""
    columns: Columns = {
        **{name: common.word(name) for name in ("case", "rule")},
        "loss": common.figure("loss", ".4f"),
        **{f"{name} %": common.figure(name, ".2f", 100) for name in SHARES},
    }
    return common.text_table(columns, report["rows"], 2)


def main(argv: Sequence[str] | None = None) -> None:
    common.command(__doc__, "outlier", measure_all, table, argv, options=OPTIONS)


if __name__ == "__main__":
    common.run(main)
