"""FP8 arithmetic in NumPy and ml_dtypes, written from the formulas and independent of the package.

Conventions: ``x ≈ q * scale``; newest amax at index 0; the scale of a step comes from the history
before it.
"""

import ml_dtypes
import numpy as np

FP8 = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "float8_e5m2fnuz": 57344.0}


def finite_codes(name):
    """Returns all finite values of a format in float64, by decoding the 256 bytes."""
    values = np.arange(256, dtype=np.uint8).view(FP8[name]).astype(np.float64)
    return values[np.isfinite(values)]


def quantize(x, name, scale, compute=np.float32):
    """Returns FP8 codes of ``x / scale``, saturated, divided in ``compute``."""
    with np.errstate(all="ignore"):
        scaled = np.asarray(x).astype(compute) / np.asarray(scale, np.float32).astype(compute)
        scaled = np.asarray(scaled, np.float32)
        return np.clip(scaled, -MAX[name], MAX[name]).astype(FP8[name])


def dequantize(q, dtype, scale, compute=np.float32):
    with np.errstate(all="ignore"):
        product = q.astype(compute) * np.asarray(scale, np.float32).astype(compute)
        return np.asarray(product, compute).astype(dtype)


def qdq(x, name, scale, compute=np.float32):
    return dequantize(quantize(x, name, scale, compute), np.asarray(x).dtype, scale, compute)


def nearest_code(x, name):
    """Rounds float64 ``x`` to the nearest finite FP8 value by search, ties to the even code."""
    bits = np.arange(128, dtype=np.uint8)  # the non-negative codes, in increasing order
    values = bits.view(FP8[name]).astype(np.float64)
    bits, values = bits[np.isfinite(values)], values[np.isfinite(values)]
    magnitude = np.minimum(np.abs(x), values[-1])
    upper = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    lower = upper - 1
    to_lower, to_upper = magnitude - values[lower], values[upper] - magnitude
    take_lower = (to_lower < to_upper) | ((to_lower == to_upper) & (bits[lower] % 2 == 0))
    return np.sign(x) * np.where(take_lower, values[lower], values[upper])


def next_scale(history, scale, name, margin=0, algorithm="max"):
    """Returns the float32 scale of this step from the amaxes before it."""
    amax = np.float32(history[0] if algorithm == "most_recent" else np.max(history))
    if not np.isfinite(amax) or amax < np.finfo(np.float32).tiny:
        return np.asarray(scale, np.float32)
    reciprocal = (np.float32(MAX[name]) / amax) / np.float32(2.0**margin)
    return np.full_like(np.asarray(scale, np.float32), np.float32(1) / reciprocal)


def next_history(x, history):
    amax = np.max(np.abs(np.asarray(x, np.float32)), initial=0)
    if not np.isfinite(amax) or np.size(x) == 0:
        return np.array(history, np.float32)
    new = np.roll(np.array(history, np.float32), -1)
    new[0] = amax
    return new


class DenseStep:
    """Computes ``x @ w`` and its gradients with delayed scaling, accumulated in float64."""

    def __init__(
        self, length, forward="float8_e4m3fn", backward="float8_e5m2", *, round_operands=True, **options
    ):
        """Sets the options; ``round_operands`` rounds the dequantized operands to their old dtype."""
        self.round_operands = round_operands
        self.options, self.dtypes = options, {"input": forward, "kernel": forward, "output_grad": backward}
        self.scale = {r: np.ones((1,), np.float32) for r in self.dtypes}
        self.history = {r: np.zeros((length,), np.float32) for r in self.dtypes}

    def _pass(self, role, x):
        name = self.dtypes[role]
        self.scale[role] = next_scale(self.history[role], self.scale[role], name, **self.options)
        self.history[role] = next_history(x, self.history[role])
        if self.round_operands:
            return qdq(x, name, self.scale[role]).astype(np.float64)
        return quantize(x, name, self.scale[role]).astype(np.float64) * np.float64(self.scale[role])

    def __call__(self, x, w, g):
        """Returns ``(y, dx, dw)`` in float64 and advances the state."""
        x8, w8, g8 = self._pass("input", x), self._pass("kernel", w), self._pass("output_grad", g)
        return x8 @ w8, g8 @ w8.T, x8.T @ g8
