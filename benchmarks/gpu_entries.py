"""What ``benchmarks/gpu.py`` measures: entries made of programs, and how a program is read and timed.

A program goes from a carry to the next and repeats its work ``steps`` times inside, so that the host does
not count. A barrier in each round keeps XLA from moving out of the loop what is the same in every round.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.util
import itertools
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

import fp8flax as fp8
from benchmarks import accuracy, dense, llama
from benchmarks.common import NotMeasuredError, Row, Shape, ratio, reason_of, summary, text_of
from fp8flax._audit.compiling import Target, compile_for, find_target
from fp8flax._audit.gemms import read_gemms
from fp8flax._audit.kernels import read
from fp8flax._core.gemm.kernels.transpose import can_transpose, transpose
from fp8flax._core.qtensor import View
from fp8flax._core.quantizers import quantized as quantize_operand

OWG = fp8.OVERWRITE_WITH_GRADIENT
BF16, E4M3, E5M2 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2

FP8_RATE, BF16_RATE, BANDWIDTH, LAUNCH = 1400e12, 720e12, 3.4e12, 3e-6
"""What the predictions assume: operations and bytes per second, seconds between kernels."""
NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Sizes:
    """How large everything is."""

    is_small: bool
    values: Shape
    odd: Shape
    first: Shape
    transformer_engine: tuple[Shape, ...]
    others: tuple[Shape, ...]
    gemms: tuple[Shape, ...]
    squares: tuple[int, ...]
    chain: int
    models: Mapping[str, tuple[llama.Config, int, int]]
    """By name: the configuration, batch and length of a training step."""
    decoder: llama.Config
    cache: int
    batches: tuple[int, ...]
    rounds: int
    seconds: float
    """About how long one call of a program takes."""


_TE_TOKENS = 15872
FULL = Sizes(
    is_small=False,
    values=(512, 768, 384),
    odd=(72, 200, 136),
    first=dense.SHAPES[0],
    transformer_engine=tuple(
        (_TE_TOKENS, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
    ),
    others=dense.SHAPES[1:],
    gemms=((4096, 4096, 4096), (8192, 8192, 8192), (8192, 4096, 4096)),
    squares=(4096, 16384),
    chain=400,
    models={
        "wide-1b": (
            # Four of Llama 3 8B's layers.
            llama.Config(layers=4, width=4096, hidden=14336, heads=32, kv_heads=8, vocabulary=32000),
            8,
            2048,
        ),
        "llama-1b": (
            # Llama 3.2 1B.
            llama.Config(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8, vocabulary=128256),
            8,
            2048,
        ),
    },
    decoder=llama.Config(layers=4, width=4096, hidden=14336, heads=32, kv_heads=8, vocabulary=32000),
    cache=1024,
    batches=(1, 32),
    rounds=6,
    seconds=0.04,
)
_TINY = llama.Config(layers=2, width=32, hidden=64, heads=4, kv_heads=2, vocabulary=64)
SMALL = Sizes(
    is_small=True,
    values=(32, 64, 32),
    odd=(6, 10, 14),
    first=(32, 32, 32),
    transformer_engine=((16, 32, 48),),
    others=((16, 16, 16),),
    gemms=((16, 16, 16),),
    squares=(16,),
    chain=4,
    models={"wide-1b": (_TINY, 2, 8)},
    decoder=_TINY,
    cache=16,
    batches=(1, 2),
    rounds=2,
    seconds=0.0,
)


class Program(NamedTuple):
    """A jitted function and the shapes and dtypes of its arguments."""

    function: Any
    specs: tuple[Any, ...]
    steps: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """A program from a carry, which it takes over, to the next."""

    program: Program
    carry: Callable[[], Any]
    flops: int = 0
    """Of its matmuls, in one step."""
    bytes: int = 0
    """That one step has to move."""


class Progress:
    """What an entry says while it is measured, and what it must leave out."""

    def __init__(self, excluded: Mapping[str, str] | None = None) -> None:
        self._excluded = dict(excluded or {})

    def at(self, name: str) -> None:
        """Says which program comes next; raises ``NotMeasuredError`` where it ended the process before."""
        if name in self._excluded:
            raise NotMeasuredError(self._excluded[name])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A figure, or several that are measured together."""

    name: str
    measure: Callable[[Progress], Row]
    expected: float
    """Seconds that it should take; it does not begin when less is left."""
    programs: Callable[[], dict[str, Program]] = dict
    """Those that can be compiled ahead."""
    fresh: bool = False
    """Whether it needs a process of its own."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Seconds after which its process is ended."""
        return 60 + 2 * self.expected


