"""What does one Dense layer, forward and backward, cost in FP8, next to bf16 and the other libraries?

Run ``python -m benchmarks.dense``; ``--help`` for the options. Start it with ``JAX_PLATFORMS=cpu`` where
JAX finds the CUDA plugin but no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

import fp8flax as fp8
from benchmarks.common import (
    RESULTS,
    WARM_UP,
    NotMeasuredError,
    Row,
    Shape,
    begin,
    compilations,
    interleaved,
    machine,
    parse_shape,
    quiet,
    ratio,
    reason_of,
    run,
    summary,
    text_of,
    write,
)

QUESTION = (
    "What does one nn.Dense, forward and backward, cost in FP8: in GEMMs, kernels and bytes as XLA "
    "compiles it for a GPU, in time on a CPU, and in time and memory on the GPU that is here, if any?"
)
BF16, FLAX_QDQ, FLAX_DIRECT, QWIX, QWIX_CHANNEL, OURS, OURS_TRITON, OURS_QDQ, *OURS_BY_RECIPE = (
    "bf16",
    "flax-qdq",
    "flax-direct",
    "qwix",
    "qwix-channel",
    "fp8flax",
    "fp8flax-triton",
    "fp8flax-qdq",
    "fp8flax-current",
    "fp8flax-axiswise",
    "fp8flax-mxfp8",
    "fp8flax-block128",
)
CEILING, TORCH = "ceiling", "torch"
SHAPES = (
    (8192, 4096, 4096),
    (4096, 4096, 16384),
    (4096, 1024, 4096),
    (2048, 2048, 2048),
    (8192, 8192, 8192),
    (16384, 4096, 14336),
)
PARTS = ("counts", "cpu", "gpu")
TARGETS = ("h200", "h100", "b200", "local")
COMPILATIONS = 5
STEPS = 20
MIB = 2**20

Step = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to make the layer."""

    what: str
    make_layer: Callable[[int], nn.Module]
    """Takes the number of features."""
    leading: tuple[int, ...] = ()
    """Axes of size 1 before M, in input, output and their gradients."""


def _dense(features: int, dot_general_cls: Any = None) -> nn.Module:
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return nn.Dense(features, use_bias=False, dot_general_cls=dot_general_cls, **dtypes)


def _qwix_dense(features: int, *, tensorwise: bool) -> nn.Module:
    try:
        import qwix
    except ImportError:
        raise NotMeasuredError("qwix is not installed") from None
    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=tensorwise,
    )
    return qwix.quantize_model(_dense(features), qwix.QtProvider([rule]))


def contenders() -> dict[str, Contender]:
    triton = fp8.DelayedScaling(
        accumulation=fp8.Accumulation(forward="default", dgrad="default", wgrad="default")
    )

    recipes = (
        fp8.Float8CurrentScaling(),
        fp8.Float8CurrentScaling(granularity="axiswise"),
        fp8.MXFP8BlockScaling(),
        fp8.Float8BlockScaling(),
    )

    def with_op(what: str, op: Any, **options: Any) -> Contender:
        return Contender(
            what=what, make_layer=partial(_dense, dot_general_cls=partial(op, **options) if options else op)
        )

    return {
        BF16: with_op("lax.dot_general in bfloat16", None),
        FLAX_QDQ: with_op("flax.linen.fp8_ops.Fp8DotGeneralOp, delayed scaling", fp8_ops.Fp8DotGeneralOp),
        FLAX_DIRECT: with_op(
            "flax.linen.fp8_ops.Fp8DirectDotGeneralOp, delayed scaling", fp8_ops.Fp8DirectDotGeneralOp
        ),
        QWIX: Contender(
            what="qwix.QtProvider, e4m3 weight and input, e5m2 gradient, one scale per tensor from the "
            "tensor itself (disable_channelwise_axes=True)",
            make_layer=partial(_qwix_dense, tensorwise=True),
            leading=(1,),
        ),
        QWIX_CHANNEL: Contender(
            what="the same with Qwix's default, one scale per row or column",
            make_layer=partial(_qwix_dense, tensorwise=False),
            leading=(1,),
        ),
        OURS: with_op("fp8flax.Fp8DotGeneralOp as it is (asks for cublasLt)", fp8.Fp8DotGeneralOp),
        OURS_TRITON: with_op(
            'the same with Accumulation("default") for all three GEMMs (XLA\'s own Triton kernels)',
            fp8.Fp8DotGeneralOp,
            recipe=triton,
        ),
        OURS_QDQ: with_op(
            'fp8flax.Fp8DotGeneralOp(form="qdq"): quantize, dequantize, multiply',
            fp8.Fp8DotGeneralOp,
            form="qdq",
        ),
        **{
            name: with_op(f"fp8flax.Fp8DotGeneralOp(recipe={recipe})", fp8.Fp8DotGeneralOp, recipe=recipe)
            for name, recipe in zip(OURS_BY_RECIPE, recipes)
        },
    }


