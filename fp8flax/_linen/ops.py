"""The Linen ops."""

from __future__ import annotations

from typing import Any

from fp8flax._core.formats import Format
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Form, Op
from fp8flax._core.ops.ragged_dot import RaggedDot
from fp8flax._core.recipes import DelayedScaling
from fp8flax._linen.op import Fp8Op, called


class Fp8DotGeneralOp(Fp8Op):
    """FP8 matmul for Linen layers, called like ``lax.dot_general``.

    Give the class to a layer: ``nn.Dense(..., dot_general_cls=fp8flax.Fp8DotGeneralOp)``.
    ``nn.DenseGeneral`` has the same field; ``nn.MultiHeadDotProductAttention`` has ``qkv_dot_general_cls``
    and ``out_dot_general_cls``. You can also call the op in a module of your own; several calls of one op
    share its state.

    Delayed scaling is the default. Its state is float32 variables in the collection
    ``_overwrite_with_gradient``: ``{input,kernel,output_grad}_scale`` of shape ``(1,)`` and
    ``{…}_amax_history`` of shape ``(amax_history_len,)``. The gradient of each variable is its next value:
    the scale that this step used, and the history with this step's amax at index 0. The next step computes
    its scale from that history. Other recipes have no state. Under ``autocast(enabled=False)`` the op is
    ``lax.dot_general``.

    Attributes:
        recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
            ``DelayedScaling()`` outside of it.
        form: ``"direct"`` multiplies FP8 operands, on the FP8 units of GPUs that have them. ``"qdq"`` is
            ``in_qdq`` of both operands, a matmul in their dtype, and ``out_qdq``, as in Flax. It requires
            ``DelayedScaling``, serves as a reference, can be differentiated twice, and is never faster.

    Raises:
        MissingStateError: the recipe in use needs scaling state that is missing, because a Linen layer was
            applied to variables without it, or an NNX op was made under a recipe without state.
        TypeError: an operand is not bfloat16, float16, float32 or float64, or the state is not float32.
        ValueError: the history in the state has another length than the recipe says, or ``form="qdq"`` is
            used with another recipe than ``DelayedScaling``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> sorted(variables["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"])[:2]
        ['input_amax_history', 'input_scale']

    Source: ``flax.linen.fp8_ops``, whose variables it shares; Micikevicius et al., 2022, arXiv:2209.05433.
    """

    op_type = DotGeneral
    form: Form = "direct"
    __call__ = called(DotGeneral)


class Fp8Einsum(Fp8Op):
    """FP8 einsum of two operands, with the scaling state of ``Fp8DotGeneralOp``.

    The first operand is the input and the second is the kernel, in any order of the result's indices. The
    attributes ``recipe`` and ``form`` are those of ``Fp8DotGeneralOp``.

    Raises:
        TypeError: ``eqn`` is not a string, or an operand is not an array; also as in ``Fp8DotGeneralOp``.
        ValueError: the equation does not fit the operands; also as in ``Fp8DotGeneralOp``.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> op, x, w = fp8.Fp8Einsum(), jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> variables = op.init(jax.random.key(0), "ab,bc->ca", x, w)
        >>> op.apply(variables, "ab,bc->ca", x, w).shape
        (4, 2)

    Source: ``flax.linen.fp8_ops.Fp8Einsum``.
    """

    op_type = Einsum
    form: Form = "direct"
    __call__ = called(Einsum)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """FP8 convolution for Linen layers, called like ``lax.conv_general_dilated``.

    Give the class to a layer: ``nn.Conv(..., conv_general_dilated_cls=fp8flax.Fp8ConvGeneralDilatedOp)``.
    The attribute ``recipe``, the scaling state, and ``autocast(enabled=False)``, are as in
    ``Fp8DotGeneralOp``.

    Some convolutions are matmuls: their windows do not overlap, they have no groups, and their input is not
    dilated. Examples are 1×1 kernels and the patch embedding of a vision transformer. The op computes them
    as ``Fp8DotGeneralOp`` does, under every recipe.

    In all other convolutions the input, the kernel and the output gradient are cast to FP8 and back. JAX
    convolves them in the dtype of the operands, on every device, because XLA has no gradients of
    convolutions in FP8. Such a convolution has the values of FP8, but the speed and the memory of the
    operands' dtype. It needs a recipe with one scale per tensor, the same in all products
    (``DelayedScaling``, ``Float8CurrentScaling``).

    Raises:
        ValueError: the convolution is not a matmul and the recipe has several scales, or several
            quantizers, per tensor. Other errors are those of ``Fp8DotGeneralOp``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Conv(8, (4, 4), (4, 4), conv_general_dilated_cls=fp8.Fp8ConvGeneralDilatedOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 16, 16, 3)))
        >>> list(variables["_overwrite_with_gradient"])
        ['Fp8ConvGeneralDilatedOp_0']

    Source: ``lax.conv_general_dilated``; recipes of Micikevicius et al., 2022, arXiv:2209.05433.
    """

    op_type = Conv
    __call__ = called(Conv)