def entries(sizes: Sizes) -> list[Entry]:
    """Returns all entries, the most telling first."""

    def of_values(kind: str, shape: Shape, names: Iterable[str]) -> list[Entry]:
        return [
            Entry(
                name=f"{kind}/{name}",
                measure=partial(measure_values, shape, name),
                programs=partial(values_programs, shape, name),
                expected=8,
            )
            for name in names
        ]

    def of_dense(shape: Shape, *, in_full: bool) -> Entry:
        loops = partial(dense_loops, sizes, shape, in_full=in_full)
        name = f"dense/{text_of(shape)}"
        entry = timed_entry(name, sizes, loops, base=dense.BF16, expected=50 if in_full else 30)
        said = partial(speedup_of_report, shape)
        return dataclasses.replace(
            entry, measure=lambda progress: {**entry.measure(progress), "speedup_of_report": said()}
        )

    def of_gemm(shape: Shape) -> Entry:
        return timed_entry(
            f"gemm/{text_of(shape)}",
            sizes,
            partial(gemm_loops, sizes, shape),
            base="bf16",
            expected=15,
        )

    def of_model(name: str, op: str) -> Entry:
        return Entry(
            name=f"model/{name}/{op}",
            measure=partial(measure_model, sizes, name, op),
            programs=lambda: {op: model_program(sizes, name, op, attentions(sizes)[0])[1]},
            expected=70,
            fresh=True,
        )

    def of_gaps(name: str, environment: Mapping[str, str]) -> Entry:
        loops = partial(chain_loops, sizes)
        entry = timed_entry(name, sizes, loops, base=None, expected=10, environment=environment)
        return dataclasses.replace(entry, measure=lambda progress: with_gap(entry.measure(progress)))

    def of_decoding(batch: int) -> Entry:
        loops = partial(decode_loops, sizes, batch)
        return timed_entry(f"decode/batch-{batch}", sizes, loops, base="bf16", expected=50)

    first_model, *more_models = sizes.models
    of_experts = [
        Entry(
            name=f"values-experts/{name}",
            measure=partial(measure_experts, sizes.values, name),
            programs=partial(experts_programs, sizes.values, name),
            expected=8,
        )
        for name in ("current-e4m3", "block128")
    ]
    return [
        *of_values("values", sizes.values, CORE_VALUES),
        *map(of_gemm, sizes.gemms),
        *of_experts,
        of_dense(sizes.first, in_full=True),
        timed_entry("memory", sizes, partial(memory_loops, sizes), base=None, expected=15),
        of_gaps("gaps/graphs", {}),
        *(of_model(first_model, op) for op in ("bf16", "delayed")),
        of_gaps("gaps/no-graphs", NO_GRAPHS),
        *map(of_decoding, sizes.batches),
        *(of_dense(shape, in_full=False) for shape in sizes.transformer_engine),
        Entry(name="torch", measure=partial(measure_torch, sizes), expected=20, fresh=True),
        of_model(first_model, "current"),
        Entry(name="kernels", measure=partial(measure_kernels, sizes), expected=25, fresh=True),
        *(of_dense(shape, in_full=False) for shape in sizes.others),
        *(of_model(name, op) for name in more_models for op in ("bf16", "delayed")),
        *of_values("values", sizes.values, (name for name in VALUES if name not in CORE_VALUES)),
        *of_values("values-odd", sizes.odd, CORE_VALUES),
    ]


# Reading a compiled program.


def compiled_here(program: Program) -> Any:
    return program.function.lower(*program.specs).compile()


def compiled_ahead(program: Program, target: str = "h200") -> Any:
    """Compiles for a GPU that need not be there."""
    gpu = find_target(target)
    # JAX asks the cuDNN that is here whether it knows attention. (Internals: there is no other way.)
    where = "jax._src.cudnn.fused_attention_stablehlo"
    with (
        mock.patch(f"{where}.check_cudnn_version", return_value=91000),
        mock.patch(f"{where}.check_compute_capability", return_value=True),
    ):
        return compile_for(gpu, program.function, program.specs)


def reading(compiled: Any, steps: int, target: Target) -> Row:
    """Returns what a program does in one of its steps: kernels, bytes, GEMMs and how each is run.

    The instructions of XLA's own kernels are not read, for which each would be compiled twice: FP8 operands
    in them only may be multiplied by the FP8 units, and are predicted as if they were.
    """
    on_gpu = target.platform in ("cuda", "gpu")
    text = compiled.as_text()
    summary = read(text)
    gemms = read_gemms(summary, target, {})
    in_order = iter(gemms)
    lines = dict(re.findall(r"^\s*(?:ROOT )?%(\S+) = (.*)$", text, re.MULTILINE))
    chosen: list[str] = []
    predicted = 0.0
    for kernel in summary.kernels:
        of_kernel = list(itertools.islice(in_order, len(kernel.dots)))
        is_fp8 = of_kernel and all(gemm.is_fp8 or gemm.may_be_fp8 for gemm in of_kernel)
        rate = FP8_RATE if is_fp8 else BF16_RATE
        flops = sum(gemm.flops for gemm in of_kernel)
        moving = kernel.bytes * kernel.trip_count / BANDWIDTH
        predicted += max(flops / rate, moving) + kernel.trip_count * LAUNCH
        chosen += [choice_of(lines.get(kernel.name, ""))] * len(of_kernel)
    all_flops = sum(gemm.flops for gemm in gemms)
    memory = compiled.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return {
        "kernels": round(sum(kernel.trip_count for kernel in summary.kernels) / steps, 2),
        "bytes": round(sum(kernel.bytes * kernel.trip_count for kernel in summary.kernels) / steps),
        "gemm_bytes": round(sum(k.bytes * k.trip_count for k in summary.kernels if k.dots) / steps),
        "fp8_flops_share": sum(g.flops for g in gemms if g.is_fp8) / max(1, all_flops),
        "maybe_fp8_flops_share": sum(g.flops for g in gemms if g.may_be_fp8) / max(1, all_flops),
        "temp_bytes": memory.temp_size_in_bytes,
        **({"unknown_trip_counts": True} if summary.unknown_trip_counts else {}),
        "program_bytes": total - memory.alias_size_in_bytes,
        **({"predicted_seconds": predicted / steps} if on_gpu else {}),
        "gemms": merged(
            {
                "role": gemm.role,
                "batch": gemm.batch,
                "shape": [gemm.m, gemm.k, gemm.n],
                "operands": [gemm.lhs_dtype, gemm.rhs_dtype],
                "backend": gemm.backend,
                "accumulation": gemm.accumulation,
                "choice": choice,
                "times": gemm.trip_count / steps,
            }
            for gemm, choice in zip(gemms, chosen, strict=True)
        ),
    }


def merged(gemms: Iterable[Row]) -> list[Row]:
    """Returns equal GEMMs as one, with their number."""
    times: Counter[str] = Counter()
    for gemm in gemms:
        times[json.dumps({**gemm, "times": 0})] += gemm["times"]
    return [{**json.loads(text), "times": number} for text, number in times.items()]


def choice_of(line: str) -> str:
    """Returns the tile or the algorithm that autotuning left in a kernel's configuration."""
    patterns = (
        r'"triton_gemm_config":(\{[^{}]*\})',
        r'"block_level_fusion_config":(\{.*?\}(?:\],.*?\})?)',
        r'"selected_algorithm":"?(-?\d+)',
        r'"algorithm":(\{[^{}]*\})',
    )
    return "; ".join(match[0][:300] for p in patterns if (match := re.search(p, line)))


