"""In which order, and how far ahead, does Hopper's block-scaled GEMM work fastest, for which shapes?

Run ``make bench-tune``, or ``python -m benchmarks.tune_gemm`` with a Python whose JAX sees an H100 or H200:
it writes what is fastest into ``fp8flax/_core/kernels/schedules.py``, which says until then that it is a
guess. ``--help`` for the options.

The figure is TFLOP/s = 2MNK / seconds of one GEMM of e4m3 codes, scales 1x128 by 128x128, bfloat16 out:
``STEPS`` calls that wait for each other on the device alone, the median of ``--rounds`` in rotated order.
cuBLAS in bfloat16 is measured beside it in the same rounds, and the result compared with it once.

Assumptions: clocks are as the GPU keeps them, operands lie in its memory and mostly not in its cache.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import Shape, aligned, begin, interleaved, machine, parse_shape, run, text_of
from fp8flax._core.kernels import schedules
from fp8flax._core.kernels.block_gemm import BLOCK
from fp8flax._core.kernels.block_gemm_hopper import HOPPER, hopper_block_gemm
from fp8flax._core.kernels.schedules import Schedule

QUESTION = "Which schedule of Hopper's block-scaled GEMM is the fastest, for which shape?"
# As M x K x N: squares, then those of DeepSeek-V3 for 4096 tokens.
SHAPES = (
    *((size, size, size) for size in (4096, 8192)),
    *((4096, 7168, 2112), (4096, 7168, 4096), (4096, 1536, 24576), (4096, 7168, 18432)),
    *((4096, 18432, 7168), (4096, 2048, 7168)),
)
CANDIDATES = tuple(
    Schedule(stages, of_columns, width)
    for stages, of_columns, width in itertools.product((3, 4, 5), (True, False), (4, 8, 16))
)
STEPS = 20
BF16 = "bf16, cuBLAS"
FILE = Path(schedules.__file__)


def operands(shape: Shape) -> tuple[jax.Array, ...]:
    """Returns codes and scales of random normal matrices, as the quantizers would make them."""
    M, K, N = shape
    keys = jax.random.split(jax.random.key(0))
    lhs, rhs = (jax.random.normal(key, (1, n, K)).astype(jnp.float8_e4m3fn) for key, n in zip(keys, (M, N)))
    scales = (jnp.ones((1, n, K // BLOCK), jnp.float32) for n in (M, -(-N // BLOCK)))
    return lhs, rhs, *scales


def repeated(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a jitted function that multiplies ``STEPS`` times, each time after the last."""

    def body(_: Any, carry: Any) -> Any:
        lhs, *rest = jax.lax.optimization_barrier(carry[0])
        # The compiler cannot know that nothing is added.
        return (lhs, *rest), multiply(lhs, *rest)

    @jax.jit
    def run(*args: jax.Array) -> jax.Array:
        out = jax.eval_shape(multiply, *args)
        return jax.lax.fori_loop(0, STEPS, body, (args, jnp.zeros(out.shape, out.dtype)))[1]

    return run


def in_bf16(lhs: jax.Array, rhs: jax.Array, *_: jax.Array) -> jax.Array:
    lhs, rhs = (x.astype(jnp.bfloat16) for x in (lhs, rhs))
    return jax.lax.dot_general(lhs, rhs, (((2,), (2,)), ((0,), (0,))))


def tune(shape: Shape, rounds: int, candidates: Sequence[Schedule] = CANDIDATES) -> dict[Any, float]:
    """Returns the median seconds of one GEMM by schedule, and of that in bfloat16."""
    args = operands(shape)
    wide = tuple(x.astype(jnp.bfloat16) for x in args[:2])
    multiply = partial(hopper_block_gemm, out_dtype=jnp.bfloat16)
    runs = {schedule: repeated(partial(multiply, schedule=schedule)) for schedule in candidates}
    plain = repeated(in_bf16)
    expected = plain(*wide)
    for schedule, function in runs.items():
        off = float(jnp.max(jnp.abs(function(*args) - expected)) / jnp.max(jnp.abs(expected)))
        if not off < 0.01:
            raise SystemExit(f"{schedule} gives other values than bfloat16 at {text_of(shape)}: {off}.")
    calls: dict[Any, Callable[[], Any]] = {
        schedule: partial(lambda function: jax.block_until_ready(function(*args)), function)
        for schedule, function in runs.items()
    }
    calls[BF16] = lambda: jax.block_until_ready(plain(*wide))
    seconds = interleaved(calls, rounds)
    return {name: statistics.median(values) / STEPS for name, values in seconds.items()}


def written(text: str, where: str, table: dict[tuple[int, int, int], Schedule]) -> str:
    """Returns the text of the file of schedules with another table, by ``(M, N, K)``."""
    lines = "".join(f"    {key}: {schedule},\n" for key, schedule in table.items())
    head, found, _ = text.partition("MEASURED_ON: ")
    assert found, "the file of schedules has no MEASURED_ON"
    kind = re.search(r"MEASURED: (.*?) =", text)
    assert kind is not None
    return f'{head}MEASURED_ON: str | None = "{where}"\nMEASURED: {kind[1]} = {{\n{lines}}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shapes", nargs="*", type=parse_shape, default=list(SHAPES), metavar="MxKxN")
    parser.add_argument("--rounds", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--file", type=Path, default=FILE, help="to write (that of the package)")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" or float(device.compute_capability) != HOPPER:
        raise SystemExit(
            f"This needs an H100 or H200; JAX sees {device.device_kind}. Without one the schedule of all "
            f"shapes is a guess, {schedules.GUESS}, which nothing here can judge."
        )
    here = machine(packages=("jax", "jaxlib"))
    begin(QUESTION, [f"{len(CANDIDATES)} schedules for each shape"], here)
    table: dict[Any, Any] = {}
    lines: list[tuple[str, ...]] = [("MxKxN", "fastest", "TFLOP/s", "of bf16's time", "of the guess's")]
    for shape in options.shapes:
        M, K, N = shape
        seconds = tune(shape, options.rounds)
        plain = seconds.pop(BF16)
        best = min(seconds, key=seconds.__getitem__)
        table[M, N, K] = best
        tflops = 2e-12 * M * N * K / seconds[best]
        ratios = (f"{seconds[best] / other:.2f}" for other in (plain, seconds[schedules.GUESS]))
        lines.append((text_of(shape), str(tuple(best)), f"{tflops:.0f}", *ratios))
    print(aligned(lines, 2))
    where = f"{here['gpu']}, JAX {here['jax']}, {np.datetime64('today')}"
    options.file.write_text(written(FILE.read_text(), where, table))
    print(f"\nWritten: {options.file}")


if __name__ == "__main__":
    run(main)