def make_step(layer: nn.Module) -> Step:
    """Returns the function that is measured: output, gradients of the variables and of the input."""

    def step(variables: Any, x: jax.Array, g: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, *vjp(g)

    return step


def specs(
    contender: Contender, shape: Shape
) -> tuple[nn.Module, tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Returns the layer, and shapes and dtypes of the step's arguments."""
    M, K, N = shape
    layer = contender.make_layer(N)
    x, g = (jax.ShapeDtypeStruct((*contender.leading, M, n), jnp.bfloat16) for n in (K, N))
    return layer, (jax.eval_shape(layer.init, jax.random.key(0), x), x, g)


def arguments(contender: Contender, shape: Shape) -> tuple[nn.Module, tuple[Any, jax.Array, jax.Array]]:
    """Returns the layer, and random arguments of the step."""
    layer, (_, x, g) = specs(contender, shape)
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = jax.random.normal(keys[0], x.shape, x.dtype)
    gradient = jax.random.normal(keys[1], g.shape, g.dtype)
    return layer, (jax.jit(layer.init)(keys[2], inputs), inputs, gradient)


def not_measured(part: str, shape: Shape, name: str, reason: str) -> Row:
    return {"part": part, "shape": list(shape), "contender": name, "not_measured": reason}


def elements(shape: Shape) -> int:
    """Returns S, the elements of input, kernel and output together."""
    M, K, N = shape
    return M * K + K * N + M * N


# Part A: what XLA compiles.


def count(name: str, contender: Contender, shape: Shape, target: str) -> Row:
    """Returns the counts of one contender."""
    layer, args = specs(contender, shape)
    report = fp8.audit(make_step(layer), *args, target=target)
    return {
        "part": "counts",
        "shape": list(shape),
        "contender": name,
        "fp8_gemms": report.num_fp8_gemms,
        "maybe_fp8_gemms": sum(gemm.may_be_fp8 for gemm in report.gemms),
        "gemms": report.num_gemms,
        "kernels": report.num_kernels,
        "gemm_bytes": report.gemm_bytes,
        "other_bytes": report.other_bytes,
        "temp_bytes": report.temp_bytes,
        "backends": sorted({gemm.backend for gemm in report.gemms}),
    }


def counts(shapes: Sequence[Shape], target: str) -> list[Row]:
    rows = []
    for shape in shapes:
        for name, contender in contenders().items():
            try:
                rows.append(count(name, contender, shape, target))
            except Exception as error:
                rows.append(not_measured("counts", shape, name, reason_of(error)))
    return rows


# Part B: what tracing, compiling and emulating cost on a CPU.


def threaded(
    step: Any, args: tuple[Any, jax.Array, jax.Array], steps: int = 1, queued: list[float] | None = None
) -> Callable[[], Any]:
    """Returns a function that takes some steps, each with the scaling state that the one before it left.

    It waits after the last only, and returns what that gave. The seconds that the host took until then are
    added to ``queued``.
    """
    variables, x, g = args

    def run() -> Any:
        nonlocal variables
        began = time.perf_counter()
        for _ in range(steps):
            results = step(variables, x, g)
            # The gradients of the other collection are the next scaling state.
            variables = {**results[1], "params": variables["params"]}
        if queued is not None:
            queued.append(time.perf_counter() - began)
        return jax.block_until_ready(results)

    return run


def on_cpu(shape: Shape, rounds: int) -> list[Row]:
    """Returns the times of all contenders on the CPU."""
    entrants = contenders()
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError as error:
        return [not_measured("cpu", shape, name, reason_of(error)) for name in entrants]
    rows: dict[str, Row] = {}
    layers, args = {}, {}
    with jax.default_device(cpu):
        for name, contender in entrants.items():
            try:
                layers[name], args[name] = arguments(contender, shape)
            except Exception as error:
                rows[name] = not_measured("cpu", shape, name, reason_of(error))
            else:
                args[name] = jax.device_put(args[name], cpu)
        steps = {name: lambda layer=layer: jax.jit(make_step(layer)) for name, layer in layers.items()}
        trace_seconds, compile_seconds, compiled = compilations(steps, args, COMPILATIONS)
        runs = {name: threaded(step, args[name]) for name, step in compiled.items()}
        step_seconds = interleaved(runs, rounds)
    figures = {"trace": trace_seconds, "compile": compile_seconds, "step": step_seconds}
    for name in layers:
        rows[name] = {"part": "cpu", "shape": list(shape), "contender": name}
        for figure, values in figures.items():
            rows[name][f"{figure}_seconds"] = summary(values[name])
            rows[name][f"{figure}_ratio_to_bf16"] = ratio(values[name], values[BF16])
    return [rows[name] for name in entrants]


# Part C: what it costs on the GPU.


def repeated_ceiling(precision: Any, steps: int) -> Callable[[Any], Any]:
    """Returns ``steps`` bare FP8 GEMMs, both operands with the contraction last, as one function."""

    def body(carry: Any, _: None) -> tuple[Any, None]:
        # The barrier keeps XLA from moving the GEMM, the same in every step, out of the loop.
        a, b = lax.optimization_barrier(carry[:2])
        out = lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), precision, preferred_element_type=jnp.bfloat16
        )
        return (a, b, out), None

    return lambda carry: lax.scan(body, carry, length=steps)[0]