# Timing.


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


def looped(
    body: Callable[[Any], Any],
    specs: Any,
    steps: int,
    *,
    carry: Callable[[], Any] | None = None,
    flops: int = 0,
    bytes: int = 0,
) -> Timed:
    """Returns ``steps`` rounds of ``body``, from a carry to the next, in one program."""

    def run(carry: Any) -> Any:
        return lax.fori_loop(0, steps, lambda _, carry: body(carry), carry)

    return Timed(
        program=Program(jax.jit(run, donate_argnums=0), (specs,), steps),
        carry=partial(filled, specs) if carry is None else carry,
        flops=flops,
        bytes=bytes,
    )


def rounds_per_call(sizes: Sizes, flops: float = 0, bytes: float = 0) -> int:
    """Returns how many rounds should take about ``sizes.seconds``."""
    seconds = max(flops / 500e12, bytes / 2.5e12, 1e-6)
    return min(1000, max(4, round(sizes.seconds / seconds))) if not sizes.is_small else 2


def timed_entry(
    name: str,
    sizes: Sizes,
    loops: Callable[[], dict[str, Callable[[], Timed]]],
    *,
    base: str | None,
    expected: float,
    environment: Mapping[str, str] | None = None,
) -> Entry:
    def programs() -> dict[str, Program]:
        return {key: make().program for key, make in loops().items()}

    return Entry(
        name=name,
        measure=lambda progress: measure_timed(sizes, loops(), base, progress),
        programs=programs,
        expected=expected,
        environment=environment or {},
    )


def measure_timed(
    sizes: Sizes, loops: Mapping[str, Callable[[], Timed]], base: str | None, progress: Progress
) -> Row:
    """Compiles the programs, then times them round by round, each once in a round, in rotated order."""
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], float]] = {}
    for name, make in loops.items():
        try:
            progress.at(name)
            timed = make()
            began = time.perf_counter()
            compiled = compiled_here(timed.program)
            rows[name] = {
                "compile_seconds": time.perf_counter() - began,
                "steps": timed.program.steps,
                **read_or_say(compiled, timed.program.steps),
                "flops": timed.flops,
                "must_move": timed.bytes,
            }
            runs[name] = running(compiled, timed.carry())
            runs[name]()
        except Exception as error:
            runs.pop(name, None)
            rows[name] = {**rows.get(name, {}), "not_measured": reason_of(error)}
    if not runs:
        raise NotMeasuredError("; ".join(dict.fromkeys(row["not_measured"] for row in rows.values())))
    progress.at("timing")
    seconds = interleaved(runs, sizes.rounds)
    for name, values in seconds.items():
        row = rows[name]
        per_step = [value / row["steps"] for value in values]
        row["seconds"] = summary(per_step)
        if row["flops"]:
            row["tflops"] = summary([1e-12 * row["flops"] / s for s in per_step])
        if row["must_move"]:
            row["gigabytes_per_second"] = summary([1e-9 * row["must_move"] / s for s in per_step])
        if base in seconds:
            of_base = [value / rows[base]["steps"] for value in seconds[base]]
            row["times_base"] = ratio(of_base, per_step)
    predict_times_base(rows, base)
    return {"base": base, "rows": rows}


def predict_times_base(rows: Mapping[str, Row], base: str | None) -> None:
    """Adds how many times as fast as the base each program should be, where both were read."""
    of_base = rows.get(base or "", {}).get("predicted_seconds")
    for row in rows.values():
        if of_base and row.get("predicted_seconds"):
            row["predicted_times_base"] = of_base / row["predicted_seconds"]


def read_or_say(compiled: Any, steps: int) -> Row:
    """Returns what a program does on this device; a program that cannot be read can still be timed."""
    try:
        return reading(compiled, steps, find_target("local"))
    except Exception as error:
        return {"not_read": reason_of(error)}


def running(compiled: Any, carry: Any) -> Callable[[], float]:
    """Returns a function that runs a program on what it returned the last time: its seconds."""

    def run() -> float:
        nonlocal carry
        began = time.perf_counter()
        carry = jax.block_until_ready(compiled(carry))
        return time.perf_counter() - began

    return run


def interleaved(
    runs: Mapping[str, Callable[[], float]], rounds: int, most_seconds: float = 20.0
) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round; three rounds or more, after one of warm-up."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    began = time.perf_counter()
    for i in range(1 + rounds):
        if i > 3 and time.perf_counter() - began > most_seconds:
            break
        # Rotated, so that none always runs after the same one.
        start = i % max(1, len(names))
        for name in names[start:] + names[:start]:
            taken = runs[name]()
            if i:
                seconds[name].append(taken)
    return seconds


# One Dense layer, forward and backward.


def dense_contenders(*, in_full: bool) -> dict[str, dense.Contender]:
    everyone = dense.contenders()
    chosen = [dense.BF16, dense.FLAX_QDQ, dense.FLAX_DIRECT, dense.OURS]
    contenders = {name: everyone[name] for name in chosen}
    for how in ("fast", "exact", "default"):
        recipe = fp8.DelayedScaling(accumulation=fp8.Accumulation(forward=how, dgrad=how, wgrad=how))
        contenders[f"{dense.OURS}-{how}"] = dense.Contender(
            what=f"fp8flax.Fp8DotGeneralOp with Accumulation({how!r}) for all three GEMMs",
            make_layer=partial(dense._dense, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe)),
        )
    more = dense.OURS_BY_RECIPE if in_full else dense.OURS_BY_RECIPE[:1]
    return {**contenders, **{name: everyone[name] for name in more}}


