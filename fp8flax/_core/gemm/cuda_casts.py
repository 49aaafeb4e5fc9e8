"""The ways in which NVIDIA GPUs quantize a tensor with a scale per block, for both GEMMs that it enters.

The table in ``lowering`` says which of these functions runs for which request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.gemm.kernels.on_shards import quantize_on_shards
from fp8flax._core.gemm.request import CastPair, behind_barrier
from fp8flax._core.names import BLOCK_QUANTIZE
from fp8flax._core.qtensor import BLOCK, QTensor, View
from fp8flax._core.quantize import inf_to_nan


def block_pair(request: CastPair, x: jax.Array, delayed_scale: None) -> tuple[QTensor, QTensor]:
    """Quantizes a tensor for both of its GEMMs, in blocks along either dimension."""
    del delayed_scale
    view, _, is_first = _in_order(request)
    made = _kernel(request)(view.to_matrix(x))
    pair = behind_barrier(request, *(QTensor(codes, scale, request.first) for codes, scale in made))
    return pair if is_first else pair[::-1]


def block_pair_on_shards(request: CastPair, x: jax.Array, delayed_scale: None) -> tuple[QTensor, QTensor]:
    """Quantizes as ``block_pair``; each of several devices quantizes its part of the tensor."""
    del delayed_scale
    return _on_shards(request, _kernel(request), x, BLOCK_QUANTIZE)


def reference_pair_on_shards(
    request: CastPair, x: jax.Array, delayed_scale: None
) -> tuple[QTensor, QTensor]:
    """Quantizes as ``CastPair.reference``; each of several devices quantizes its part of the tensor.

    XLA alone would gather a tensor with a split dimension that is flattened behind another one.
    """
    del delayed_scale
    quantizer: Any = request.first

    def kernel(matrix: jax.Array) -> Any:
        values = inf_to_nan(matrix) if request.inf_is_nan else matrix
        pair = (quantizer.quantize(values, View(matrix.shape, (axis,), (0,))) for axis in (2, 1))
        return tuple((q.codes, q.scale) for q in pair)

    return _on_shards(request, kernel, x, "")


def _kernel(request: CastPair) -> Callable[..., Any]:
    """Returns ``block_quantize`` with the options of the request."""
    quantizer: Any = request.first
    return partial(
        block_quantize,
        dtype=quantizer.dtype,
        is_square=quantizer.block[0] == BLOCK,
        power_2=quantizer.scale == "power_of_two",
        inf_is_nan=request.inf_is_nan,
    )


def _in_order(request: CastPair) -> tuple[View, View, bool]:
    """Returns the view that keeps the order of the tensor's dimensions, and the other view.

    The third result is whether the first view keeps the order.
    """
    views, order = (request.first_view, request.second_view), request.first_view.order
    is_first = list(order) == sorted(order)
    return (*views, True) if is_first else (*views[::-1], False)


def _on_shards(
    request: CastPair, kernel: Callable[..., Any], x: jax.Array, name: str
) -> tuple[QTensor, QTensor]:
    """Quantizes the part of each device by ``kernel``, which runs in the scope ``name``."""
    quantizer: Any = request.first
    view, other_view, is_first = _in_order(request)
    # The dimensions of the tensor that form the rows of ``view``, which are the columns of ``other_view``,
    # and its columns. Devices may split each of them. Columns that the quantizer cannot separate are one.
    rows, columns = (
        v.sizes(v.contract) if quantizer.ranks(v)[1] == len(v.contract) else v.matrix_shape[2:]
        for v in (other_view, view)
    )
    ranks = len(rows), len(columns)
    whole = [n % quantizer.block[1] == 0 for n in view.matrix_shape[1:]]
    run = quantize_on_shards(
        kernel, block=quantizer.block, ranks=ranks, are_whole=(whole[0], whole[1]), name=name
    )
    made = run(x.reshape(view.matrix_shape[0], *rows, *columns))
    one, other = (QTensor(codes, scale, quantizer) for codes, scale in made)
    if quantizer.serves(quantizer, view):
        # Square blocks: one set of codes serves both GEMMs, see ``gemm_on_shards``. The other is dropped.
        one = quantizer.flat(one, view)
        pair = behind_barrier(request, one, quantizer.transpose(one))
    else:
        one, other = behind_barrier(request, one, other)
        pair = quantizer.flat(one, view), quantizer.flat(other, other_view)
    return pair if is_first else pair[::-1]
