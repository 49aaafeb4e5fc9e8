"""Ops of your own: what a plan and a row of the table of ops are made of.

``docs/extending.md`` adds an op with these names. They may change in any release; a release note says so.
"""

from __future__ import annotations

from typing import Any

import jax

from fp8flax._core.gemm.lowering import lowered
from fp8flax._core.gemm.request import Gemm as Gemm
from fp8flax._core.plans.contraction import Contraction as Contraction
from fp8flax._core.plans.contraction import check_operands as check_operands
from fp8flax._core.plans.modes import contract as contract
from fp8flax._core.plans.plan import Operand as Operand
from fp8flax._core.plans.row import GemmSizes as GemmSizes
from fp8flax._core.plans.row import OpRow as OpRow
from fp8flax._core.plans.row import register as register
from fp8flax._linen.op import Fp8Op as LinenOp
from fp8flax.nnx.ops import Fp8Op as NnxOp

__all__ = [
    "Contraction",
    "Gemm",
    "GemmSizes",
    "OpRow",
    "Operand",
    "check_operands",
    "contract",
    "linen_op",
    "multiply",
    "nnx_op",
    "register",
]


def linen_op(row: OpRow) -> type[LinenOp]:
    """Returns the Linen op of a row of the table; the same class at each call."""
    return LinenOp._for_row(row)


def nnx_op(row: OpRow) -> type[NnxOp]:
    """Returns the NNX op of a row of the table; the same class at each call.

    Raises:
        ValueError: the row has stacked roles. Its class needs an ``__init__`` that takes the size of the
            stack, as ``Fp8RaggedDotOp`` has, which a row does not describe.
    """
    return NnxOp._for_row(row)


def multiply(gemm: Gemm, lhs: Any, rhs: Any) -> jax.Array:
    """Returns the result of one GEMM.

    XLA or one of the package's GPU kernels computes it. It runs in FP8 if both operands are quantized and
    the device has FP8 units.

    Args:
        gemm: the request, see ``Contraction.gemm``.
        lhs: the left operand, a ``QTensor`` or a wide array.
        rhs: the right operand, a ``QTensor`` or a wide array.
    """
    return lowered(gemm, lhs, rhs)
