"""What does XLA make of one nn.Dense, forward and backward, in FP8: GEMMs, kernels and bytes?

Run ``make bench-dense``. ``benchmarks/gpu.py`` times the same layers.

The step: y, vjp = jax.vjp(layer.apply, variables, x); (dvariables, dx) = vjp(g); y, dvariables and dx are
returned. The layer: nn.Dense(N, use_bias=False); kernel, input x (M, K) and gradient g (M, N) in
bfloat16; a shape is written MxKxN. The next scaling state is part of dvariables (amax histories of 1024);
Qwix keeps none. Qwix gets x as (1, M, K): under jax.vjp it knows a kernel by its shape, which x may
share.

Compiled by fp8flax.audit for a GPU, by default an H200; nothing is run. FP8 = GEMMs in FP8 / all GEMMs;
kernels; GEMM, other, temp = MiB that the GEMMs move, that all other kernels move, and of temporaries.
Without a device XLA cannot measure which kernel is best; on one it may choose another backend. '(3 may)':
FP8 operands in Triton kernels, whose tile decides whether the FP8 units multiply them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

import fp8flax as fp8
from benchmarks import common
from benchmarks.common import Columns, Row, Shape

OPTIONS: dict[str, Any] = {
    "target": "h200",
    "shapes": (
        (8192, 4096, 4096),
        (4096, 4096, 16384),
        (4096, 1024, 4096),
        (2048, 2048, 2048),
        (8192, 8192, 8192),
        (16384, 4096, 14336),
    ),
}
PACKAGES = ("jax", "jaxlib", "flax", "qwix", "jax-cuda13-plugin", "numpy", "ml_dtypes")


class Contender(NamedTuple):
    """A way to make the layer."""

    what: str
    make_layer: Callable[[int], nn.Module]
    """Takes the number of features."""
    leading: tuple[int, ...] = ()
    """Axes of size 1 before M, in input, output and their gradients."""


def _dense(features: int, dot_general_cls: Any = None) -> nn.Module:
    dtypes: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    return nn.Dense(features, use_bias=False, dot_general_cls=dot_general_cls, **dtypes)


def with_qwix(model: nn.Module, *, tensorwise: bool) -> nn.Module:
    """Returns a model whose matmuls Qwix quantizes: e4m3, and e5m2 for gradients."""
    import qwix

    rule = qwix.QtRule(
        module_path=".*",
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=tensorwise,
    )
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


def _with_op(what: str, op: Any, **options: Any) -> Contender:
    chosen = partial(op, **options) if options else op
    return Contender(what=what, make_layer=partial(_dense, dot_general_cls=chosen))


def _with_qwix(what: str, *, tensorwise: bool) -> Contender:
    return Contender(what, lambda features: with_qwix(_dense(features), tensorwise=tensorwise), (1,))


def _with_recipe(recipe: fp8.Recipe) -> Contender:
    return _with_op(f"fp8flax.Fp8DotGeneralOp(recipe={recipe})", fp8.Fp8DotGeneralOp, recipe=recipe)


CONTENDERS = {
    "bf16": _with_op("lax.dot_general in bfloat16", None),
    "flax-qdq": _with_op("flax.linen.fp8_ops.Fp8DotGeneralOp, delayed scaling", fp8_ops.Fp8DotGeneralOp),
    "flax-direct": _with_op(
        "flax.linen.fp8_ops.Fp8DirectDotGeneralOp, delayed scaling", fp8_ops.Fp8DirectDotGeneralOp
    ),
    "qwix": _with_qwix(
        "qwix.QtProvider, e4m3 weight and input, e5m2 gradient, one scale per tensor from the tensor "
        "itself (disable_channelwise_axes=True)",
        tensorwise=True,
    ),
    "qwix-channel": _with_qwix(
        "the same with Qwix's default, one scale per row or column", tensorwise=False
    ),
    "fp8flax": _with_op("fp8flax.Fp8DotGeneralOp as it is (asks for cublasLt)", fp8.Fp8DotGeneralOp),
    "fp8flax-triton": _with_op(
        'the same with accumulation "default" for all three GEMMs (XLA\'s own Triton kernels)',
        fp8.Fp8DotGeneralOp,
        recipe=fp8.DelayedScaling(accumulation=("default", "default", "default")),
    ),
    "fp8flax-qdq": _with_op(
        'fp8flax.Fp8DotGeneralOp(form="qdq"): quantize, dequantize, multiply',
        fp8.Fp8DotGeneralOp,
        form="qdq",
    ),
    "fp8flax-current": _with_recipe(fp8.Float8CurrentScaling()),
    "fp8flax-axiswise": _with_recipe(fp8.Float8CurrentScaling(granularity="axiswise")),
    "fp8flax-mxfp8": _with_recipe(fp8.MXFP8BlockScaling()),
    "fp8flax-block128": _with_recipe(fp8.Float8BlockScaling()),
}


def specs(
    contender: Contender, shape: Shape
) -> tuple[nn.Module, tuple[Any, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Returns the layer, and shapes and dtypes of the step's arguments."""
    M, K, N = shape
    layer = contender.make_layer(N)
    x, g = (jax.ShapeDtypeStruct((*contender.leading, M, n), jnp.bfloat16) for n in (K, N))
    return layer, (jax.eval_shape(layer.init, jax.random.key(0), x), x, g)


def count(name: str, shape: Shape, target: str) -> Row:
    """Returns the counts of one contender, or why there are none."""
    row = {"shape": list(shape), "contender": name}
    try:
        layer, args = specs(CONTENDERS[name], shape)
        report = fp8.audit(common.make_step(layer.apply), *args, target=target)
    except Exception as error:
        return {**row, "not_measured": common.reason_of(error)}
    backends = sorted({gemm.backend for gemm in report.gemms})
    return {**row, **common.counts_of(report), "backends": backends}


def measure(target: str, shapes: Sequence[Shape]) -> Row:
    return {"rows": [count(name, shape, target) for shape in shapes for name in CONTENDERS]}


# The report.


def _fp8_gemms(row: Row) -> str:
    if "gemms" not in row:
        return ""
    may = f" ({row['maybe_fp8_gemms']} may)" if row["maybe_fp8_gemms"] else ""
    return f"{row['fp8_gemms']}/{row['gemms']}{may}"


def _backends(row: Row) -> str:
    return ", ".join(row["backends"]) if "backends" in row else f"not measured: {row['not_measured']}"


COLUMNS: Columns = {
    "MxKxN": lambda row: common.text_of(row["shape"]),
    "contender": common.word("contender"),
    "GEMM backends": _backends,
    "FP8": _fp8_gemms,
    "kernels": common.figure("kernels", ".0f"),
    "GEMM MiB": common.figure("gemm_bytes", ".1f", 2**-20),
    "other MiB": common.figure("other_bytes", ".1f", 2**-20),
    "temp MiB": common.figure("temp_bytes", ".1f", 2**-20),
}


def table(report: Row) -> str:
    return common.text_table(COLUMNS, report["rows"], 3)


METHOD = (
    "Contenders: " + "; ".join(f"{name} = {entrant.what}" for name, entrant in CONTENDERS.items()) + "."
)


def main(argv: Sequence[str] | None = None) -> None:
    common.command(
        __doc__, "dense_h200", measure, table, argv, options=OPTIONS, method=[METHOD], packages=PACKAGES
    )


if __name__ == "__main__":
    main()
