"""``fp32_max_grad``, a float32 whose gradients merge by maximum.

Reverse-mode differentiation adds the cotangents of a value that is used twice. For an amax the sum
means nothing: what is wanted is the maximum. JAX lets an *extended dtype* bring its own rule for that
sum, so a float32 array that is cast to this dtype and then read in many places collects the largest of
its cotangents instead.

Internals: ``jax._src.ad_util``, ``jax._src.core``, ``jax._src.dtypes``, ``jax._src.earray``,
``jax._src.sharding_impls``, ``jax._src.tree_util``, ``jax._src.interpreters.pxla`` and
``jax._src.interpreters.ad``, which know extended dtypes, arrays of them and their derivatives. The
supported versions of JAX differ in one entry point below, how an array class says that it needs no
canonicalisation.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import ad_util, core, dtypes, earray, sharding_impls, tree_util
from jax._src.interpreters import ad, pxla


class _MaxDtypeRules:
    """What JAX asks an extended dtype; each method's name and signature are JAX's."""

    allow_conversion: bool = True

    @staticmethod
    def physical_element_aval(dtype: MaxDtype) -> core.ShapedArray:
        return core.ShapedArray(dtype.element_shape, dtype.float_dtype)

    @staticmethod
    def add(dtype: MaxDtype, x: Any, y: Any) -> Any:
        to_float = partial(lax.convert_element_type, new_dtype=dtype.float_dtype)
        return lax.convert_element_type(lax.max(to_float(x), to_float(y)), dtype)

    @staticmethod
    def zero(dtype: MaxDtype) -> Any:
        # The identity of max, so "no gradient" is told apart from a gradient of 0.
        return lax.convert_element_type(np.full(dtype.element_shape, -np.inf, dtype.float_dtype), dtype)

    @staticmethod
    def tangent_dtype(dtype: MaxDtype) -> MaxDtype:
        return dtype

    @staticmethod
    def full(shape: Any, fill_value: Any, dtype: MaxDtype) -> Any:
        fill_value = lax.convert_element_type(fill_value, dtype.float_dtype)
        shape = (*shape, *dtype.element_shape)
        dims = range(len(shape) - np.ndim(fill_value), len(shape))
        return lax.convert_element_type(lax.broadcast_in_dim(fill_value, shape, dims), dtype)

    @staticmethod
    def global_sharded_result_handler(aval: Any, out_sharding: Any, committed: Any) -> Any:
        physical = core.physical_aval(aval)
        sharding = sharding_impls.physical_sharding(aval, out_sharding)
        handler = pxla.global_result_handlers[core.ShapedArray](physical, sharding, committed)
        return handler.wrap(lambda array: MaxArray(aval, array))


class _MaxScalar(dtypes.extended):
    """The scalar class of ``MaxDtype``, for ``jnp.issubdtype``."""


@dataclasses.dataclass(frozen=True)
class MaxDtype(dtypes.ExtendedDType):
    """A float dtype whose cotangents merge by ``max`` where others add."""

    float_dtype: np.dtype
    element_shape: tuple[int, ...] = ()
    """Of the floats that make one element, and merge one by one."""
    _rules: type = _MaxDtypeRules
    type: type = _MaxScalar

    def __repr__(self) -> str:
        name = f"fp{8 * self.float_dtype.itemsize}_max_grad"
        return f"{name}{list(self.element_shape)}" if self.element_shape else name

    @property
    def name(self) -> str:
        return repr(self)

    @property
    def itemsize(self) -> int:
        return self.float_dtype.itemsize * math.prod(self.element_shape)


class MaxArray(earray.EArray):
    """A concrete array of a ``MaxDtype``, which un-jitted code meets."""

    @property
    def addressable_shards(self) -> Any:
        """The shards of the float32 buffer; ``jax_debug_nans`` looks at them."""
        return self._data.addressable_shards


# What JAX must know of an array class: its type, how it enters a compiled function, that it needs no
# canonicalisation, its leaves, and (un-jitted gradients look this up by class) how two of them add.
core.pytype_aval_mappings[MaxArray] = lambda x: x.aval
pxla.shard_arg_handlers[MaxArray] = pxla.shard_arg_handlers[earray.EArray]
if hasattr(dtypes, "register_canonicalize_value_handler"):  # JAX 0.10 and later
    dtypes.register_canonicalize_value_handler(MaxArray, None)
else:  # JAX 0.9
    dtypes.canonicalize_value_handlers[MaxArray] = lambda x: x
tree_util.dispatch_registry.register_node(
    MaxArray, lambda x: ((x._data,), x.aval), lambda aval, data: MaxArray(aval, data[0])
)
ad_util.raw_jaxval_adders[MaxArray] = lambda x, y: x.dtype._rules.add(x.dtype, x, y)


# JAX pads the cotangent of a slice with a zero that NumPy makes, and NumPy knows no extended dtype. An
# unrolled loop over stacked layers takes such slices, and so does ``lax.scan`` with jit switched off.
_transpose_slice = ad.fancy_transposes[lax.slice_p]


def _transpose_slice_of_max(g: Any, operand: Any, **params: Any) -> None:
    """Transposes ``lax.slice``; the elements that the slice left out get no gradient, which is -inf."""
    dtype = getattr(getattr(operand, "aval", None), "dtype", None)
    if isinstance(g, ad_util.Zero) or not isinstance(dtype, MaxDtype):
        _transpose_slice(g, operand, **params)
        return
    strides, pads = params["strides"] or [1] * g.ndim, []
    for start, stride, taken, size in zip(params["start_indices"], strides, g.shape, operand.aval.shape):
        end = start + max(0, stride * (taken - 1) + 1)
        pads.append((start, size - end, stride - 1))
    pads += [(0, 0, 0)] * len(dtype.element_shape)
    padded = lax.pad(to_floats(g), np.asarray(-np.inf, dtype.float_dtype), pads)
    operand.accum(lax.convert_element_type(padded, dtype))


ad.fancy_transposes[lax.slice_p] = _transpose_slice_of_max

fp32_max_grad = MaxDtype(np.dtype(np.float32))
"""Float32 whose gradient accumulation takes the maximum.

