"""The arithmetic of NVFP4: its two scales, the rotation of its operands, and stochastic rounding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8flax._core.axes import manual_axes
from fp8flax._core.qtensor import join_blocks, padded, round_up, split_blocks
from fp8flax._core.quantize import quotient
from fp8flax._core.scaling import finite_amax, is_usable
from fp8flax._core.shapes import Float, Float32, UInt8

GROUP = 16
"""The number of contracted elements that share a scale, and that a rotation mixes."""

_E2M1_MAX, _E4M3_MAX = np.float32(6), np.float32(448)
_LARGEST = np.finfo(np.float32).max
_LARGEST_ENCODING = np.float32(2.0**117)
"""The largest factor before the cast, for an amax below 1.7e-32. Its reciprocal, the scale of the tensor,
is a normal number, also times the smallest scale of a block."""

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of a rotation: fixed, as in Transformer Engine, because both operands must be rotated alike."""


def _rotation() -> np.ndarray:
    """Returns the matrix of a rotation: the signs, times a Hadamard matrix, over 4. It is orthogonal."""
    hadamard: np.ndarray = np.ones((1, 1))
    for _ in range(4):
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    return np.diag(_SIGNS) @ hadamard / 4


ROTATION = _rotation()


def rotated(x: Float[jax.Array, "*dims"], axis: int) -> Float32[jax.Array, "*padded"]:
    """Returns ``x``, in float32, with each 16 elements along an axis multiplied by the rotation.

    Zeros fill up the last 16. If two operands of a product are rotated along the axis that the product sums
    over, the product stays the same, since the matrix is orthogonal. A NaN or an Inf makes all 16 elements
    NaN.
    """
    # 16-bit floats hold the matrix exactly, and GPUs multiply them faster.
    dtype = x.dtype if x.dtype.itemsize == 2 else np.dtype(np.float32)
    sizes = [round_up(n, GROUP) if i == axis else n for i, n in enumerate(x.shape)]
    x = padded(x.astype(dtype), sizes)
    groups = x.reshape(*sizes[:axis], sizes[axis] // GROUP, GROUP, *sizes[axis + 1 :])
    dims = ((axis + 1,), (0,)), ((), ())
    out = lax.dot_general(
        groups,
        jnp.asarray(ROTATION, dtype),
        dims,
        lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    # A sum with an Inf is an Inf or a NaN.
    out = jnp.where(lax.is_finite(out), out, np.float32(np.nan))
    return jnp.moveaxis(out, -1, axis + 1).reshape(sizes)


def quantized(
    x: Float32[jax.Array, "*dims"], block: tuple[int, ...], bits: UInt8[jax.Array, "*dims"] | None = None
) -> tuple[Any, Any, Any]:
    """Returns the codes (e2m1), the scales of blocks (e4m3), and the scale of the tensor (float32).

    The scale of the tensor maps its amax onto the largest product of a code and a scale. Scales are rounded
    to the nearest, so the largest values of a block can saturate. The codes are rounded to the nearest, or
    stochastically by the random bits.

    Source: arXiv:2509.25149, appendix C.
    """
    amax = finite_amax(x)
    usable = is_usable(amax)
    encoding = (_E2M1_MAX * _E4M3_MAX) / jnp.where(usable, amax, np.float32(1))
    encoding = jnp.where(usable, jnp.minimum(encoding, _LARGEST_ENCODING), np.float32(1))
    tensor_scale = np.float32(1) / encoding
    blocks, within = split_blocks(x, block)
    # NaN stays NaN, and an Inf gives the largest scale.
    of_block = jnp.max(jnp.abs(blocks), axis=within, keepdims=True, initial=0)
    of_block = quotient(of_block, jnp.full_like(of_block, _E2M1_MAX)) * encoding
    scale = jnp.minimum(of_block, _E4M3_MAX).astype(jnp.float8_e4m3fn)
    wide = scale.astype(jnp.float32)
    # This is 1 / (scale * tensor_scale), as XLA would write it in a jitted program. The values of a block
    # whose scale is zero are zero, and so are its codes.
    factor = jnp.minimum(encoding / wide, _LARGEST)
    values = lax.clamp(-_E2M1_MAX, blocks * jnp.where(wide == 0, np.float32(0), factor), _E2M1_MAX)
    values = _rounded(values, None if bits is None else split_blocks(bits, block)[0])
    codes = join_blocks(values.astype(jnp.float4_e2m1fn), x.shape, block)
    return codes, lax.squeeze(scale, within), tensor_scale


def _rounded(
    x: Float32[jax.Array, "*dims"], bits: UInt8[jax.Array, "*dims"] | None
) -> Float32[jax.Array, "*dims"]:
    """Rounds values of at most 6 to e2m1: to the nearest even, or stochastically by random bytes.

    (XLA for CPUs may round twice in a cast from float32 to e2m1.) For a byte the middle of its 256th part
    is taken as the random number, so that the mean has no bias.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, np.float32(0.5), jnp.where(size < 4, np.float32(1), np.float32(2)))
    if bits is None:
        rounded = lax.round(size / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    else:
        random = (bits.astype(jnp.float32) + np.float32(0.5)) / np.float32(256)
        rounded = jnp.floor(size / step + random) * step
    # XLA for CPUs loses the sign in jnp.copysign of constants.
    return jnp.where(x < 0, -rounded, rounded)


def random_bits(key: Any, x: jax.Array) -> UInt8[jax.Array, "*dims"]:
    """Returns a random byte for each element of ``x``.

    Inside ``jax.shard_map`` each device draws its own, over the axes that ``x`` varies over. Under
    ``jax.vmap`` the elements of a batch of ``x`` have bytes of their own, also if they share the key.
    """
    if key is None:
        raise ValueError(
            "Stochastic rounding, by which NVFP4BlockScaling quantizes gradients, needs a random key named "
            "'fp8', and there is none. In Linen pass model.apply(variables, x, rngs={'fp8': key}), with a "
            "new key at each step, and name it in split_rngs={'fp8': True} of nn.scan and nn.vmap. In NNX "
            "give rngs=nnx.Rngs(fp8=0) to the op or to quantize_model. Or set "
            "disable_stochastic_rounding=True."
        )
    for axis in sorted(manual_axes(x)):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return _bits_like(key, x)


@custom_vmap
def _bits_like(keys: Any, x: jax.Array) -> jax.Array:
    """Returns random bytes for keys whose dimensions are the first ones of ``x``."""

    def bits(key: Any) -> jax.Array:
        return jax.random.bits(key, x.shape[num_batch:], np.uint8)

    num_batch = keys.ndim - (keys.dtype == np.uint32)  # the old kind of key is an array of uint32
    for _ in range(num_batch):
        bits = jax.vmap(bits)
    return bits(keys)


@_bits_like.def_vmap
def _bits_like_rule(size: int, is_batched: Any, keys: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    """Draws for each element of the batch with its own key, or for all of them with the same key."""
    keys_batched, x_batched = is_batched
    if keys_batched:
        return _bits_like(keys, x if x_batched else jnp.broadcast_to(x, (size, *x.shape))), True
    place = keys.ndim - (keys.dtype == np.uint32)
    return jnp.moveaxis(_bits_like(keys, jnp.moveaxis(x, 0, place)), place, 0), True
