"""Gradients that merge scaling state by maximum: of a step, of microbatches, over devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8flax._compat.hoisting import hoisted
from fp8flax._compat.max_dtype import differentiating, is_max_dtype, of_floats, to_floats
from fp8flax._core.names import KERNEL_FORWARD_NAME, RESIDUAL_NAMES
from fp8flax._core.options import check_no_train_state
from fp8flax._core.state.tree import enter, from_max, map_state
from fp8flax._core.types import PyTree


def value_and_grad(
    fun: Callable[..., PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function like ``jax.value_and_grad`` for variables that hold FP8 scaling state.

    A differentiated argument may contain the collection ``_overwrite_with_gradient``, or be the collection
    itself, or be any tree with states of ``init_state``. Integers beside the state get no gradient
    (``float0``).

    The gradient of the scaling state is its next value: the state of one call on all the data, however
    often a layer ran (shared weights, a scan over microbatches, ``jax.vmap`` over examples,
    ``jax.shard_map`` over devices). A layer that got no gradient keeps its state. A tensor that held a NaN
    or an Inf leaves no trace in its history.

    Raises:
        TypeError: (when called) scaling state is not float32.

    Warns:
        UserWarning: (when called) in the body of ``lax.scan``, or of another loop, whose carry does not
            have the state. Then nothing merges the states of the passes; see ``accumulate_gradients``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> def loss(variables, x):
        ...     return jnp.sum(layer.apply(variables, x) + layer.apply(variables, 3 * x))
        >>> value, grads = fp8.value_and_grad(loss)(variables, jnp.ones((2, 4)))
        >>> state = grads["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]
        >>> state["input_scale"], state["input_amax_history"][:2]
        (Array([1.], dtype=float32), Array([3., 0.], dtype=float32))
    """
    positions = tuple(argnums) if isinstance(argnums, Sequence) else (argnums,)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        entered, leave = list(args), {}
        for i in {i % len(args) for i in positions if args}:  # JAX reports wrong positions.
            check_no_train_state(args[i])
            entered[i], leave[i] = enter(args[i])
        # JAX takes the dtype that merges by maximum for an integer. Arguments without it are checked here.
        stateless = [entered[i] for i in leave if not any(map(is_max_dtype, jax.tree.leaves(entered[i])))]
        allows_int = allow_int or len(stateless) < len(leave)
        if allows_int and not allow_int:
            jax.eval_shape(jax.grad(lambda _: 0.0), stateless)
        jax_value_and_grad = jax.value_and_grad(fun, positions, has_aux, holomorphic, allows_int)
        with differentiating():
            value, grads = jax_value_and_grad(*entered, **kwargs)
        grads = tuple(leave[i % len(args)](g) for i, g in zip(positions, grads))
        return from_max(value), grads if isinstance(argnums, Sequence) else grads[0]

    return value_and_grad_fun