Cast a float32 scale or amax history to it *inside* the differentiated function; its gradient arrives as
float32, and holds the elementwise largest of all contributions, ``-inf`` where there was none.

Example:
    >>> import jax, jax.numpy as jnp, fp8flax as fp8
    >>> def reuse(x, y, scale, history):
    ...     scale, history = scale.astype(fp8.fp32_max_grad), history.astype(fp8.fp32_max_grad)
    ...     x = fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
    ...     y = fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, y, scale, history)
    ...     return x + y
    >>> jax.grad(reuse, argnums=(2, 3))(2.0, 3.0, jnp.array(1.0), jnp.zeros(3))
    (Array(1., dtype=float32), Array([3., 0., 0.], dtype=float32))
"""


DIGEST_SIZE = 6
digest_dtype = MaxDtype(np.dtype(np.float32), (DIGEST_SIZE,))
"""A scale with more numbers to each, see ``delayed.Digest``; all merge as ``fp32_max_grad`` does."""


def is_max_dtype(x: Any) -> bool:
    """Tells whether ``x`` is an array (or tracer) of ``fp32_max_grad``, or a digest."""
    return isinstance(getattr(x, "dtype", None), MaxDtype)


def to_max_dtype(x: jax.Array) -> jax.Array:
    """Casts a float32 array to ``fp32_max_grad``; leaves an array of that dtype, or a digest, alone."""
    return x if is_max_dtype(x) else lax.convert_element_type(x, fp32_max_grad)


def from_max_dtype(x: Any) -> Any:
    """Casts an ``fp32_max_grad`` array to float32, without a gradient; leaves everything else alone.

    A digest gives its scale. (A second derivative would ask for the transpose of that cast, in which JAX
    0.10 fails.)
    """
    if is_digest(x) or is_packed(x):
        return digested(x, 1)[0]
    return lax.stop_gradient(lax.convert_element_type(x, np.float32)) if is_max_dtype(x) else x


def to_floats(x: jax.Array) -> jax.Array:
    """Returns what an ``fp32_max_grad`` array or a digest is made of, float32; all else as it is."""
    return lax.convert_element_type(x, np.float32) if is_max_dtype(x) else x


# Derivation. A cast, whose cotangent is cast back. (That of JAX's own fails where there is none.)
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def of_floats(dtype: Any, x: jax.Array) -> jax.Array:
    """Returns the array of a ``MaxDtype`` that is made of these float32."""
    return lax.convert_element_type(x, dtype)


of_floats.defvjp(lambda dtype, x: (of_floats(dtype, x), None), lambda dtype, _, g: (to_floats(g),))


def is_digest(x: Any) -> bool:
    """Tells whether ``x`` is an array (or tracer) of ``digest_dtype``."""
    return getattr(x, "dtype", None) == digest_dtype


def is_packed(x: Any) -> bool:
    """Tells whether ``x`` is an array (or tracer) of the digests of several tensors."""
    return is_max_dtype(x) and math.prod(x.dtype.element_shape) > DIGEST_SIZE


# Derivation. Each digest is a part of the result, and gets that part of its cotangent.
@jax.custom_vjp
def packed(digests: list[jax.Array]) -> jax.Array:
    """Returns digests of one shape as one array, of the same shape."""
    whole = jnp.concatenate([lax.convert_element_type(digest, np.float32) for digest in digests], axis=-1)
    return lax.convert_element_type(whole, MaxDtype(digest_dtype.float_dtype, whole.shape[-1:]))


# Derivation. The same the other way round.
@jax.custom_vjp
def unpacked(x: jax.Array) -> list[jax.Array]:
    """Returns the digests that ``packed`` was given."""
    numbers = lax.convert_element_type(x, np.float32)
    parts = lax.split(numbers, [DIGEST_SIZE] * (numbers.shape[-1] // DIGEST_SIZE), axis=-1)
    return [lax.convert_element_type(part, digest_dtype) for part in parts]


packed.defvjp(lambda digests: (packed(digests), None), lambda _, g: (unpacked(g),))
unpacked.defvjp(lambda x: (unpacked(x), None), lambda _, grads: (packed(grads),))


def to_digest(*numbers: jax.Array) -> jax.Array:
    """Returns a digest of float32 arrays of one shape, which is its shape."""
    return lax.convert_element_type(jnp.stack(numbers, axis=-1), digest_dtype)


def digested(x: jax.Array, num: int = DIGEST_SIZE) -> list[jax.Array]:
    """Returns the first arrays that a digest is made of, without a gradient."""
    numbers = lax.stop_gradient(lax.convert_element_type(x, np.float32))
    return [lax.index_in_dim(numbers, i, -1, keepdims=False) for i in range(num)]