def dense_loops(sizes: Sizes, shape: Shape, *, in_full: bool) -> dict[str, Callable[[], Timed]]:
    M, K, N = shape
    flops, size = 6 * M * K * N, 2 * (M * K + K * N + M * N)
    steps = rounds_per_call(sizes, flops, 3 * size)

    def of(contender: dense.Contender) -> Timed:
        layer, (variables, x, g) = dense.specs(contender, shape)
        step = dense.make_step(layer)

        def body(carry: Any) -> Any:
            variables, x, g, _ = carry
            # Only the kernel stays what it was: a state is another one in each round.
            kernel, x_now, g_now = pinned((variables["params"], x, g))
            y, dvariables, dx = step({**variables, "params": kernel}, x_now, g_now)
            state = {name: value for name, value in dvariables.items() if name != "params"}
            return {**state, "params": variables["params"]}, x, g, (y, dvariables["params"], dx)

        y, dvariables, dx = jax.eval_shape(step, variables, x, g)
        return looped(body, (variables, x, g, (y, dvariables["params"], dx)), steps, flops=flops)

    contenders = dense_contenders(in_full=in_full)
    return {name: partial(of, contender) for name, contender in contenders.items()}


def speedup_of_report(shape: Shape) -> float | str:
    """Returns what ``fp8.report`` tells users to expect of a layer of this shape, or why it does not."""
    M, K, N = shape
    try:
        model = fp8.quantize_model(nn.Dense(N, use_bias=False), include=".*")
        return fp8.report(model, jax.ShapeDtypeStruct((M, K), BF16)).speedup
    except Exception as error:  # what was measured beside it must not be lost
        return reason_of(error)


# GEMMs alone.


def gemm_loops(sizes: Sizes, shape: Shape) -> dict[str, Callable[[], Timed]]:
    M, K, N = shape
    flops = 2 * M * K * N
    presets = lax.DotAlgorithmPreset
    fast, exact = presets.ANY_F8_ANY_F8_F32_FAST_ACCUM, presets.ANY_F8_ANY_F8_F32

    def of(dtypes: tuple[Any, Any], precision: Any, rhs_is_transposed: bool) -> Timed:
        def body(carry: Any) -> Any:
            a, b, _ = carry
            a_now, b_now = pinned((a, b))
            dims = (((1,), (1 if rhs_is_transposed else 0,)), ((), ()))
            # CPUs refuse what states its accumulation.
            how = None if sizes.is_small else precision
            return a, b, lax.dot_general(a_now, b_now, dims, how, preferred_element_type=BF16)

        rhs = (N, K) if rhs_is_transposed else (K, N)
        specs = [jax.ShapeDtypeStruct(s, d) for s, d in zip(((M, K), rhs), dtypes)]
        out = jax.ShapeDtypeStruct((M, N), BF16)
        size = sum(math.prod(s.shape) * s.dtype.itemsize for s in (*specs, out))
        return looped(body, (*specs, out), rounds_per_call(sizes, flops, size), flops=flops, bytes=size)

    return {
        "bf16": partial(of, (BF16, BF16), None, False),
        "bf16-transposed": partial(of, (BF16, BF16), None, True),
        "fp8-fast": partial(of, (E4M3, E4M3), fast, True),
        "fp8-exact": partial(of, (E4M3, E4M3), exact, True),
        "fp8-exact-gradient": partial(of, (E5M2, E4M3), exact, True),
        "fp8-default": partial(of, (E4M3, E4M3), None, True),
        "fp8-default-not-transposed": partial(of, (E4M3, E4M3), None, False),
    }


# What moves bytes.


def memory_loops(sizes: Sizes) -> dict[str, Callable[[], Timed]]:
    def amax(x: jax.Array) -> jax.Array:
        return jnp.max(jnp.abs(x)).astype(jnp.float32)

    def cast(x: jax.Array) -> jax.Array:
        # Clipped, as values out of range are by every recipe.
        return jnp.clip(x.astype(jnp.float32) * 0.5, -448.0, 448.0).astype(E4M3)

    def cast_with_amax(x: jax.Array) -> Any:
        return cast(x), amax(x)

    def cast_both_ways(x: jax.Array) -> Any:
        codes = cast(x)
        return codes, codes.T

    kinds: dict[str, tuple[Any, Callable[[jax.Array], Any], int]] = {
        # name: (dtype of what is read, what is done, bytes an element)
        "negate-bf16": (BF16, lambda x: -x, 4),
        "negate-fp8": (E4M3, lambda x: lax.bitcast_convert_type(~codes_of(x), E4M3), 2),
        "transpose-fp8": (E4M3, lambda x: x.T, 2),
        "transpose-fp8-by-our-kernel": (E4M3, transpose, 2),
        "transpose-bf16": (BF16, lambda x: x.T, 4),
        "amax-bf16": (BF16, amax, 2),
        "cast": (BF16, cast, 3),
        "cast-and-amax": (BF16, cast_with_amax, 3),
        "cast-and-transposed-cast": (BF16, cast_both_ways, 4),
    }

    def of(n: int, dtype: Any, fun: Callable[[jax.Array], Any], size: int) -> Timed:
        x = jax.ShapeDtypeStruct((n, n), dtype)

        def body(carry: Any) -> Any:
            x, _ = carry
            # The results get the layout that their users would see.
            return x, jax.tree.map(with_default_layout, fun(pinned(x)))

        moved = n * n * size
        return looped(body, (x, jax.eval_shape(fun, x)), rounds_per_call(sizes, bytes=moved), bytes=moved)

    return {
        f"{name}/{n}": partial(of, n, dtype, fun, size)
        for n in sizes.squares
        for name, (dtype, fun, size) in kinds.items()
        if fun is not transpose or can_transpose(n, n)
    }


def codes_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


# Kernels that do next to nothing, one after the other.


