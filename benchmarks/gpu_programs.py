"""How ``benchmarks/gpu.py`` compiles a program for a GPU, reads it and times it.

A program goes from a carry to the next and repeats its work ``steps`` times inside, so that the host does
not count. A barrier in each round keeps XLA from moving out of the loop what is the same in every round.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from benchmarks import common
from benchmarks.common import Row
from fp8flax._audit.compiling import Target, compile_for, find_target
from fp8flax._audit.gemms import read_gemms
from fp8flax._audit.kernels import read

FP8_RATE, BF16_RATE, BANDWIDTH, LAUNCH = 1400e12, 720e12, 3.4e12, 3e-6
"""The predictions assume these operations and bytes per second, and seconds between kernels."""
ROUNDS = 6


class Program(NamedTuple):
    """A jitted function, and the shapes and dtypes of its arguments."""

    function: Any
    specs: tuple[Any, ...]
    steps: int = 1
    carry: Callable[[], Any] | None = None
    """Makes the argument, if it is one carry that the function takes over; random numbers if None."""
    flops: int = 0
    """The operations of its matmuls, in one step."""
    bytes: int = 0
    """The bytes that one step has to move."""


Programs = dict[str, Callable[[], Program]]
"""Makes each program of an entry, by its name."""
At = Callable[[str], None]
"""Says which program comes next; raises ``NotMeasuredError`` if it ended the process before."""


# Compiling, and reading what was compiled.


def compiled_here(program: Program) -> Any:
    return program.function.lower(*program.specs).compile()


def compiled_ahead(program: Program) -> Any:
    """Compiles for an H200 that need not be there."""
    return compile_for(find_target("h200"), program.function, program.specs)


def reading(compiled: Any, steps: int, target: Target) -> Row:
    """Returns what a program does in one of its steps: kernels, bytes, GEMMs and how each is run.

    FP8 operands in XLA's own kernels may be multiplied by the FP8 units, and are predicted as if they were.
    """
    program = read(compiled.as_text())
    gemms = read_gemms(program, target)
    in_order = iter(gemms)
    predicted = 0.0
    for kernel in program.kernels:
        of_kernel = list(itertools.islice(in_order, len(kernel.dots)))
        is_fp8 = of_kernel and all(gemm.is_fp8 or gemm.may_be_fp8 for gemm in of_kernel)
        rate = FP8_RATE if is_fp8 else BF16_RATE
        moving = kernel.bytes * kernel.trip_count / BANDWIDTH
        predicted += max(sum(gemm.flops for gemm in of_kernel) / rate, moving) + kernel.trip_count * LAUNCH
    all_flops = sum(gemm.flops for gemm in gemms)
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "kernels": round(sum(kernel.trip_count for kernel in program.kernels) / steps, 2),
        "bytes": round(sum(kernel.bytes * kernel.trip_count for kernel in program.kernels) / steps),
        "fp8_flops_share": sum(g.flops for g in gemms if g.is_fp8) / max(1, all_flops),
        "maybe_fp8_flops_share": sum(g.flops for g in gemms if g.may_be_fp8) / max(1, all_flops),
        **({"unknown_trip_counts": True} if program.unknown_trip_counts else {}),
        "program_bytes": total - memory.alias_size_in_bytes,
        **({"predicted_seconds": predicted / steps} if target.platform in ("cuda", "gpu") else {}),
        "gemms": merged(
            {
                "role": gemm.role,
                "batch": gemm.batch,
                "shape": [gemm.m, gemm.k, gemm.n],
                "operands": [gemm.lhs_dtype, gemm.rhs_dtype],
                "backend": gemm.backend,
                "accumulation": gemm.accumulation,
                "times": gemm.trip_count / steps,
            }
            for gemm in gemms
        ),
    }


def merged(gemms: Iterable[Row]) -> list[Row]:
    """Returns equal GEMMs as one, with their number."""
    times: Counter[str] = Counter()
    for gemm in gemms:
        times[json.dumps({**gemm, "times": 0})] += gemm["times"]
    return [{**json.loads(text), "times": number} for text, number in times.items()]


def read_or_say(compiled: Any, steps: int = 1) -> Row:
    """Returns what a program does on this device; a program that cannot be read can still be timed."""
    try:
        return reading(compiled, steps, find_target("local"))
    except Exception as error:
        return {"not_read": common.reason_of(error)}


def predict_times_base(rows: Mapping[str, Row], base: str | None) -> None:
    """Adds how many times as fast as the base each program should be, where both were read."""
    of_base = rows.get(base or "", {}).get("predicted_seconds")
    for row in rows.values():
        if of_base and row.get("predicted_seconds"):
            row["predicted_times_base"] = of_base / row["predicted_seconds"]


# Loops.


@functools.cache
def _normal(shape: tuple[int, ...], dtype: Any, sigma: float) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda key: (sigma * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype))


def filled(specs: Any) -> Any:
    """Returns arrays for a tree of shapes and dtypes: normal numbers, fresh scaling states, zeros.

    Not all zeros: with these a GPU is faster.
    """
    count = iter(range(10**6))

    def make(path: Any, spec: Any) -> jax.Array:
        name = str(getattr(path[-1], "key", path[-1])) if path else ""
        if name.endswith("_amax_history") or not jnp.issubdtype(spec.dtype, jnp.floating):
            return jnp.zeros(spec.shape, spec.dtype)
        if name.endswith("scale"):  # of a scaling state or a norm
            return jnp.ones(spec.shape, spec.dtype)
        is_weight = name in ("kernel", "embedding") and spec.dtype.itemsize > 1
        return _normal(spec.shape, spec.dtype, 0.02 if is_weight else 1.0)(jax.random.key(next(count)))

    return jax.tree_util.tree_map_with_path(make, specs)


def pinned(tree: Any) -> Any:
    """Returns arrays that XLA takes for new in every round, and in the layout that they have outside."""
    return jax.tree.map(with_default_layout, lax.optimization_barrier(tree))


def with_default_layout(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))) if x.ndim > 1 else x


def looped(body: Callable[[Any], Any], specs: Any, steps: int, **figures: Any) -> Program:
    """Returns ``steps`` rounds of ``body``, from a carry to the next, in one program."""

    def run(carry: Any) -> Any:
        return lax.fori_loop(0, steps, lambda _, carry: body(carry), carry)

    return Program(jax.jit(run, donate_argnums=0), (specs,), steps, **figures)


# Timing.


def measure_timed(programs: Programs, base: str | None, at: At) -> Row:
    """Compiles the programs, then times them round by round, each once in a round, in rotated order."""
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name, make in programs.items():
        try:
            at(name)
            program = make()
            began = time.perf_counter()
            compiled = compiled_here(program)
            rows[name] = {
                "compile_seconds": time.perf_counter() - began,
                "steps": program.steps,
                **read_or_say(compiled, program.steps),
                "flops": program.flops,
                "must_move": program.bytes,
            }
            carry = partial(filled, program.specs[0]) if program.carry is None else program.carry
            runs[name] = running(compiled, carry())
            runs[name]()
        except Exception as error:
            runs.pop(name, None)
            rows[name] = {**rows.get(name, {}), "not_measured": common.reason_of(error)}
    if not runs:
        raise common.NotMeasuredError(
            "; ".join(dict.fromkeys(row["not_measured"] for row in rows.values()))
        )
    at("timing")
    seconds = {
        name: [value / rows[name]["steps"] for value in values]
        for name, values in common.interleaved(runs, ROUNDS, warm_up=1).items()
    }
    for name, values in seconds.items():
        row = rows[name]
        row["seconds"] = common.summary(values)
        if row["flops"]:
            row["tflops"] = common.summary([1e-12 * row["flops"] / s for s in values])
        if row["must_move"]:
            row["gigabytes_per_second"] = common.summary([1e-9 * row["must_move"] / s for s in values])
        if base in seconds:
            row["times_base"] = common.ratio(seconds[base], values)
    predict_times_base(rows, base)
    return {"base": base, "rows": rows}


def running(compiled: Any, carry: Any) -> Callable[[], None]:
    """Returns a function that runs a program on what it returned the last time."""

    def run() -> None:
        nonlocal carry
        carry = jax.block_until_ready(compiled(carry))

    return run
