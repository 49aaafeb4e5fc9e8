"""How many bytes do four H200s (B200s for NVFP4) send to each other for one layer, by recipe and layout?

Run ``make bench-collectives``; no GPU is needed.

The layer is a matmul MxKxN of bf16 arrays, forward and backward: the program returns the result, both
gradients and the next scaling state. The M rows are 4 sequences: the input has the shape
(batch, sequence, features). Experts: a ragged dot of M rows with 8 experts of KxN.

sent = bytes that each GPU sends, in MiB, read from the program that XLA compiles. An all-gather sends
R (n - 1) / n for a result of R bytes on n GPUs. A reduce-scatter or an all-to-all sends O (n - 1) / n for
an operand of O bytes. An all-reduce sends twice that, and a collective-permute sends O. The table has the
bytes of each recipe divided by those of the same program in bf16.

backward = a program that returns the gradients only. XLA drops the forward matmul.

The layouts split arrays over the four GPUs in one dimension. FSDP = batch of input and result, rows of the
kernel. tensor, columns = columns of kernel and result. tensor, rows = features of the input, rows of the
kernel. sequence, columns = sequence of the input, columns of kernel and result. sequence, rows = features
of the input, rows of the kernel, sequence of the result. experts = rows of input and result; each GPU has
two experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Columns, Row, Shape

GPUS, BATCH, EXPERTS = 4, 4, 8
OPTIONS: dict[str, Any] = {"shape": (4096, 1024, 2048)}
RECIPES: dict[str, Any] = {
    "bf16": None,
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "128-blocks": fp8.Float8BlockScaling(),
    "MXFP8": fp8.MXFP8BlockScaling(),
    "NVFP4": fp8.NVFP4BlockScaling(),
}


class Layout(NamedTuple):
    """How the arrays are split over the axis ``gpus``; the output gradient is split as the result."""

    input: P
    kernel: P
    result: P


FIRST, SEQUENCE, LAST = P("gpus"), P(None, "gpus"), P(None, None, "gpus")
COLUMNS_OF_KERNEL = P(None, "gpus")
LAYOUTS = {
    "FSDP": Layout(FIRST, FIRST, FIRST),
    "tensor, columns": Layout(P(), COLUMNS_OF_KERNEL, LAST),
    "tensor, rows": Layout(LAST, FIRST, P()),
    "sequence, columns": Layout(SEQUENCE, COLUMNS_OF_KERNEL, LAST),
    "sequence, rows": Layout(LAST, FIRST, SEQUENCE),
    "experts": Layout(FIRST, FIRST, FIRST),
}


def bytes_sent(
    recipe: str, layout: str, shape: Shape, is_backward: bool, gpu: str = "h200"
) -> dict[str, int]:
    """Returns the bytes that each GPU sends, by collective operation."""
    m, k, n = shape
    is_ragged = layout == "experts"
    mesh = Mesh(np.array(fp8.compile_only_devices(gpu, GPUS)), ("gpus",), axis_types=(AxisType.Auto,))
    places = [NamedSharding(mesh, spec) for spec in LAYOUTS[layout]]
    rows, kernels = ((m,), (EXPERTS, k, n)) if is_ragged else ((BATCH, m // BATCH), (k, n))
    shapes = (*rows, k), kernels, (*rows, n)
    x, w, g = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s, place in zip(shapes, places))
    last: Any = jnp.full(EXPERTS, m // EXPERTS, jnp.int32) if is_ragged else (((2,), (0,)), ((), ()))
    state: Any = {}
    multiply: Any = lax.ragged_dot if is_ragged else lax.dot_general
    op: Any = None
    if recipe != "bf16":
        op = (fp8.Fp8RaggedDotOp if is_ragged else fp8.Fp8DotGeneralOp)(recipe=RECIPES[recipe])
        state = jax.eval_shape(lambda x, w: op.init({}, x, w, last), x, w)
    whole = NamedSharding(mesh, P())
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), state)

    def step(state: Any, x: Any, w: Any, g: Any) -> tuple[Any, ...]:
        def layer(state: Any, x: Any, w: Any) -> Any:
            rngs = {"fp8": jax.random.key(0)}
            return multiply(x, w, last) if op is None else op.apply(state, x, w, last, rngs=rngs)

        out, vjp = jax.vjp(layer, state, x, w)
        return vjp(g) if is_backward else (out, *vjp(g))

    outputs = jax.tree.map(lambda _: whole, state), places[0], places[1]
    jitted = jax.jit(step, out_shardings=outputs if is_backward else (places[2], *outputs))
    return fp8.audit(jitted, state, x, w, g, target=mesh).bytes_sent_by


def measure(shape: Shape) -> Row:
    rows = []
    for layout, recipe in itertools.product(LAYOUTS, RECIPES):
        is_nvfp4 = recipe == "NVFP4"
        gpu, is_refused = "b200" if is_nvfp4 else "h200", is_nvfp4 and layout == "experts"
        step, backward = (
            {} if is_refused else bytes_sent(recipe, layout, shape, part, gpu) for part in (False, True)
        )
        rows.append({"layout": layout, "recipe": recipe, "step": step, "backward": backward})
        print(".", end="", flush=True)
    return {"rows": rows}


COLUMNS: Columns = {
    "layout": common.word("layout"),
    "bf16, MiB": common.figure("bf16", ".1f", 2**-20),
    **{recipe: common.figure(recipe, ".2f") for recipe in RECIPES if recipe != "bf16"},
}


def beside_bf16(report: Row, name: str) -> list[Row]:
    """Returns for each layout the bytes in bf16, and those of each recipe divided by them.

    ``name`` is ``"step"`` or ``"backward"``.
    """
    sent = {(row["layout"], row["recipe"]): sum(row[name].values()) for row in report["rows"]}
    rows = []
    for layout in LAYOUTS:
        wide = sent[layout, "bf16"]
        ratios = {recipe: sent[layout, recipe] / wide if wide else None for recipe in RECIPES}
        ratios = {recipe: ratio or None for recipe, ratio in ratios.items()}
        rows.append({"layout": layout, **ratios, "bf16": wide})
    return rows


def table(report: Row) -> str:
    names = ("step", "backward")
    return "\n\n".join(
        f"{name}\n{common.text_table(COLUMNS, beside_bf16(report, name), 1)}" for name in names
    )


def main(argv: Sequence[str] | None = None) -> None:
    common.command(__doc__, "collectives", measure, table, argv, options=OPTIONS)


if __name__ == "__main__":
    main()
