"""The Linen ops, and ``Einsum``, a layer that takes an op."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8flax._core.formats import Format
from fp8flax._core.plans.calls import ConvCall, DotGeneralCall, EinsumCall, RaggedDotCall
from fp8flax._core.plans.einsum import einsum_with
from fp8flax._core.plans.ops import CONV, DOT_GENERAL, EINSUM, RAGGED_DOT
from fp8flax._core.recipes import DelayedScaling
from fp8flax._linen.op import Fp8Op

if TYPE_CHECKING:
    from jaxtyping import Float


class Fp8DotGeneralOp(DotGeneralCall, Fp8Op):
    """FP8 matmul for Linen layers, called like ``lax.dot_general``.

    Give the class to a layer: ``nn.Dense(..., dot_general_cls=fp8flax.Fp8DotGeneralOp)``.
    ``nn.DenseGeneral`` has the same field; ``nn.MultiHeadDotProductAttention`` has ``qkv_dot_general_cls``
    and ``out_dot_general_cls``. You can also call the op in a module of your own; several calls of one op
    share its state.

    {state}

    The variables are in the collection ``_overwrite_with_gradient``.

    Attributes:
        {options}

    Raises:
        {errors}

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> sorted(variables["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"])[:2]
        ['input_amax_history', 'input_scale']

    Source: ``flax.linen.fp8_ops``, whose variables it shares; Micikevicius et al., 2022, arXiv:2209.05433.
    """

    row = DOT_GENERAL


class Fp8DirectDotGeneralOp(Fp8DotGeneralOp):
    """``Fp8DotGeneralOp`` under the name of Flax's newer op, so that its checkpoints fit.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(8, dot_general_cls=fp8.Fp8DirectDotGeneralOp)
        >>> list(layer.init(jax.random.key(0), jnp.ones((2, 4)))["_overwrite_with_gradient"])
        ['Fp8DirectDotGeneralOp_0']

    Source: ``flax.linen.fp8_ops.Fp8DirectDotGeneralOp``.
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

    Source: ``flax.linen.fp8_ops.NANOOFp8DotGeneralOp``.
    """

    default_recipe = DelayedScaling(fp8_format=Format.HYBRID_FNUZ)


class Fp8Einsum(EinsumCall, Fp8Op):
    """FP8 einsum of two operands, with the scaling state of ``Fp8DotGeneralOp``.

    {operands}

    Attributes:
        {options}

    Raises:
        {errors}

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> op, x, w = fp8.Fp8Einsum(), jnp.ones((2, 3)), jnp.ones((3, 4))
        >>> variables = op.init(jax.random.key(0), "ab,bc->ca", x, w)
        >>> op.apply(variables, "ab,bc->ca", x, w).shape
        (4, 2)

    {source}
    """

    row = EINSUM


class Fp8ConvGeneralDilatedOp(ConvCall, Fp8Op):
    """FP8 convolution for Linen layers, called like ``lax.conv_general_dilated``.

    Give the class to a layer: ``nn.Conv(..., conv_general_dilated_cls=fp8flax.Fp8ConvGeneralDilatedOp)``.
    You can also call the op in a module of your own.

    {computation}

    Attributes:
        {options}

    Raises:
        {errors}

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Conv(8, (4, 4), (4, 4), conv_general_dilated_cls=fp8.Fp8ConvGeneralDilatedOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 16, 16, 3)))
        >>> list(variables["_overwrite_with_gradient"])
        ['Fp8ConvGeneralDilatedOp_0']

    {source}
    """

    row = CONV


class Fp8RaggedDotOp(RaggedDotCall, Fp8Op):
    """FP8 matmul of a mixture of experts, called like ``lax.ragged_dot``.

    {computation}

    Attributes:
        {options}

    Raises:
        {errors}

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> op, x, kernels = fp8.Fp8RaggedDotOp(), jnp.ones((6, 4)), jnp.ones((2, 4, 8))
        >>> variables = jax.eval_shape(op.init, jax.random.key(0), x, kernels, jnp.array([4, 2]))
        >>> variables["_overwrite_with_gradient"]["kernel_scale"].shape
        (2, 1)

    {source}
    """

    row = RAGGED_DOT


class Einsum(nn.Einsum):
    """``nn.Einsum`` with the field ``dot_general_cls``, as Flax's other linear layers have it.

    Fields, variables, initial values and results are those of ``nn.Einsum``, except that an index may not
    occur twice within one operand, and that dimensions of size 1 are not broadcast. The contraction is
    computed by ``dot_general_cls()``, with the layer's input as the input and its kernel as the kernel.

    Attributes:
        dot_general_cls: a callable that makes the op, such as ``Fp8DotGeneralOp``; None for
            ``lax.dot_general``.

    Raises:
        ValueError: the equation is not explicit, or it does not have two operands that fit.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = fp8.Einsum((3, 4), "ab,bc->ac", dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 3)))[0].shape
        (2, 4)

    Source: ``flax.linen.Einsum``.
    """

    dot_general_cls: Callable[[], Callable[..., jax.Array]] | None = None

    @nn.compact
    def __call__(
        self, inputs: Float[jax.Array, "*input"], einsum_str: str | None = None
    ) -> Float[jax.Array, "*output"]:
        """Contracts the input with the kernel, and adds the bias; see the class."""
        eqn = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in eqn or eqn.count(",") != 1:
            raise ValueError(
                f"einsum_str must be explicit ('->') and have exactly two operands; got {eqn!r}."
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            bias_shape, broadcast_shape = self._get_bias_shape(eqn, inputs, kernel)
            bias = self.param("bias", self.bias_init, bias_shape, self.param_dtype)
        lhs, rhs, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert lhs is not None  # only the bias may be None
        assert rhs is not None
        dot_general = jax.lax.dot_general
        if self.dot_general_cls is not None:
            dot_general = self.dot_general_cls()
        y = einsum_with(dot_general, eqn, lhs, rhs, self.precision, self.preferred_element_type)
        return y if bias is None else y + jnp.reshape(bias, broadcast_shape)
