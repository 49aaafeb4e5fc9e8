"""Quantization in NumPy, written from the formulas of OFP8, MX, DeepSeek-V3 and NVFP4.

Conventions: ``x ≈ codes * scale``; float32 subnormals count as zero; an amax leaves out NaN and Inf.
"""

import ml_dtypes
import numpy as np

from tests.reference import FP8, MAX, nearest_code

E8M0, E4M3, E2M1 = ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
FLOAT32_MAX = float(np.finfo(np.float32).max)


def as_float32(x):
    """Casts to float32; finite values stay finite, and subnormal results become zeros of the same sign."""
    with np.errstate(all="ignore"):  # a signalling NaN warns
        x = np.asarray(x).astype(np.float64)
        x = np.where(np.isinf(x), x, np.clip(x, -FLOAT32_MAX, FLOAT32_MAX)).astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)


def amax(x, axis=None):
    """Returns the largest finite magnitude in float32, or 0; keeps the dimensions of ``axis``."""
    x = as_float32(x)
    magnitude = np.where(np.isfinite(x), np.abs(x), np.float32(0))
    return np.asarray(np.max(magnitude, axis=axis, keepdims=axis is not None, initial=np.float32(0)))


def scale_of(amax, name, kind):
    """Returns the scales for a finite ``amax``, in float32, or in E8M0 for the kinds ``e8m0_*``."""
    amax = as_float32(amax)
    if kind == "exact":
        with np.errstate(all="ignore"):
            reciprocal = np.float32(MAX[name]) / amax
            scale = np.clip(np.float32(1) / reciprocal, np.float32(2.0**-126), np.float32(FLOAT32_MAX))
        return np.where(amax == 0, np.float32(1), scale)
    mantissa, exponent = np.frexp(amax.astype(np.float64))  # amax = mantissa * 2**exponent
    max_mantissa, max_exponent = np.frexp(MAX[name])
    n = exponent.astype(np.int64) - max_exponent  # `floor(log2(amax)) - floor(log2(max))`
    if kind != "e8m0_floor":
        n = n + (mantissa > max_mantissa)
    n = np.where(amax == 0, 0, n)
    scale = np.asarray(2.0 ** np.clip(n, -126, 127), np.float32)
    return scale if kind == "power_of_two" else scale.astype(E8M0)


def as_float64(scale):
    """Decodes a float32 or E8M0 scale."""
    scale = np.asarray(scale)
    if scale.dtype != E8M0:
        return scale.astype(np.float64)
    code = scale.view(np.uint8).astype(np.float64)
    return np.where(code == 255, np.nan, 2.0 ** (code - 127))


def codes_of(x, scale, name):
    """Returns saturated FP8 codes of ``x / scale``, a float32 quotient, exact for an E8M0 scale."""
    x, scale = as_float32(x), np.asarray(scale)
    with np.errstate(all="ignore"):
        if scale.dtype == E8M0:
            quotient = x.astype(np.float64) / as_float64(scale)
        else:
            quotient = (x / scale.astype(np.float32)).astype(np.float64)
        rounded = np.copysign(nearest_code(quotient, name), quotient)
        return np.asarray(rounded).astype(FP8[name])  # exact: a value of the format or NaN


def tensorwise(x, name, kind="exact"):
    scale = scale_of(amax(x), name, kind)
    return codes_of(x, scale, name), scale


def axiswise(x, name, axes, kind="exact"):
    """Returns one scale per slice over ``axes`` (an int or a tuple), the contracted axes."""
    scale = scale_of(amax(x, axes), name, kind)
    return codes_of(x, scale, name), scale


def over_blocks(scale, block):
    """Repeats each scale over the rows and columns of its block."""
    return np.repeat(np.repeat(scale, block[0], axis=-2), block[1], axis=-1)


def blockwise(x, name, block, kind):
    """Returns one scale per block of the last two axes, which are padded at their ends with zeros."""
    x, (rows, columns) = as_float32(x), block
    padding = [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % rows), (0, -x.shape[-1] % columns)]
    x = np.pad(x, padding)
    down, across = x.shape[-2] // rows, x.shape[-1] // columns
    tiles = x.reshape(*x.shape[:-2], down, rows, across, columns)
    scale = scale_of(amax(tiles, (-3, -1))[..., 0, :, 0], name, kind)
    return codes_of(x, over_blocks(scale, block), name), scale