def grad(
    fun: Callable[..., PyTree],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function like ``jax.grad`` that returns the gradients of ``value_and_grad``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.grad(lambda x: x**2)(3.0)
        Array(6., dtype=float32, weak_type=True)
    """
    return without_value(value_and_grad(fun, argnums, has_aux, holomorphic, allow_int), has_aux)


def without_value(value_and_grad_fun: Callable[..., PyTree], has_aux: bool) -> Callable[..., PyTree]:
    """Returns a function that computes gradients, and with ``has_aux`` auxiliary data, but no value."""

    @functools.wraps(value_and_grad_fun)
    def grad_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def accumulate_gradients(fun: Callable[..., PyTree], has_aux: bool = False) -> Callable[..., PyTree]:
    """Returns a function that computes ``value_and_grad`` of a mean over microbatches, one at a time.

    The scaling state is that of one call on all microbatches, and the gradients of parameters are averaged
    in float32: for a mean over examples and equal sizes, they are those of one large batch.

    Kernels are quantized once for all microbatches, unless ``fun`` has side effects, such as
    ``jax.debug.print``. Meanwhile their codes stay in memory. Call the function under ``jax.jit`` or
    ``nnx.jit``; otherwise each call compiles again.

    ``fun(variables, microbatch)`` returns a scalar, or with ``has_aux`` a pair ``(scalar, aux)``.

    Returns:
        A function of ``(variables, microbatches)`` with the results of ``value_and_grad``, but zeros as the
        gradients of integers, and ``float0`` of random keys. The ``aux`` of all microbatches are stacked.
        For several arguments, pass a tuple of them as ``variables``. The first dimension of each leaf of
        ``microbatches`` is their number, as in ``jax.lax.scan``; ``jax.random.split`` makes a key for each.

    Raises:
        ValueError: (when called) there is no microbatch, or the first dimensions differ.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((8, 4))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> microbatches = jnp.arange(1.0, 5.0)[:, None, None] * x.reshape(4, 2, 4)
        >>> step = fp8.accumulate_gradients(lambda v, x: jnp.mean(layer.apply(v, x) ** 2))
        >>> value, grads = step(variables, microbatches)
        >>> grads["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"][:2]
        Array([4., 0.], dtype=float32)
    """

    @functools.wraps(fun)
    def accumulated(variables: PyTree, microbatches: PyTree) -> PyTree:
        check_no_train_state(variables)
        return accumulate(lambda v, _, x: (fun(v, x), None), variables, None, microbatches, has_aux)[:2]

    return accumulated


# The codes, scales and amaxes of kernels are computed once for all microbatches.
_IS_HOISTED = jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES, KERNEL_FORWARD_NAME)


def accumulate(
    fun: Callable[..., PyTree], variables: PyTree, carry: PyTree, microbatches: PyTree, has_aux: bool
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns value, gradients and last carry of a mean over microbatches, see ``accumulate_gradients``.

    ``fun(variables, carry, microbatch)`` returns ``(value, carry)``, or ``((value, aux), carry)``.
    """
    num, *others = {next(iter(np.shape(leaf)), 0) for leaf in jax.tree.leaves(microbatches)} or {0}
    if not num or others:
        raise ValueError(
            "The leaves of microbatches must share a first dimension, their number, of 1 or more; got "
            f"shapes {jax.tree.map(np.shape, microbatches)}. Stack a list of microbatches with jnp.stack."
        )

    def step(entered: PyTree, varying: PyTree) -> PyTree:
        total, carry, microbatch = varying

        def loss(entered: PyTree) -> PyTree:
            out, new_carry = from_max(fun(entered, carry, microbatch))
            value, aux = out if has_aux else (out, None)
            # Divided before the backward pass, so that output gradients equal those of one large batch.
            return value / num, (new_carry, aux)

        (value, (carry, aux)), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(entered)
        return (jax.tree.map(_add, total, grads), carry), (value, aux)

    # One jitted function also for a caller without jit: otherwise jax_debug_infs would find the -inf that
    # marks missing state.
    @partial(jax.jit, inline=True)
    def run(variables: PyTree, carry: PyTree, microbatches: PyTree) -> PyTree:
        variables = jax.tree.map(jnp.asarray, from_max(variables))
        entered, leave = enter(variables)
        total = jax.tree.map(_empty_sum, entered)
        # Computes what ``_IS_HOISTED`` names once, before the loop.
        example = total, carry, jax.tree.map(lambda x: jnp.asarray(x)[0], microbatches)
        hoisted_step = hoisted(step, entered, example, _IS_HOISTED)
        (total, carry), (value, aux) = lax.scan(
            lambda before, x: hoisted_step((*before, x)), (total, carry), microbatches
        )
        grads = leave(jax.tree.map(_as_cotangent, total, entered))
        return grads, carry, jnp.sum(value, axis=0), aux

    with differentiating():
        grads, carry, value, aux = run(variables, carry, microbatches)
    return (value, aux) if has_aux else value, grads, carry


def _empty_sum(leaf: jax.Array) -> jax.Array:
    """Returns the start of a sum in float32 or wider, or of a maximum in float32 for state."""
    if is_max_dtype(leaf):
        return jnp.full_like(to_floats(leaf), -jnp.inf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape)  # unused
    return jnp.zeros_like(leaf, dtype=jnp.float32 if leaf.dtype.itemsize < 4 else leaf.dtype)


def _as_cotangent(total: jax.Array, leaf: jax.Array) -> ArrayLike:
    """Returns the sum or the maximum in the dtype of ``leaf``."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.zeros(leaf.shape, jax.dtypes.float0)
    return of_floats(leaf.dtype, total) if is_max_dtype(leaf) else total.astype(leaf.dtype)


def _add(total: jax.Array, grad: jax.Array) -> jax.Array:
    """Returns ``total`` with one more gradient: a sum, or a maximum for state."""
    if is_max_dtype(grad):
        return jnp.maximum(total, to_floats(grad))
    return total if grad.dtype == jax.dtypes.float0 else total + grad.astype(total.dtype)


def pmean_gradients(grads: PyTree, axis_name: Hashable) -> PyTree:
    """Averages gradients over a mapped axis, or a tuple of axes; takes the maximum of scaling state.

    Use it in a loop that computes a gradient for each device and reduces it by hand, in ``jax.pmap`` or in
    ``jax.shard_map`` with ``check_vma=False``. With the default checks of ``jax.shard_map``, and under
    ``jax.jit`` on sharded arrays, the state is already that of all the data.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> state = {"input_scale": jnp.ones((2, 1)), "input_amax_history": jnp.array([[3.0], [5.0]])}
        >>> grads = {"params": jnp.array([1.0, 2.0]), "_overwrite_with_gradient": state}
        >>> reduced = jax.vmap(lambda g: fp8.pmean_gradients(g, "data"), axis_name="data")(grads)
        >>> reduced["params"], reduced["_overwrite_with_gradient"]["input_amax_history"][0]
        (Array([1.5, 1.5], dtype=float32), Array([5.], dtype=float32))

    Source: ``jax.lax.pmean``, which would average the state as well.
    """

    def mean(x: jax.Array) -> jax.Array:
        return x if x.dtype == jax.dtypes.float0 else lax.pmean(x, axis_name)

    return map_state(lambda x: lax.pmax(x, axis_name), mean, grads)
