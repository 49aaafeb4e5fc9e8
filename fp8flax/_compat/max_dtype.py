"""``fp32_max_grad``, a float32 whose gradients merge by maximum.

Reverse-mode differentiation adds the cotangents of a value that is used twice. Amaxes must merge by maximum
instead. JAX lets an *extended dtype* define its own rule for that sum. If two layers use a scale whose
cotangents are the amaxes 3 and 5, its gradient is 8 in float32, and 5 if the scale is first cast to this
dtype. In a compiled program its arrays are buffers of float32.

Internals: the modules of ``jax._src`` below, which define extended dtypes, their arrays and their
derivatives; ``jax.extend.core`` and ``jax.interpreters``, to define primitives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import ad_util, core, dtypes, earray, sharding_impls, tree_util
from jax._src.interpreters import ad, pxla
from jax._src.numpy import array_methods
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.typing import ArrayLike

_FLOAT32 = np.dtype(np.float32)


# The dtype, and the rules by which JAX computes with it.


class _MaxScalar(dtypes.extended):
    """The scalar class of ``MaxDtype``, for ``jnp.issubdtype``."""


@dataclasses.dataclass(frozen=True)
class MaxDtype(dtypes.ExtendedDType):
    """A dtype of float32 numbers whose cotangents merge by ``max``; those of other dtypes are added."""

    element_shape: tuple[int, ...] = ()
    """The shape of the floats in one element; ``()`` for one float. Each float merges by itself."""
    type: type = _MaxScalar

    def __repr__(self) -> str:
        # ``differentiating`` looks for the first word in errors of JAX.
        return f"fp32_max_grad{list(self.element_shape) or ''}"

    @property
    def name(self) -> str:
        return repr(self)

    @property
    def itemsize(self) -> int:
        return 4 * math.prod(self.element_shape)

    @property
    def _rules(self) -> Any:
        return _RulesOfSeveral if self.element_shape else _MaxDtypeRules


class _MaxDtypeRules:
    """The rules that JAX calls for an extended dtype; each method's name and signature are JAX's."""

    allow_conversion: bool = True

    @staticmethod
    def physical_element_aval(dtype: MaxDtype) -> core.ShapedArray:
        return core.ShapedArray(dtype.element_shape, _FLOAT32)

    @staticmethod
    def add(dtype: MaxDtype, x: jax.Array, y: jax.Array) -> jax.Array:
        return of_floats(dtype, lax.max(to_floats(x), to_floats(y)))

    @staticmethod
    def zero(dtype: MaxDtype) -> jax.Array:
        # -inf is the identity of max. It also distinguishes "no gradient" from a gradient of 0.
        return of_floats(dtype, np.full(dtype.element_shape, -np.inf, _FLOAT32))

    @staticmethod
    def tangent_dtype(dtype: MaxDtype) -> MaxDtype:
        return dtype

    @staticmethod
    def full(shape: Sequence[int], fill_value: ArrayLike, dtype: MaxDtype) -> jax.Array:
        return of_floats(dtype, jnp.full((*shape, *dtype.element_shape), fill_value, _FLOAT32))

    @staticmethod
    def global_sharded_result_handler(aval: Any, out_sharding: Any, committed: Any) -> Any:
        """Returns the function that makes a ``MaxArray`` from the float buffers of a compiled function."""
        physical = core.physical_aval(aval)
        sharding = sharding_impls.physical_sharding(aval, out_sharding)
        handler = pxla.global_result_handlers[core.ShapedArray](physical, sharding, committed)
        return handler.wrap(lambda array: MaxArray(aval, array))


class _RulesOfSeveral(_MaxDtypeRules):
    """The rules for elements of several floats: ``astype``, which would return them all, is an error."""

    allow_conversion: bool = False


# Concrete arrays.


class MaxArray(earray.EArray):
    """A concrete array of a ``MaxDtype``: what code outside of jit gets."""

    @property
    def addressable_shards(self) -> Any:
        """The shards of the float32 buffer; ``jax_debug_nans`` looks at them."""
        return self._data.addressable_shards


# JAX looks up by class: the type of an array, how it is passed to a compiled function, that it needs no
# canonicalisation, its leaves, and how two cotangents add outside of jit.
core.pytype_aval_mappings[MaxArray] = operator.attrgetter("aval")
pxla.shard_arg_handlers[MaxArray] = pxla.shard_arg_handlers[earray.EArray]
dtypes.register_canonicalize_value_handler(MaxArray, None)
tree_util.dispatch_registry.register_node(
    MaxArray, lambda x: ((x._data,), x.aval), lambda aval, data: MaxArray(aval, data[0])
)
ad_util.raw_jaxval_adders[MaxArray] = lambda x, y: x.dtype._rules.add(x.dtype, x, y)
# Gives ``MaxArray`` the operators and methods that tracers have.
array_methods._set_array_base_attributes(MaxArray, exclude={*vars(earray.EArray), *vars(MaxArray)})


# Casts. ``of_floats`` and ``to_floats`` only change the dtype of a buffer: floats of shape ``(*s, 3)`` are
# an array of shape ``s`` with the element shape ``(3,)``. JAX's own cast to ``fp32_max_grad``, which users
# call, works. But JAX cannot transpose its cast back to float32, and neither of its casts takes elements
# of several floats.

_of_floats_p, _to_floats_p = Primitive("fp8_of_floats"), Primitive("fp8_to_floats")


def _aval_of_floats(x: Any, *, dtype: MaxDtype) -> Any:
    ndim = x.ndim - len(dtype.element_shape)
    assert (x.dtype, x.shape[ndim:]) == (_FLOAT32, dtype.element_shape)
    sharding = x.sharding.update(spec=x.sharding.spec[:ndim])
    return x.update(shape=x.shape[:ndim], dtype=dtype, sharding=sharding)


_of_floats_p.def_abstract_eval(_aval_of_floats)
_of_floats_p.def_impl(
    lambda x, dtype: MaxArray(_aval_of_floats(jax.typeof(x), dtype=dtype), jnp.asarray(x))
)
_to_floats_p.def_abstract_eval(lambda x: x.update(shape=(*x.shape, *x.dtype.element_shape), dtype=_FLOAT32))
_to_floats_p.def_impl(operator.attrgetter("_data"))
ad.deflinear2(_of_floats_p, lambda g, x, dtype: [_to_floats_p.bind(g)])
ad.deflinear2(_to_floats_p, lambda g, x: [of_floats(x.aval.dtype, g)])
for _primitive in (_of_floats_p, _to_floats_p):
    batching.defvectorized(_primitive)
    mlir.register_lowering(_primitive, lambda ctx, x, **_: [x])


def of_floats(dtype: np.dtype | MaxDtype, x: ArrayLike) -> jax.Array:
    """Returns an array of ``dtype`` and of shape ``s``, from floats of shape ``(*s, *element_shape)``."""
    result: jax.Array = _of_floats_p.bind(x, dtype=dtype)
    return result


def to_floats(x: Any) -> Any:
    """Returns the floats of an array of a ``MaxDtype``; returns any other value unchanged."""
    return _to_floats_p.bind(x) if is_max_dtype(x) else x


fp32_max_grad = MaxDtype()
"""Float32 dtype whose gradients merge by maximum instead of by sum.