def chain_loops(sizes: Sizes) -> dict[str, Callable[[], Timed]]:
    size = 16 if sizes.is_small else 256
    specs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((size, size), (size,)))

    def tiny(carry: Any) -> Any:
        # Each result needs all of the last ones, so XLA makes a kernel of each step.
        x, last = carry
        return x, jnp.max(x - last[None, :], axis=1)

    def straight(length: int) -> Timed:
        def run(carry: Any) -> Any:
            for _ in range(length):
                carry = tiny(carry)
            return carry

        program = Program(jax.jit(run, donate_argnums=0), (specs,), length)
        return Timed(program=program, carry=partial(filled, specs))

    return {
        "one": partial(straight, 1),
        "chain": partial(straight, sizes.chain),
        "loop": partial(looped, tiny, specs, sizes.chain),
    }


def with_gap(result: Row) -> Row:
    """Adds what each further kernel of the chain takes."""
    one, chain = (result["rows"][name] for name in ("one", "chain"))
    if "seconds" in one and "seconds" in chain:
        steps = chain["steps"]
        whole = steps * chain["seconds"]["median"]
        result["seconds_per_kernel"] = (whole - one["seconds"]["median"]) / (steps - 1)
    return result


# A training step.


def attentions(sizes: Sizes) -> tuple[str, ...]:
    """Returns the implementations of attention, in the order in which they are tried."""
    return ("xla",) if sizes.is_small else ("cudnn", "xla")


def model_op(op: str) -> Any:
    recipes = {"delayed": fp8.DelayedScaling(), "current": fp8.Float8CurrentScaling()}
    return None if op == "bf16" else partial(fp8.Fp8DotGeneralOp, recipe=recipes[op])


def model_program(
    sizes: Sizes, name: str, op: str, attention: str
) -> tuple[Callable[[jax.Array], fp8.TrainState], Program]:
    """Returns what makes the train state from a key, and a training step."""
    config, batch, length = sizes.models[name]
    initial = partial(llama.initial_state, llama.Llama(config, model_op(op), implementation=attention))
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    specs = jax.eval_shape(initial, jax.random.key(0)), tokens
    return initial, Program(jax.jit(llama.train_step, donate_argnums=0), specs)


def measure_model(sizes: Sizes, name: str, op: str, progress: Progress) -> Row:
    """Times a training step, and says how much memory its process took at most."""
    device = jax.devices()[0]
    config, batch, length = sizes.models[name]
    row: Row = {"parameters": config.parameters, "batch": batch, "length": length}
    reasons = []
    for attention in attentions(sizes):
        try:
            progress.at(attention)
            initial, program = model_program(sizes, name, op, attention)
            began = time.perf_counter()
            compiled = compiled_here(program)
            row |= {"attention": attention, "compile_seconds": time.perf_counter() - began}
            break
        except Exception as error:
            reasons.append(f"{attention}: {reason_of(error)}")
    else:
        raise NotMeasuredError("; ".join(reasons))
    if reasons:
        row["attention_refused"] = reasons
    row |= read_or_say(compiled, 1)
    progress.at("initialising")
    state = jax.jit(initial)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, config.vocabulary)
    before = (device.memory_stats() or {}).get("peak_bytes_in_use")
    progress.at("steps")
    losses, seconds = [], []
    for i in range(3 + sizes.rounds):
        began = time.perf_counter()
        state, loss = compiled(state, tokens)
        losses.append(float(jax.block_until_ready(loss)))
        if i >= 3:
            seconds.append(time.perf_counter() - began)
    flops = config.flops(batch * length)
    return row | {
        "seconds": summary(seconds),
        "flops": flops,
        "tflops": summary([1e-12 * flops / s for s in seconds]),
        "tokens_per_second": summary([batch * length / s for s in seconds]),
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "peak_bytes_before": before,
        "losses": losses,
    }


# Decoding.


@functools.lru_cache(maxsize=1)
def _decoders(sizes: Sizes) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Returns what makes each decoder: its module, and the shapes and dtypes of its variables."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    options = {"param_dtype": BF16, "cache_length": sizes.cache, "scan": False}

    def plain() -> tuple[Any, Any]:
        model = llama.Llama(sizes.decoder, **options)
        return model, jax.eval_shape(model.init, jax.random.key(0), token)

    def frozen(weight_only: bool) -> tuple[Any, Any]:
        model = llama.Llama(sizes.decoder, fp8.Fp8DotGeneralOp, **options)
        variables = jax.eval_shape(model.init, jax.random.key(0), token)
        models = []

        def freeze(variables: Any) -> Any:
            model8, variables8 = fp8.freeze(model, variables, token, weight_only=weight_only)
            models.append(model8)
            return variables8

        served = jax.eval_shape(freeze, variables)
        return models[0], served

    fp8_kinds = {"fp8": partial(frozen, False), "fp8-weight-only": partial(frozen, True)}
    return {"bf16": functools.cache(plain)} | {name: functools.cache(f) for name, f in fp8_kinds.items()}


def decode_loops(sizes: Sizes, batch: int) -> dict[str, Callable[[], Timed]]:
    def of(make: Callable[[], tuple[Any, Any]]) -> Timed:
        model, variables = make()
        cache = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((batch, *s.shape[1:]) if s.ndim else (), s.dtype),
            variables["cache"],
        )
        variables = {**variables, "cache": cache}
        tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

        def body(carry: Any) -> Any:
            variables, tokens = carry
            tokens, new = llama.next_token(
                model, {**variables, "params": pinned(variables["params"])}, tokens
            )
            # The cache never fills up.
            index = lambda path, x: x % sizes.cache if path[-1].key == "index" else x  # noqa: E731
            cache = jax.tree_util.tree_map_with_path(index, new["cache"])
            return {**variables, "cache": cache}, tokens

        def carry() -> Any:
            # Scales with which the values lie in FP8's range; the time does not depend on them.
            def scaled(path: Any, x: jax.Array) -> jax.Array:
                return x * 0.02 if str(path[-1].key) in ("input_scale", "kernel_scale") else x

            filled_variables = jax.tree_util.tree_map_with_path(scaled, filled(variables))
            return filled_variables, jnp.zeros(tokens.shape, tokens.dtype)

        moved = sum(
            math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves((variables["params"], cache))
        )
        steps = rounds_per_call(sizes, bytes=moved)
        return looped(body, (variables, tokens), steps, carry=carry, bytes=moved)

    return {name: partial(of, make) for name, make in _decoders(sizes).items()}