def initial_ceiling(shape: Shape) -> Any:
    M, K, N = shape
    keys = jax.random.split(jax.random.key(0))
    a, b = (
        jax.random.normal(key, (n, K), jnp.bfloat16).astype(jnp.float8_e4m3fn)
        for key, n in ((keys[0], M), (keys[1], N))
    )
    return a, b, jnp.zeros((M, N), jnp.bfloat16)


def carrying(fun: Callable[[Any], Any], carry: Any) -> Callable[[], None]:
    """Returns a function that runs ``fun``, compiled, on what it returned the last time."""
    compiled = jax.jit(fun, donate_argnums=0).lower(carry).compile()

    def run() -> None:
        nonlocal carry
        carry = jax.block_until_ready(compiled(carry))

    return run


def torch_scaled_mm(shape: Shape, steps: int) -> Callable[[], None]:
    """Returns a function that runs PyTorch's FP8 GEMM ``steps`` times."""
    if importlib.util.find_spec("torch") is None:
        raise NotMeasuredError("torch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise NotMeasuredError("torch has no CUDA")
    M, K, N = shape
    a = torch.randn(M, K, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(N, K, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")

    def run() -> None:
        for _ in range(steps):
            torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        torch.cuda.synchronize()

    return run


def peaks(name: str, shapes: Sequence[Shape], device: Any) -> list[int | None]:
    """Returns the most memory that one step of a contender took in this process, by shape.

    The device does not forget its peak, so shapes should come in the order of their size; None where a peak
    is not known or is hidden by an earlier one.
    """
    result: list[int | None] = []
    highest = 0
    for shape in shapes:
        layer, abstract = specs(contenders()[name], shape)
        # Before the arguments are there: trying out kernels takes memory, too.
        compiled = jax.jit(make_step(layer)).lower(*abstract).compile()
        # All zero: making random numbers takes memory, too.
        args = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        jax.block_until_ready(compiled(*args))
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        result.append(peak if peak > highest else None)
        highest = max(peak, highest)
        del compiled, args
    return result


def peaks_of_fresh_process(name: str, shapes: Sequence[Shape]) -> dict[Shape, int | None]:
    """Returns ``peaks`` of a contender that has a process for itself."""
    ordered = sorted(shapes, key=elements)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dense", "--peaks-of", name, "--shapes", *map(text_of, ordered)],
        cwd=RESULTS.parents[1],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return dict.fromkeys(ordered)
    return dict(zip(ordered, json.loads(done.stdout.splitlines()[-1]), strict=True))


def on_device(shape: Shape, rounds: int, device: Any, steps: int) -> list[Row]:
    """Returns the times of all contenders on the device."""
    M, K, N = shape
    on_gpu = device.platform == "gpu"
    preset = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM if on_gpu else None
    entrants = contenders()

    def prepare(name: str) -> Callable[[], None]:
        if name == CEILING:
            return carrying(repeated_ceiling(preset, steps), initial_ceiling(shape))
        if name == TORCH:
            return torch_scaled_mm(shape, steps)
        layer, args = arguments(entrants[name], shape)
        queued[name] = []
        return threaded(jax.jit(make_step(layer)), args, steps, queued[name])

    names = [*entrants, CEILING, TORCH]
    rows: dict[str, Row] = {}
    queued: dict[str, list[float]] = {}
    runs = {}
    with jax.default_device(device):
        for name in names:
            try:
                runs[name] = prepare(name)
                runs[name]()
            except Exception as error:
                runs.pop(name, None)
                rows[name] = not_measured("gpu", shape, name, reason_of(error))
        seconds = interleaved(runs, rounds) if runs else {}
    for name, values in seconds.items():
        flops = (6 if name in entrants else 2) * M * K * N
        tflops = [1e-12 * flops * steps / s for s in values]
        rows[name] = {
            "part": "gpu",
            "shape": list(shape),
            "contender": name,
            "step_seconds": summary([s / steps for s in values]),
            "queued_seconds": None,
            "tflops": summary(tflops),
            "step_ratio_to_bf16": None,
            "share_of_ceiling": None,
            "peak_bytes": None,
        }
        if name in queued:
            rows[name]["queued_seconds"] = summary([s / steps for s in queued[name][-rounds:]])
        if name in entrants and BF16 in seconds:
            rows[name]["step_ratio_to_bf16"] = ratio(values, seconds[BF16])
        if CEILING in seconds:
            at_ceiling = [1e-12 * 2 * M * K * N * steps / s for s in seconds[CEILING]]
            rows[name]["share_of_ceiling"] = ratio(tflops, at_ceiling)
    return [rows[name] for name in names]


def on_gpu(shapes: Sequence[Shape], rounds: int) -> list[Row]:
    """Returns the times and the memory of all contenders on the GPU, if there is one."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        names = [*contenders(), CEILING, TORCH]
        reason = f"JAX's first device is a {device.platform.upper()}, not a GPU"
        return [not_measured("gpu", shape, name, reason) for shape in shapes for name in names]
    memory = {name: peaks_of_fresh_process(name, shapes) for name in contenders()}
    rows = []
    for shape in shapes:
        for row in on_device(shape, rounds, device, STEPS):
            if "not_measured" not in row and row["contender"] in memory:
                row["peak_bytes"] = memory[row["contender"]][shape]
            rows.append(row)
    return rows


# The report.


def full_machine() -> Row:
    packages = ("jax", "jaxlib", "flax", "qwix", "torch", "jax-cuda13-plugin", "numpy", "ml_dtypes")
    return machine(packages, ("cores", "load_average", "gpu"))


def method(target: str, cpu_shape: Shape, rounds: int) -> list[str]:
    entrants = "; ".join(f"{name} = {contender.what}" for name, contender in contenders().items())
    return [
        "The step: y, vjp = jax.vjp(layer.apply, variables, x); (dvariables, dx) = vjp(g); y, "
        "dvariables and dx are returned. The layer: nn.Dense(N, use_bias=False); kernel, input x (M, K) "
        "and gradient g (M, N) in bfloat16; a shape is written MxKxN. The next scaling state is part of "
        "dvariables (amax histories of 1024); Qwix keeps none.",
        f"Contenders: {entrants}. Qwix gets x as (1, M, K): under jax.vjp it knows a kernel by its "
        "shape, which x may share.",
        f"Part A, counts, compiled by fp8flax.audit for target {target}, nothing is run: FP8 = GEMMs in "
        "FP8 / all GEMMs; kernels; GEMM, other, temp = MiB that the GEMMs move, that all other kernels "
        "move, and of temporaries; bytes / S = the first two for each element of S. Without a device "
        "XLA cannot measure which kernel is best; on one it may choose another backend. '(3 may)': FP8 "
        "operands in Triton kernels whose instructions, in the tile that XLA takes here, are float16's.",
        "Floors, in bytes, with S = MK + KN + MN: GEMMs 6S in bf16 and 4S in FP8 (each of three GEMMs "
        "reads two of the tensors and writes the third in bf16; FP8 operands have 1 byte an element, "
        "bf16 2); the rest 4S for cublasLt (each tensor is read once, 2 bytes, and written as FP8 in "
        "two layouts, 1 + 1) and 3S for kernels that take either layout (written in one).",
        f"Part B, CPU, where FP8 is emulated, at {text_of(cpu_shape)}: trace = jit(step).trace(...), "
        f"compile = .lower().compile(), {COMPILATIONS} interleaved times each with caches cleared before "
        f"each; step = seconds until all is ready, {rounds} rounds after {WARM_UP} of warm-up, in each "
        "round every contender once, in rotated order, with the scaling state of its last step. Median "
        "(min-max); / bf16 = median over the rounds of the ratio to the bf16 layer in the same round.",
        f"Part C, GPU, only if it is JAX's first device: step = seconds until {STEPS} steps, called one "
        f"after the other without waiting, are done, divided by {STEPS}, in rounds as in part B; host = "
        "the same until all are queued: where it comes near the step, the host sets the time and not "
        "the GPU. TFLOP/s = 6MKN / step. ceiling = one bare lax.dot_general of e4m3 operands, both with "
        "the contraction last, precision ANY_F8_ANY_F8_F32_FAST_ACCUM, bfloat16 out, 2MKN operations, "
        f"{STEPS} in one program, in the same rounds. torch = torch._scaled_mm of the same sizes, "
        "forward GEMM only, 2MKN. of ceiling = median over the rounds of TFLOP/s divided by the "
        "ceiling's. peak = peak_bytes_in_use of device.memory_stats() after one step in a process of "
        "its own: arguments, results and temporaries.",
    ]


def mib(size: float | None) -> str:
    return "not measured" if size is None else f"{size / MIB:.1f}"


def per_element(size: int, shape: Shape) -> str:
    return f"{size / elements(shape):.2f}"


def spread(figure: dict[str, float], scale: float = 1.0) -> str:
    median, low, high = (figure[k] * scale for k in ("median", "min", "max"))
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


def median(figure: dict[str, float] | None) -> str:
    return "not measured" if figure is None else f"{figure['median']:.3f}"


def counts_cells(row: Row) -> tuple[str, ...]:
    shape = tuple(row["shape"])
    sizes = [row["gemm_bytes"], row["other_bytes"]]
    return (
        f"{row['fp8_gemms']}/{row['gemms']}"
        + f" ({row['maybe_fp8_gemms']} may)" * bool(row["maybe_fp8_gemms"]),
        str(row["kernels"]),
        *map(mib, sizes),
        "+".join(per_element(size, shape) for size in sizes),
        mib(row["temp_bytes"]),
        ", ".join(row["backends"]),
    )


def cpu_cells(row: Row) -> tuple[str, ...]:
    cells = []
    for figure in ("trace", "compile", "step"):
        cells += [spread(row[f"{figure}_seconds"], 1e3), median(row[f"{figure}_ratio_to_bf16"])]
    return tuple(cells)


def gpu_cells(row: Row) -> tuple[str, ...]:
    return (
        spread(row["step_seconds"], 1e3),
        "not measured" if row["queued_seconds"] is None else spread(row["queued_seconds"], 1e3),
        median(row["step_ratio_to_bf16"]),
        f"{row['tflops']['median']:.1f}",
        median(row["share_of_ceiling"]),
        mib(row["peak_bytes"]),
    )


COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Row], tuple[str, ...]]]] = {
    "counts": (
        ("FP8", "kernels", "GEMM MiB", "other MiB", "bytes / S", "temp MiB", "GEMM backends"),
        counts_cells,
    ),
    "cpu": (
        ("trace ms (min-max)", "/ bf16", "compile ms (min-max)", "/ bf16", "step ms (min-max)", "/ bf16"),
        cpu_cells,
    ),
    "gpu": (
        ("step ms (min-max)", "host ms (min-max)", "/ bf16", "TFLOP/s", "of ceiling", "peak MiB"),
        gpu_cells,
    ),
}


def floor_lines(shape: Shape) -> list[tuple[str, ...]]:
    S = elements(shape)
    floors = (("floor, bf16", 6, 0), ("floor, cublasLt", 4, 4), ("floor, either layout", 4, 3))
    return [
        (text_of(shape), name, "", "", mib(gemm * S), mib(other * S), f"{gemm}+{other}", "", "")
        for name, gemm, other in floors
    ]


def table(part: str, rows: Sequence[Row]) -> str:
    """Returns the rows of one part as text; one line where none was measured, for one reason."""
    reasons = {row.get("not_measured") for row in rows}
    if len(reasons) == 1 and None not in reasons:
        return f"all of part {part}: not measured: {reasons.pop()}"
    header, cells = COLUMNS[part]
    lines: list[tuple[str, ...]] = [("MxKxN", "contender", *header)]
    remarks: dict[int, str] = {}
    for i, row in enumerate(rows):
        shape = tuple(row["shape"])
        start = (text_of(shape), row["contender"])
        if "not_measured" in row:
            remarks[len(lines)] = f"not measured: {row['not_measured']}"
            lines.append((*start, *("" for _ in header)))
        else:
            lines.append((*start, *cells(row)))
        if part == "counts" and (i + 1 == len(rows) or rows[i + 1]["shape"] != row["shape"]):
            lines += floor_lines(shape)
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = []
    for i, line in enumerate(lines):
        padded = [
            cell.ljust(width) if j < 2 or header[j - 2] == "GEMM backends" else cell.rjust(width)
            for j, (cell, width) in enumerate(zip(line, widths))
        ]
        text.append("  ".join([*padded[:2], remarks[i]] if i in remarks else padded).rstrip())
    return "\n".join(text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--target", choices=TARGETS, default="h200", help="of part A (%(default)s)")
    parser.add_argument(
        "--shapes",
        type=parse_shape,
        nargs="+",
        default=list(SHAPES),
        metavar="MxKxN",
        help=f"of parts A and C ({' '.join(map(text_of, SHAPES))})",
    )
    parser.add_argument(
        "--cpu-shape", type=parse_shape, default=(512, 512, 512), metavar="MxKxN", help="of B (512x512x512)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="of parts B and C (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="to write (benchmarks/results/dense_<target>.json)"
    )
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all", help="(%(default)s)")
    parser.add_argument("--peaks-of", choices=[*contenders()], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds must be 1 or more.")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.peaks_of:
        with quiet():
            print(json.dumps(peaks(args.peaks_of, args.shapes, jax.devices()[0])))
        return
    arguments = {
        "target": args.target,
        "shapes": [list(shape) for shape in args.shapes],
        "cpu_shape": list(args.cpu_shape),
        "rounds": args.rounds,
        "part": args.part,
    }
    said = method(args.target, args.cpu_shape, args.rounds)
    report = begin(QUESTION, said, full_machine(), arguments=arguments, rows=[])
    measure: dict[str, Callable[[], list[Row]]] = {
        "counts": lambda: counts(args.shapes, args.target),
        "cpu": lambda: on_cpu(args.cpu_shape, args.rounds),
        "gpu": lambda: on_gpu(args.shapes, args.rounds),
    }
    for part in PARTS if args.part == "all" else (args.part,):
        with quiet():
            rows = measure[part]()
        report["rows"] += rows
        print("\n" + table(part, rows), flush=True)
    path = args.json or RESULTS / f"dense_{args.target}.json"
    write(report, path)


if __name__ == "__main__":
    # The processes that measure memory need some of the GPU's.
    run(main, XLA_PYTHON_CLIENT_PREALLOCATE="false")