Cast a float32 scale or amax history to this dtype *inside* the differentiated function. The gradient
arrives as float32 and holds the elementwise largest of all contributions; elements without any are
``-inf``.

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


def is_max_dtype(x: object) -> bool:
    """Returns whether ``x`` is an array (or tracer) of a ``MaxDtype``."""
    return isinstance(getattr(x, "dtype", None), MaxDtype)


def from_max_dtype(x: Any) -> Any:
    """Casts an array of a ``MaxDtype`` to float32, without a gradient; returns other values unchanged.

    For elements of several floats it returns the first of each, such as the scale of a meta.
    """
    if not is_max_dtype(x):
        return x
    floats = lax.stop_gradient(to_floats(x))
    return lax.index_in_dim(floats, 0, -1, keepdims=False) if x.dtype.element_shape else floats


# Slices in a differentiated function: the one rule of JAX that is replaced.

_lock = threading.Lock()
_num_differentiating = 0
_rule_of_jax: Callable[..., None]
_ADVICE = (
    "Inside of a gradient the FP8 scaling state is no number. Pass it on to the model unchanged. Compute "
    "norms, penalties and casts of the parameters alone: variables['params'] in Linen, nnx.Param in NNX. "
    "If jax.shard_map has check_vma=False, take the gradient inside, and call fp8flax.pmean_gradients."
)


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """A context in which arrays of a ``MaxDtype`` can be sliced in a differentiated function.

    JAX's errors about the dtype, which users do not know, become a ``TypeError`` that says what to do.

    An unrolled loop over stacked layers slices the stacked state, and so does ``lax.scan`` if jit is
    switched off. JAX pads the cotangent of a slice with a zero from NumPy, which has no extended dtypes. A
    dtype cannot define this rule itself, so one rule of JAX is replaced, for all threads, while any of them
    is in the context. For all other dtypes the replacement calls JAX's rule.
    """
    global _num_differentiating, _rule_of_jax
    with _lock:
        if _num_differentiating == 0:
            _rule_of_jax = ad.fancy_transposes[lax.slice_p]
            ad.fancy_transposes[lax.slice_p] = _transpose_slice
        _num_differentiating += 1
    try:
        yield
    except Exception as error:
        if _ADVICE in str(error) or repr(fp32_max_grad) not in str(error):
            raise
        raise TypeError(f"{_ADVICE} JAX's error: {error}") from error
    finally:
        with _lock:
            _num_differentiating -= 1
            if _num_differentiating == 0:
                ad.fancy_transposes[lax.slice_p] = _rule_of_jax


def _transpose_slice(g: Any, operand: Any, **params: Any) -> None:
    """Transposes ``lax.slice`` as JAX does; for a ``MaxDtype``, elements that it left out get ``-inf``.

    ``g`` is the cotangent of the slice; ``operand`` collects the cotangents of the sliced array.
    """
    dtype = getattr(getattr(operand, "aval", None), "dtype", None)
    if isinstance(g, ad_util.Zero) or not isinstance(dtype, MaxDtype):
        _rule_of_jax(g, operand, **params)
        return
    strides, pads = params["strides"] or [1] * g.ndim, []
    for start, stride, taken, size in zip(params["start_indices"], strides, g.shape, operand.aval.shape):
        end = start + max(0, stride * (taken - 1) + 1)
        pads.append((start, size - end, stride - 1))
    pads += [(0, 0, 0)] * len(dtype.element_shape)
    padded = lax.pad(to_floats(g), np.float32(-np.inf), pads)
    operand.accum(of_floats(dtype, padded))