# PyTorch's GEMM.


def measure_torch(sizes: Sizes, progress: Progress) -> Row:
    """Times ``torch._scaled_mm`` next to PyTorch's own bfloat16 product."""
    if importlib.util.find_spec("torch") is None:
        return {"not_measured": "torch is not installed"}
    import torch

    if not torch.cuda.is_available():
        return {"not_measured": "torch has no CUDA"}
    rows: Row = {}
    shapes = (*sizes.gemms, *sizes.transformer_engine)
    for shape in dict.fromkeys(shapes):
        M, K, N = shape
        flops = 2 * M * K * N
        steps = rounds_per_call(sizes, flops)
        try:
            progress.at(text_of(shape))
            a, b = (torch.randn(n, K, device="cuda", dtype=torch.bfloat16) for n in (M, N))
            a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
            one = torch.ones((), device="cuda")

            def scaled(fast: bool, a8: Any = a8, b8: Any = b8, one: Any = one) -> None:
                torch._scaled_mm(
                    a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
                )

            kinds: dict[str, Callable[[], Any]] = {
                "bf16": partial(torch.mm, a, b.t()),
                "fp8-fast": partial(scaled, True),
                "fp8-exact": partial(scaled, False),
            }

            def repeated(fun: Callable[[], Any], steps: int = steps) -> float:
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(steps):
                    fun()
                torch.cuda.synchronize()
                return (time.perf_counter() - began) / steps

            seconds = interleaved(
                {name: partial(repeated, fun) for name, fun in kinds.items()}, sizes.rounds
            )
            rows[text_of(shape)] = {
                name: {
                    "seconds": summary(values),
                    "tflops": summary([1e-12 * flops / s for s in values]),
                    "times_base": ratio(seconds["bf16"], values),
                }
                for name, values in seconds.items()
            }
        except Exception as error:
            rows[text_of(shape)] = {"not_measured": reason_of(error)}
    return {"torch": torch.__version__, "base": "bf16", "rows": rows}


# Where the time of one Dense layer goes.


def measure_kernels(sizes: Sizes, progress: Progress) -> Row:
    """Returns the seconds of each kernel in one step, as the device's profiler has them."""
    rows: Row = {}
    for name, make in dense_loops(sizes, sizes.first, in_full=True).items():
        try:
            progress.at(name)
            timed = make()
            run = running(compiled_here(timed.program), timed.carry())
            run()
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    run()
                seconds, times, span = profiled(folder)
            steps = timed.program.steps
            largest = sorted(seconds, key=lambda kernel: -seconds[kernel])[:30]
            rows[name] = {
                "busy_seconds": sum(seconds.values()) / steps,
                "span_seconds": span / steps,
                "kernels": {
                    kernel[:200]: [seconds[kernel] / steps, times[kernel] / steps] for kernel in largest
                },
            }
        except Exception as error:
            rows[name] = {"not_measured": reason_of(error)}
    return {"rows": rows}


