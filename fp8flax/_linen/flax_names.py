"""The Linen ops of ``flax.linen.fp8_ops`` that are ``Fp8DotGeneralOp`` under other names."""

from __future__ import annotations

from fp8flax._core.formats import Format
from fp8flax._core.recipes import DelayedScaling
from fp8flax._linen.ops import Fp8DotGeneralOp


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