def nvfp4(x, block):
    """Returns codes in e2m1, a scale in e4m3 per block, and the scale of the tensor, for two dimensions.

    A block with a NaN or an Inf has the scale NaN; the codes of a block with the scale zero are zero.
    """
    x, (rows, columns), one = as_float32(x), block, np.float32(1)
    padded = np.pad(x, [(0, -n % size) for n, size in zip(x.shape, block)])
    shape = padded.shape[0] // rows, rows, padded.shape[1] // columns, columns
    tiles = padded.reshape(shape)
    of_block = np.max(np.abs(tiles), (1, 3), keepdims=True, initial=0)
    amax = np.max(of_block, where=np.isfinite(of_block), initial=np.float32(0))
    of_block = np.where(np.isinf(of_block), np.float32(np.nan), of_block)
    with np.errstate(all="ignore"):
        encoding = np.minimum(np.float32(448 * 6) / amax, np.float32(2.0**117)) if amax else one
        of_block = np.where(of_block < 6 * 2.0**-126, of_block * 0, of_block)  # XLA has no subnormals
        scale = np.minimum(of_block / np.float32(6) * encoding, np.float32(448)).astype(E4M3)
        wide = scale.astype(np.float32)
        factor = np.where(wide == 0, 0, np.minimum(encoding / wide, FLOAT32_MAX)).astype(np.float32)
        codes = np.where(np.isnan(wide), 0, np.clip(tiles * factor, -6, 6)).astype(E2M1)
    return codes.reshape(padded.shape)[: x.shape[0], : x.shape[1]], scale[:, 0, :, 0], one / encoding


def rotated(x, axis):
    """Returns ``x`` with each 16 elements along an axis multiplied by the rotation of NVFP4, in float64."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    hadamard = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    x = np.moveaxis(np.asarray(x).astype(np.float64), axis, -1)
    groups = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])
    out = groups.reshape(*x.shape[:-1], -1, 16) @ (np.diag(signs) @ hadamard / 4)
    return np.moveaxis(out.reshape(groups.shape), -1, axis)


def dequantize(codes, scale, block=None):
    """Returns ``codes * scale`` in float64; with ``block``, the scale is that of ``blockwise``."""
    scale = as_float64(scale)
    return np.asarray(codes).astype(np.float64) * (scale if block is None else over_blocks(scale, block))


def tensors(shape, seed):
    """Returns float32 tensors to quantize, by name; "rows" are those along the last axis."""
    rng = np.random.default_rng(seed)
    size, row_shape = int(np.prod(shape)), (int(np.prod(shape[:-1])), int(np.prod(shape[-1:])))

    def normal():
        return rng.standard_normal(size)

    def signs():
        return rng.choice([-1.0, 1.0], size)

    outliers = normal() * np.where(rng.random(size) < 1e-3, 100, 1)
    outliers[rng.permutation(size)[:1]] *= 100  # at least one

    subnormal = np.reshape(10 ** rng.uniform(-42, -35.4, size), row_shape)
    subnormal[1::4] = np.minimum(subnormal[1::4], 1e-38)  # rows with float32 subnormals only

    constant = np.full(row_shape, 448 * 2.0 ** rng.integers(-9, 10), np.float32)
    constant[1::2] = np.nextafter(constant[1::2], np.float32(np.inf))

    special, order = normal(), rng.permutation(size)
    for i, value in enumerate((np.nan, np.inf, -np.inf)):
        special[order[i::100]] = value
    special = special.reshape(row_shape)
    if row_shape[0] > 1:
        special[-1] = 0
        special[-1, ::3], special[-1, 1::3] = np.inf, -np.inf

    made = {
        "random": normal(),
        "heavy-tailed": signs() * np.clip(rng.lognormal(0, 4, size), 1e-6, 1e6),
        "outliers": outliers,
        "subnormal": signs() * subnormal.reshape(size),
        "tiny": normal() * 1e-30,
        "huge": normal() * 1e30,
        "zeros": np.zeros(size),
        "constant": constant,
        "nan and inf": special,
        "powers of two": signs() * 2.0 ** rng.integers(-20, 21, size),
    }
    return {key: np.asarray(x, np.float32).reshape(shape) for key, x in made.items()}