def profiled(folder: str) -> tuple[Counter[str], Counter[str], float]:
    """Returns the seconds and the launches of each kernel on the device, and from first to last."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    seconds: Counter[str] = Counter()
    times: Counter[str] = Counter()
    begins, ends = [], []
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if (line.name or "").startswith("Stream") else ():
                seconds[event.name] += 1e-9 * event.duration_ns
                times[event.name] += 1
                begins.append(event.start_ns)
                ends.append(event.start_ns + event.duration_ns)
    if not begins:
        raise NotMeasuredError("the profiler saw no kernel on a GPU")
    return seconds, times, 1e-9 * (max(ends) - min(begins))


# Values, next to NumPy.

CORE_VALUES = ("delayed", "delayed-exact", "delayed-default", "current", "axiswise", "mxfp8", "block128")


def _values_recipes() -> dict[str, fp8.Recipe]:
    recipes = {name: recipe for name, recipe in accuracy.RECIPES.items() if recipe is not None}
    for how in ("exact", "default"):
        accumulation = fp8.Accumulation(forward=how, dgrad=how, wgrad=how)
        recipes[f"delayed-{how}"] = fp8.DelayedScaling(accumulation=accumulation)
    recipes["delayed-margin-pow2"] = fp8.DelayedScaling(margin=2, use_power_2_scales=True)
    recipes["delayed-most-recent"] = fp8.DelayedScaling(amax_compute_algo="most_recent", amax_history_len=4)
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        recipes[f"torchao-{name}"] = fp8.torchao_recipe(name)
    return recipes


VALUES = _values_recipes()
GEMMS = accuracy.GEMMS


class Quantized(NamedTuple):
    """What NumPy makes of an operand, seen as a matrix whose columns are summed over."""

    codes: np.ndarray
    scale: np.ndarray
    values: np.ndarray
    """``codes * scale`` in float64."""


def by_formulas(quantizer: Any, matrix: np.ndarray) -> Quantized:
    """Returns a matrix of normal float32 numbers as a quantizer's formulas have it.

    A delayed quantizer is taken to have seen the matrix itself.
    """
    dtype, limit = quantizer.dtype, np.float32(ml_dtypes.finfo(quantizer.dtype).max)
    rows, columns = matrix.shape
    if isinstance(quantizer, fp8.BlockQuantizer):
        height, width = quantizer.block
        kind = quantizer.scale if quantizer.scale != "e8m0" else f"e8m0_{quantizer.scale_rounding}"
    else:
        axiswise = getattr(quantizer, "granularity", "tensorwise") == "axiswise"
        height, width = (1 if axiswise else rows), columns
        kind = "power_of_two" if quantizer.use_power_2_scales else "float32"
    filled = np.pad(matrix, ((0, -rows % height), (0, -columns % width)))
    down, across = filled.shape[0] // height, filled.shape[1] // width
    tiles = filled.reshape(down, height, across, width)
    amax = np.abs(tiles).max((1, 3), keepdims=True)
    amax = np.maximum(amax, np.float32(getattr(quantizer, "amax_epsilon", 0.0)))
    factor = np.float32(2.0 ** getattr(quantizer, "margin", 0))
    if kind == "float32":
        with np.errstate(divide="ignore"):
            scale = np.where(amax > 0, np.float32(1) / (limit / amax / factor), np.float32(1))
    else:
        mantissa, exponent = np.frexp(amax.astype(np.float64) * factor)
        max_mantissa, max_exponent = np.frexp(np.float64(limit))
        up = (mantissa > max_mantissa) if kind != "e8m0_floor" else 0
        scale = np.where(amax > 0, 2.0 ** (exponent - max_exponent + up), 1.0).astype(np.float32)
    codes = np.clip(tiles / scale, -limit, limit).astype(dtype)
    values = codes.astype(np.float64) * scale.astype(np.float64)
    if kind.startswith("e8m0"):
        scale = scale.astype(ml_dtypes.float8_e8m0fnu)
    codes, values = (x.reshape(filled.shape) for x in (codes, values))
    return Quantized(codes, scale[:, 0, :, 0], values[:rows, :columns])


def products(gemms: fp8.CustomRecipe, x: Any, w: Any, g: Any) -> tuple[tuple[Any, Any, Any, Any], ...]:
    """Returns for each GEMM its recipe, both operands as they are, and the matrices that it multiplies."""
    return (
        (gemms.forward, (x, w), (x, w.T), (1, 0)),
        (gemms.dgrad, (g, w), (g, w), (1, 1)),
        (gemms.wgrad, (x, g), (x.T, g.T), (0, 0)),
    )


def measure_values(shape: Shape, name: str, progress: Progress) -> Row:
    progress.at(name)
    return {"shape": list(shape), **values_row(VALUES[name], shape)}


def values_program(recipe: fp8.Recipe, shape: Shape) -> Program:
    """Returns a step of a float32 layer: output, gradients of the variables and of the input."""
    M, K, N = shape
    layer = nn.Dense(N, use_bias=False, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe))

    def step(variables: Any, x: jax.Array, g: jax.Array) -> Any:
        def loss(variables: Any, x: jax.Array) -> Any:
            out = layer.apply(variables, x)
            return jnp.sum(out * g), out

        (_, out), (dvariables, dx) = fp8.value_and_grad(loss, (0, 1), has_aux=True)(variables, x)
        return out, dvariables, dx

    x, g = (jax.ShapeDtypeStruct((M, n), jnp.float32) for n in (K, N))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    return Program(jax.jit(step), (variables, x, g))


def values_programs(shape: Shape, name: str) -> dict[str, Program]:
    return {name: values_program(VALUES[name], shape)}


def values_row(recipe: fp8.Recipe, shape: Shape) -> Row:
    """Compares one layer on the device, forward and backward, with NumPy.

    The layer is float32, so that nothing but the FP8 casts and the accumulation adds to the error; delayed
    scaling has seen the same tensors one step before.
    """
    M, K, N = shape
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.standard_normal(s).astype(np.float32) * np.float32(f)
        for s, f in (((M, K), 1.0), ((K, N), K**-0.5), ((M, N), 1e-3))
    )
    arrays = [jnp.asarray(array) for array in (x, w, g)]
    program = values_program(recipe, shape)
    # Fresh states, and the kernel.
    variables = {**filled(program.specs[0]), "params": {"kernel": arrays[1]}}
    compiled = compiled_here(program)
    row: Row = read_or_say(compiled, 1)
    row = {key: value for key, value in row.items() if key in ("gemms", "not_read", "kernels")}
    if OWG in variables:
        dvariables = compiled(variables, arrays[0], arrays[2])[1]
        variables = {**dvariables, "params": variables["params"]}
    y, dvariables, dx = compiled(variables, arrays[0], arrays[2])
    measured = (y, dx, dvariables["params"]["kernel"])
    operands: list[Operand] = []
    for gemm, got, (part, tensors, matrices, axes) in zip(
        GEMMS, measured, products(recipe.gemms, x, w, g), strict=True
    ):
        quantizers = (part.lhs, part.rhs)
        sides = [
            matrix.astype(np.float64) if quantizer is None else by_formulas(quantizer, matrix).values
            for quantizer, matrix in zip(quantizers, matrices)
        ]
        wanted = sides[0] @ sides[1].T
        exact = matrices[0].astype(np.float64) @ matrices[1].astype(np.float64).T
        difference = np.asarray(got, np.float64) - wanted
        row[gemm] = {
            "relative_error": float(np.linalg.norm(difference) / np.linalg.norm(wanted)),
            "max_error": float(np.abs(difference).max() / np.abs(wanted).max()),
            "error_of_fp8": float(np.linalg.norm(wanted - exact) / np.linalg.norm(exact)),
        }
        each = zip(quantizers, tensors, matrices, axes)
        operands += [Operand(*operand) for operand in each if operand[0] is not None]
    row |= differences(operands)
    if OWG in dvariables:
        row["states_that_differ"] = states_that_differ(recipe.gemms, dvariables[OWG], (x, w, g))
    return row


NUM_EXPERTS = 5


def sizes_of_experts(rows: int) -> np.ndarray:
    """Returns how many rows each expert has: odd numbers, one empty, and some rows left over."""
    shares = np.array([0.21, 0.0, 0.33, 0.17, 0.24])
    return np.where(shares > 0, (shares * rows).astype(np.int32) | 1, 0).astype(np.int32)


def experts_program(recipe: fp8.Recipe, shape: Shape) -> Program:
    """Returns a ragged dot in float32, and both of its gradients."""
    M, K, N = shape
    op = fp8.Fp8RaggedDotOp(recipe=recipe)

    def step(x: jax.Array, w: jax.Array, group_sizes: jax.Array, g: jax.Array) -> Any:
        out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, group_sizes), x, w)
        return out, *vjp(g)

    floats = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (NUM_EXPERTS, K, N), (M, N))]
    return Program(jax.jit(step), (*floats[:2], jax.ShapeDtypeStruct((NUM_EXPERTS,), jnp.int32), floats[2]))


def experts_programs(shape: Shape, name: str) -> dict[str, Program]:
    return {name: experts_program(VALUES[name], shape)}


def measure_experts(shape: Shape, name: str, progress: Progress) -> Row:
    """Compares a ragged dot on the device, with both gradients, with NumPy, an expert at a time."""
    progress.at(name)
    M, K, N = shape
    rng = np.random.default_rng(0)
    x, w, g = (
        rng.standard_normal(s).astype(np.float32) * np.float32(f)
        for s, f in (((M, K), 1.0), ((NUM_EXPERTS, K, N), K**-0.5), ((M, N), 1e-3))
    )
    group_sizes = sizes_of_experts(M)
    ends = np.cumsum(group_sizes)
    used = slice(0, ends[-1])
    program = experts_program(VALUES[name], shape)
    compiled = compiled_here(program)
    row: Row = read_or_say(compiled, 1)
    row = {key: value for key, value in row.items() if key in ("gemms", "not_read", "kernels")}
    measured = [np.asarray(a, np.float64) for a in compiled(*map(jnp.asarray, (x, w, group_sizes, g)))]
    gemms = VALUES[name].gemms
    values = [  # of each GEMM, both operands
        (
            by_formulas(gemms.forward.lhs, x[used]).values,
            [by_formulas(gemms.forward.rhs, k.T).values.T for k in w],
        ),
        (by_formulas(gemms.dgrad.lhs, g[used]).values, [by_formulas(gemms.dgrad.rhs, k).values for k in w]),
        tuple(
            by_formulas(quantizer, tensor[used].T).values.T
            for quantizer, tensor in ((gemms.wgrad.lhs, x), (gemms.wgrad.rhs, g))
        ),
    ]
    wide = [tuple(a.astype(np.float64) for a in pair) for pair in ((x, w), (g, w), (x, g))]

    def by_expert(of: Any) -> tuple[np.ndarray, ...]:
        (x, w), (g, w_of_dgrad), (x_of_wgrad, g_of_wgrad) = of
        out, dx, dw = np.zeros((M, N)), np.zeros((M, K)), np.zeros((NUM_EXPERTS, K, N))
        for e, (start, end) in enumerate(zip(ends - group_sizes, ends)):
            rows = slice(start, end)
            out[rows], dx[rows] = x[rows] @ w[e], g[rows] @ w_of_dgrad[e].T
            dw[e] = x_of_wgrad[rows].T @ g_of_wgrad[rows]
        return out, dx, dw

    for gemm, got, wanted, exact in zip(GEMMS, measured, by_expert(values), by_expert(wide), strict=True):
        row[gemm] = {
            "relative_error": float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted)),
            "max_error": float(np.abs(got - wanted).max() / np.abs(wanted).max()),
            "error_of_fp8": float(np.linalg.norm(wanted - exact) / np.linalg.norm(exact)),
        }
    operands = [
        Operand(gemms.forward.lhs, x[used], x[used], 1),
        Operand(gemms.wgrad.lhs, x[used], x[used].T, 0),
    ]
    return {"shape": [*shape], "experts": group_sizes.tolist(), **row, **differences(operands)}


class Operand(NamedTuple):
    """A tensor of a GEMM, and the matrix that it is in the reference."""

    quantizer: Any
    tensor: np.ndarray
    matrix: np.ndarray
    axis: int
    """The dimension of the tensor that is summed over."""


def differences(operands: Sequence[Operand]) -> Row:
    """Returns how many codes and scales the device makes otherwise than NumPy, in bits."""
    wanted = [by_formulas(operand.quantizer, operand.matrix) for operand in operands]

    @jax.jit
    def on_device(tensors: list[jax.Array], scales: list[jax.Array]) -> Any:
        return [
            quantize_operand(o.quantizer, tensor, View(tensor.shape, (o.axis,), ()), scale)
            for o, tensor, scale in zip(operands, tensors, scales, strict=True)
        ]

    delayed = [
        w.scale.reshape(1) if isinstance(o.quantizer, fp8.DelayedQuantizer) else np.ones(1, np.float32)
        for o, w in zip(operands, wanted)
    ]
    row = {"codes": 0, "codes_that_differ": 0, "scales": 0, "scales_that_differ": 0}
    for o, w, got in zip(operands, wanted, on_device([o.tensor for o in operands], delayed)):
        codes, scale = np.asarray(got.codes), np.asarray(got.scale)
        if not isinstance(o.quantizer, fp8.BlockQuantizer) and o.axis == 0:  # they lie as the tensor does
            codes = codes.T
        bits = np.uint8 if scale.dtype.itemsize == 1 else np.uint32
        same_codes = codes.reshape(w.codes.shape).view(np.uint8) == w.codes.view(np.uint8)
        same_scales = scale.reshape(-1).view(bits) == w.scale.reshape(-1).view(bits)
        row["codes"] += same_codes.size
        row["codes_that_differ"] += int(np.sum(~same_codes))
        row["scales"] += same_scales.size
        row["scales_that_differ"] += int(np.sum(~same_scales))
    return row


def states_that_differ(gemms: fp8.CustomRecipe, state: Any, tensors: Sequence[np.ndarray]) -> int:
    """Returns how many elements of the scaling states after two steps on the same tensors differ."""
    (leaves,) = state.values()
    count = 0
    for role, tensor in zip(("input", "kernel", "output_grad"), tensors):
        quantizer = gemms.delayed[role]
        scale, history = (np.asarray(leaves[f"{role}_{kind}"]) for kind in ("scale", "amax_history"))
        amax = np.abs(tensor).max()
        wanted = np.zeros_like(history)
        wanted[[0, -1]] = amax  # today's, and that of the step before
        count += int(np.sum(history != wanted)) + int(np.sum(scale != by_formulas(quantizer, tensor).scale))
    return count