class Fp8RaggedDotOp(Fp8Op):
    """FP8 matmul of a mixture of experts, called like ``lax.ragged_dot``.

    ``out[m] = lhs[m] . rhs[e]``, where ``e`` is the expert of row ``m``: the first ``group_sizes[0]`` rows
    belong to expert 0, and so on. Rows beyond ``sum(group_sizes)`` give zeros and have no effect on any
    scale, whatever they hold.

    The scaling state is that of ``Fp8DotGeneralOp``, except that each expert's kernel has its own scale and
    amax history. ``kernel_scale`` has shape ``(experts, 1)`` and ``kernel_amax_history`` has shape
    ``(experts, amax_history_len)``. The input and the output gradient have one scale each.

    The attribute ``recipe`` is as in ``Fp8DotGeneralOp``. Values with scales per block are multiplied in a
    wide dtype, except 128-blocks on Hopper.

    Raises:
        ValueError: the shapes, or the state and the number of experts, do not fit. Other errors are those
            of ``Fp8DotGeneralOp``.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> op, x, kernels = fp8.Fp8RaggedDotOp(), jnp.ones((6, 4)), jnp.ones((2, 4, 8))
        >>> variables = jax.eval_shape(op.init, jax.random.key(0), x, kernels, jnp.array([4, 2]))
        >>> variables["_overwrite_with_gradient"]["kernel_scale"].shape
        (2, 1)

    Source: ``jax.lax.ragged_dot``; the state of ``flax.linen.fp8_ops``, per expert.
    """

    op_type = RaggedDot
    __call__ = called(RaggedDot)


OPS: dict[type[Op], type[Fp8Op]] = {
    op.op_type: op for op in (Fp8DotGeneralOp, Fp8Einsum, Fp8ConvGeneralDilatedOp, Fp8RaggedDotOp)
}
"""The ops by their descriptions: the table of all ops, which conversion and reports read."""


def op_type_of(primitive: Any) -> type[Op] | None:
    """Returns the description of the op that computes a JAX primitive, or None."""
    return next((op_type for op_type in OPS if op_type.primitive == primitive.name), None)


# Those of ``flax.linen.fp8_ops`` that are ``Fp8DotGeneralOp`` under other names.


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """``Fp8DotGeneralOp`` under the name of Flax's newer op, so that its checkpoints fit.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(8, dot_general_cls=fp8.Fp8DirectDotGeneralOp)
        >>> list(layer.init(jax.random.key(0), jnp.ones((2, 4)))["_overwrite_with_gradient"])
        ['Fp8DirectDotGeneralOp_0']
    """


Fp8DotGeneral = Fp8DirectDotGeneralOp
"""``Fp8DirectDotGeneralOp`` under its name in the Flax FP8 guide."""


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """``Fp8DotGeneralOp`` whose default recipe has the FNUZ formats of AMD MI300.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(8, dot_general_cls=fp8.NANOOFp8DotGeneralOp)
        >>> list(layer.init(jax.random.key(0), jnp.ones((2, 4)))["_overwrite_with_gradient"])
        ['NANOOFp8DotGeneralOp_0']
    """

    default_recipe = DelayedScaling(fp8_format=Format.HYBRID_FNUZ)
