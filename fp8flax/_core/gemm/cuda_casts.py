"""The ways in which NVIDIA GPUs quantize with a scale per block: one GPU kernel for both GEMMs of a tensor.

The table in ``lowering`` says which of these functions runs for which request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fp8flax._core.gemm.kernels.block_gemm import BLOCK
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.gemm.kernels.on_shards import quantize_on_shards
from fp8flax._core.gemm.request import CastPair
from fp8flax._core.qtensor import QTensor


def block_pair(
    request: CastPair, x: jax.Array, delayed_scale: None, *, on_shards: bool = False
) -> tuple[QTensor, QTensor]:
    """Quantizes a tensor for both of its GEMMs, in blocks along either dimension.

    With ``on_shards`` each of several devices quantizes its part of the tensor.
    """
    del delayed_scale
    quantizer: Any = request.first
    is_square = quantizer.block[0] == BLOCK
    kernel: Callable[..., Any] = partial(
        block_quantize,
        dtype=quantizer.dtype,
        is_square=is_square,
        power_2=quantizer.scale == "power_of_two",
        inf_is_nan=request.inf_is_nan,
    )
    if on_shards:
        kernel = quantize_on_shards(kernel, is_square=is_square)
    views = request.view, request.other_view
    # The kernel takes the matrix of the GEMM whose view keeps the order of the tensor's dimensions.
    is_first = list(request.view.order) == sorted(request.view.order)
    made = kernel(views[0 if is_first else 1].to_matrix(x))
    one, other = (QTensor(codes, scale, quantizer) for codes, scale in made)
    if on_shards and is_square:  # one set of codes, see ``gemm_on_shards``
        other = quantizer.transpose(one)
    return (one, other) if is_first else (other, one)


block_pair_on_shards = partial(block_pair, on_shards=True)
