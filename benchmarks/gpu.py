"""How fast is FP8 on this GPU beside bf16, and are its values those of the CPU?

Run ``make bench-gpu PYTHON=…`` with a Python whose JAX sees the GPU; ``ARGS=--help`` for the options. Each
entry is written to the results as it ends, the most telling first. Started again, it goes on with what is
missing; after ``--minutes`` (8) it begins no other entry. On a CPU ``--small`` runs most of it on tiny
sizes, to see that it runs.

values: one float32 nn.Dense, forward and backward, beside the same on the CPU, where FP8 is emulated; the
tests compare the emulation with NumPy. relative error = |device - CPU| / |CPU| (Frobenius norm). Scaling
states are compared in bits. Delayed scaling is compared in its second step on the same tensors.

gemm: one GEMM of bf16 or FP8 operands. kernels: our GPU kernels for 128-blocks, those in use (today) and
those that no GPU had run; error = as relative error, beside float32 or XLA's cast. dense: one nn.Dense in
bfloat16, forward and backward. llama: the training step of two of a Llama's layers (benchmarks/llama.py). A
program named "-new" uses the new kernels. Data are Gaussian.

seconds = of one of 20 calls that are started one after the other, median of 6 rounds; in each round every
program of the entry runs, in rotated order. times bf16 = the median over rounds of the seconds of bf16
over those of the program. peak = bytes of arguments, results and temporaries, as compiled. predicted =
fp8.audit(...).predicted_seconds["total"] for this kind of GPU.
Backends and GEMMs are those of the program as it was tuned here.

The autotuned kernels are those of this run; the GPU's clocks are as it keeps them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8flax as fp8
from benchmarks import accuracy, common, dense, llama
from benchmarks.common import Row, Shape
from fp8flax._core.gemm import hopper, hopper_ahead, quantize_blocks, quantize_blocks_mosaic
from fp8flax._core.gemm.gpus import GPUS, new_kernels
from fp8flax._core.gemm.hopper_ahead import Config
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import Dims

QUESTION, METHOD = common.question_and_method(__doc__)
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "numpy")
CALLS, ROUNDS = 20, 6
BASE, NEW = "bf16", "-new"
LIMIT = 150
"""Seconds after which an entry counts as hung. The process ends; the next run goes on after the entry."""


class Program(NamedTuple):
    """A jitted function from a carry to the next, and the function that makes the first carry."""

    function: Any
    carry: Callable[[], Any]
    wanted: Callable[[Any], Any] | None = None
    """Returns what the last part of the next carry should be."""


Programs = Mapping[str, Callable[[], Program]]
"""Makes each program of an entry, by its name."""


# Values.


def compared(layer: nn.Module, shape: Shape) -> dict[str, Row]:
    """Compares a layer on the device with the same on the CPU; returns a row."""
    M, K, N = shape
    cpu, device = jax.devices("cpu")[0], jax.devices()[0]
    step = jax.jit(common.make_step(accuracy.applied(layer)))
    with jax.default_device(cpu):
        x, g = normal(0, M, K, dtype=jnp.float32), normal(1, M, N, dtype=jnp.float32)
        arguments = layer.init(jax.random.key(2), x), x, g
        wanted = common.second_step(step, *arguments)
    got = common.second_step(step, *jax.device_put(arguments, device))
    row: Row = {}
    results = [(out, dx, variables["params"]["kernel"]) for out, variables, dx in (got, wanted)]
    for gemm, ours, theirs in zip(common.GEMMS, *results, strict=True):
        theirs = np.asarray(theirs, np.float64)
        row[gemm] = float(np.linalg.norm(np.asarray(ours) - theirs) / np.linalg.norm(theirs))
    states = [jax.tree.leaves(step[1].get(common.OWG, {})) for step in (got, wanted)]
    row["states_that_differ"] = sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in zip(*states))
    return {"device": row}


# Programs.


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def dense_programs(shape: Shape, contenders: Sequence[str]) -> Programs:
    """Returns one Dense layer, as each contender of ``benchmarks/dense.py`` makes it."""

    def make(name: str) -> Program:
        layer, specs = dense.specs(dense.CONTENDERS[name], shape)
        step = common.make_step(layer.apply)

        def call(carry: Any) -> Any:
            return *carry[:3], step(*carry[:3])

        def first() -> Any:
            x, g = (normal(i, *spec.shape) for i, spec in enumerate(specs[1:]))
            variables = jax.jit(layer.init)(jax.random.key(2), x)
            return variables, x, g, jax.tree.map(jnp.zeros_like, jax.eval_shape(step, variables, x, g))

        return Program(jax.jit(call, donate_argnums=0), first)

    return {name: partial(make, name.removesuffix(NEW)) for name in contenders}


def gemm_programs(shape: Shape) -> Programs:
    """Returns one GEMM in bf16, and in FP8 with each accumulation."""
    M, K, N = shape
    presets = lax.DotAlgorithmPreset

    def make(dtype: Any, precision: Any) -> Program:
        def dot(a: jax.Array, b: jax.Array, precision: Any = None) -> jax.Array:
            # The second operand is transposed, as cublasLt wants it on Hopper.
            dims = (((1,), (1,)), ((), ()))
            return lax.dot_general(a, b, dims, precision, preferred_element_type=jnp.bfloat16)

        def call(carry: Any) -> Any:
            a, b, _ = carry
            # CPUs refuse what states its accumulation.
            return a, b, lax.platform_dependent(a, b, cuda=partial(dot, precision=precision), default=dot)

        def first() -> Any:
            a, b = normal(0, M, K).astype(dtype), normal(1, N, K).astype(dtype)
            return a, b, jnp.zeros((M, N), jnp.bfloat16)

        return Program(jax.jit(call, donate_argnums=0), first)

    return {
        BASE: partial(make, jnp.bfloat16, None),
        "fp8-fast": partial(make, jnp.float8_e4m3fn, presets.ANY_F8_ANY_F8_F32_FAST_ACCUM),
        "fp8-exact": partial(make, jnp.float8_e4m3fn, presets.ANY_F8_ANY_F8_F32),
    }


def kernel_program(kernel: Callable[..., Any], operands: Callable[[], Any], wanted: Any) -> Program:
    """Returns a call of a GPU kernel."""

    def first() -> Any:
        given = operands()
        return given, jax.tree.map(jnp.zeros_like, jax.eval_shape(kernel, *given))

    call = jax.jit(lambda carry: (carry[0], kernel(*carry[0])), donate_argnums=0)
    return Program(call, first, lambda carry: wanted(*carry[0]))


def product_programs(shape: Shape, height: int, configs: Sequence[Config]) -> Programs:
    """Returns GEMMs with scales per 128 columns, and in the right operand per ``height`` rows."""
    M, K, N = shape

    def operands() -> Any:
        codes = (normal(i, n, K).astype(jnp.float8_e4m3fn) for i, n in enumerate((M, N)))
        scales = (jnp.exp(normal(2, K // 128, n, dtype=jnp.float32)) for n in (M, N // height))
        return tuple(zip(codes, scales))

    def today(left: Any, right: Any) -> jax.Array:
        step = lambda t, s: hopper.Step(t, np.int32(0), s, t)  # noqa: E731
        sizes: Any = {"num_steps": lambda _: K // 128, "step": step, "shape": (M, N)}
        return hopper.tiled_gemm(left, right, **sizes, out_dtype=jnp.bfloat16, name=BLOCK_GEMM_HOPPER)

    def wanted(*operands: Any) -> jax.Array:
        a, b = (
            codes.astype(jnp.float32) * jnp.kron(scale.T, jnp.ones((len(codes) // scale.shape[1], 128)))
            for codes, scale in operands
        )
        return jnp.matmul(a, b.T, precision="highest")

    ahead = partial(hopper_ahead.block_gemm, out_dtype=jnp.bfloat16)
    kernels: dict[str, Any] = {"today": today, **{str(c): partial(ahead, config=c) for c in configs}}
    return {name: partial(kernel_program, kernel, operands, wanted) for name, kernel in kernels.items()}


def cast_programs(shape: Shape, dtype: Any, block: tuple[int, int]) -> Programs:
    """Returns casts of a tensor for both GEMMs; float32 is rounded to bfloat16 before."""
    quantizer = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=block, scale="power_of_two")
    cast = quantize_blocks.Cast(quantizer, (Dims(2, (0,)), Dims(2, (1,))), rounded_to=jnp.bfloat16)
    operands, wanted = lambda: (normal(0, *shape, dtype=dtype),), partial(quantize_blocks.reference, cast)
    kernels = {"today": None, "mosaic": quantize_blocks_mosaic.block_quantize}
    return {
        name: partial(
            kernel_program, partial(quantize_blocks.compute, cast, kernel=kernel), operands, wanted
        )
        for name, kernel in kernels.items()
    }


CONFIGS = (Config(cluster=1), Config(waves=1, stages=6, cluster=1), Config(), Config(waves=1, stages=6))
"""The least risky first: clusters are the riskiest."""


def llama_programs(width: int, rows: int, names: Sequence[str]) -> Programs:
    """Returns the training step under each recipe."""

    def make(how: str) -> Program:
        step, initial, x = llama.training_step(how.removesuffix(NEW), width, rows)

        def call(carry: Any) -> Any:
            state, x = carry
            return step(state, x), x

        return Program(jax.jit(call, donate_argnums=0), lambda: (jax.jit(initial)(), normal(1, *x.shape)))

    return {name: partial(make, name) for name in names}


FEW = (BASE, "flax-qdq", "flax-direct", "fp8flax", "fp8flax-current")
OF_TRANSFORMER_ENGINE = tuple((15872, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384)))
"""Transformer Engine publishes the times of these layers."""
RECIPES = tuple(name for name in accuracy.RECIPES if name != accuracy.BF16)


Entries = Iterator[tuple[str, Callable[[], dict[str, Row]]]]
"""The name of each entry, and the function that measures its rows, by program."""


def table(is_small: bool) -> Entries:
    """Yields all entries, the most telling first; small ones take seconds on a CPU."""
    square, first = ((16,) * 3, (32,) * 3) if is_small else ((8192, 4096, 4096),) * 2
    of_layer = (32, 64, 32) if is_small else (512, 768, 384)
    yield f"gemm/{common.text_of(square)}", partial(timed, gemm_programs(square))
    if not is_small:
        for config in CONFIGS:
            programs = product_programs(square, 128, [config])
            yield f"kernels/product/128/{config}", partial(timed, programs)
        yield "kernels/product/1", partial(timed, product_programs(square, 1, CONFIGS[::5]))
        yield "kernels/input", partial(timed, cast_programs(square[:2], jnp.bfloat16, (1, 128)))
        yield "kernels/kernel", partial(timed, cast_programs((4096, 14336), jnp.float32, (128, 128)))
    names = BASE, *llama.RECIPES, "flax-direct"
    sizes = (64, 64) if is_small else (4096, llama.ROWS)
    yield "llama", partial(timed, llama_programs(*sizes, names))
    if not is_small:
        yield "llama/new", partial(timed, llama_programs(*sizes, (BASE, "block128", f"block128{NEW}")))
    contenders = *dense.CONTENDERS, f"fp8flax-block128{NEW}"
    yield f"dense/{common.text_of(first)}", partial(timed, dense_programs(first, contenders))
    for name in RECIPES:
        layer = accuracy.make_layer(name, of_layer[2])
        yield f"values/{common.text_of(of_layer)}/{name}", partial(compared, layer, of_layer)
    for shape in () if is_small else OF_TRANSFORMER_ENGINE:
        yield f"dense/{common.text_of(shape)}", partial(timed, dense_programs(shape, FEW))


# Measuring.


def predicted(program: Program) -> Row:
    """Returns what the audit reads from a program as tuned here, and its predicted time without the GPU."""
    name = jax.devices()[0].device_kind
    target = next((key for key, gpu in GPUS.items() if gpu.name in name), "local")
    audit = partial(fp8.audit, program.function, jax.eval_shape(program.carry))
    report = audit(target="local")
    return {
        "predicted_seconds": audit(target=target).predicted_seconds.get("total"),
        "backends": sorted({f"{gemm.backend}, {gemm.accumulation}" for gemm in report.gemms}),
        **common.counts_of(report),
    }


def timed(programs: Programs) -> dict[str, Row]:
    """Compiles programs and times them together; returns a row for each."""
    rows: dict[str, Row] = {}
    runs: dict[str, Callable[[], None]] = {}
    for name, make in programs.items():
        try:
            with new_kernels(name.endswith(NEW)):
                program = make()
                run, row = running(program)
                run()
                rows[name], runs[name] = {**predicted(program), **row}, run
        except Exception as error:
            rows[name] = {"not_measured": common.reason_of(error)}
    seconds = {
        name: [value / CALLS for value in values]
        for name, values in common.interleaved(runs, ROUNDS, warm_up=1).items()
    }
    for name, of_rounds in seconds.items():
        rows[name]["seconds"] = common.summary(of_rounds)
        if BASE in seconds:
            rows[name]["times_bf16"] = common.ratio(seconds[BASE], of_rounds)
    return rows


def running(program: Program) -> tuple[Callable[[], None], Row]:
    """Returns a function that calls a program ``CALLS`` times, each time with what it returned before.

    Also returns the peak bytes of the program, and the error of a GPU kernel.
    """
    carry, row = program.carry(), {}
    compiled = program.function.lower(carry).compile()
    if used := compiled.memory_analysis():
        size = used.argument_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
        row["peak_bytes"] = size + used.temp_size_in_bytes
    if program.wanted:
        wanted, carry = jax.jit(program.wanted)(carry), compiled(carry)
        pairs = [
            (np.asarray(ours, np.float64), np.asarray(theirs, np.float64))
            for ours, theirs in zip(*map(jax.tree.leaves, (carry[-1], wanted)), strict=True)
        ]
        row["error"] = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)

    def run() -> None:
        nonlocal carry
        for _ in range(CALLS):
            carry = compiled(carry)
        jax.block_until_ready(carry)

    return run, row


def measure(entry: Callable[[], dict[str, Row]]) -> dict[str, Row]:
    """Returns the rows of an entry by program, or why there are none."""
    try:
        with common.quiet():
            return entry()
    except Exception as error:
        return {"device": {"not_measured": common.reason_of(error)}}
    finally:
        jax.clear_caches()


COLUMNS: common.Columns = {
    "entry": common.word("entry"),
    "program": common.word("program"),
    "not measured": lambda row: row.get("not_measured", ""),
    "errors": lambda row: " ".join(f"{row[gemm]:.0e}" for gemm in common.GEMMS if gemm in row),
    "error": common.figure("error", ".0e"),
    "peak MiB": common.figure("peak_bytes", ",.0f", 2**-20),
    "states that differ": common.figure("states_that_differ", ".0f"),
    "us": common.figure("seconds", ".1f", 1e6),
    "predicted us": common.figure("predicted_seconds", ".1f", 1e6),
    "times bf16": common.figure("times_bf16", ".2f"),
    "FP8 GEMMs": common.figure("fp8_gemms", ".0f"),
    "launches": common.figure("launches", ".0f"),
}


def text(entries: Mapping[str, Row]) -> str:
    """Returns the results as a table."""
    rows = [
        {"entry": name, "program": program, **row}
        for name, programs in entries.items()
        for program, row in programs.items()
    ]
    return common.text_table(COLUMNS, rows, 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--json", type=Path, metavar="PATH", help="(benchmarks/results/gpu.json)")
    parser.add_argument("--only", default="", metavar="START", help="entries whose names begin so")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="when no other entry begins (%(default)s)"
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    args = parser.parse_args(argv)
    here = common.machine(PACKAGES)
    if not (args.small or here["gpu"]):
        raise SystemExit("JAX sees no GPU here. --small runs the benchmark in small on any device.")
    path = args.json or Path(tempfile.gettempdir() if args.small else common.RESULTS, "gpu.json")
    report = common.begin(QUESTION, METHOD, here, entries={})
    if path.exists():
        old = json.loads(path.read_text())
        if old["machine"] != here:
            raise SystemExit(
                f"{path} is from another machine or other versions: name another file by --json."
            )
        report["entries"] = old["entries"]
    began = time.monotonic()
    for name, entry in table(args.small):
        if not name.startswith(args.only) or name in report["entries"]:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            raise SystemExit(f"{args.minutes:g} minutes are over. Run it again for what is missing.")
        report["entries"][name] = {"device": {"not_measured": f"hung, or took more than {LIMIT} s"}}
        common.write(report, path)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        report["entries"][name] = measure(entry)
        faulthandler.cancel_dump_traceback_later()
        common.write(report, path)
    print("\n" + text(report["entries"]))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
