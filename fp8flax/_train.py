"""Training: gradients that merge scaling state by maximum, and the train state that keeps it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import flax.core
import flax.training.dynamic_scale
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from fp8flax._check import WHAT_TO_CALL, overwrite
from fp8flax._state import (
    OVERWRITE_WITH_GRADIENT,
    check_state_dtype,
    has_state,
    key_name,
    map_state,
    merge_by_max,
    next_state,
    unmerge,
)
from fp8flax._transforms import current_manual_axes, merged_in


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """``jax.value_and_grad`` for functions of variables that hold FP8 scaling state.

    Wherever a differentiated argument holds the collection ``_overwrite_with_gradient`` (or is it), the
    collection's gradient is its next value: that of one call on all the data, however often a layer ran
    (shared weights, scanned microbatches, ``jax.vmap`` over examples, ``jax.shard_map`` over devices). A
    layer that got no gradient keeps its state, and a tensor that held a NaN or an Inf leaves no trace in
    its history. All other gradients are those of ``jax.value_and_grad``.

    Args:
        fun: a function whose differentiated arguments are trees of arrays; returns a scalar, or a pair
            ``(scalar, aux)`` with ``has_aux``.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns auxiliary data.
        holomorphic: passed to JAX.
        allow_int: passed to JAX.

    Returns:
        A function with the arguments of ``fun`` that returns ``(value, gradients)``.

    Raises:
        TypeError: (when called) scaling state is not float32.

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

    Source: signature of ``jax.value_and_grad``.
    """
    single = not isinstance(argnums, Sequence)
    positions = (operator.index(argnums),) if single else tuple(map(operator.index, argnums))  # type: ignore

    def merged_fun(*args: Any, **kwargs: Any) -> Any:
        merged = list(args)
        for i in positions:
            merged[i] = merge_by_max(args[i])
        with merged_in(current_manual_axes()):
            return unmerge(fun(*merged, **kwargs))

    jax_value_and_grad = jax.value_and_grad(merged_fun, positions, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        # Inside of another one, the state comes as that has merged it; it is not differentiated twice.
        args = tuple(unmerge(arg) if i in positions else arg for i, arg in enumerate(args))
        value, grads = jax_value_and_grad(*args, **kwargs)
        grads = tuple(next_state(args[i], g, poisonable=False) for i, g in zip(positions, grads))
        return value, grads[0] if single else grads

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """``jax.grad`` for functions of variables that hold FP8 scaling state; see ``value_and_grad``.

    Args:
        fun: as for ``value_and_grad``.
        argnums: which positional arguments to differentiate.
        has_aux: whether ``fun`` returns auxiliary data.
        holomorphic: passed to JAX.
        allow_int: passed to JAX.

    Returns:
        A function with the arguments of ``fun`` that returns the gradients, or with ``has_aux``
        ``(gradients, aux)``.

    Raises:
        TypeError: (when called) scaling state is not float32.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.grad(lambda x: x**2)(3.0)
        Array(6., dtype=float32, weak_type=True)

    Source: signature of ``jax.grad``.
    """
    fun_with_value = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, grads = fun_with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def accumulate_gradients(fun: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
    """``value_and_grad`` of a mean over microbatches, one microbatch in memory at a time.

    Every microbatch is cast with the same scales, and the scaling state is that of one call on all of them;
    the gradients are averaged in float32. With a loss that is a mean over examples, and microbatches of one
    size, both are those of one large batch. Call it under ``jax.jit``: un-jitted, each call compiles anew.

    Args:
        fun: ``fun(variables, microbatch)``; returns a scalar, or a pair ``(scalar, aux)`` with ``has_aux``.
        has_aux: whether ``fun`` returns auxiliary data.

    Returns:
        A function of two positional arguments, ``(variables, microbatches)``, that returns ``(value,
        gradients)``, or with ``has_aux`` ``((value, aux), gradients)``: the mean value, the gradient with
        respect to ``variables`` in their dtypes, and ``aux`` of each microbatch, stacked. The leaves of
        ``microbatches`` have the number of microbatches as their first dimension, as those of
        ``jax.lax.scan``; a key for each comes from ``jax.random.split``.

    Raises:
        TypeError: (when called) scaling state is not float32.
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

    Source: none; ``optax.MultiSteps`` accumulates over steps instead, each with a state of its own.
    """

    @functools.wraps(fun)
    def accumulated(variables: Any, microbatches: Any) -> Any:
        sizes = {next(iter(np.shape(leaf)), 0) for leaf in jax.tree.leaves(microbatches)}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "The leaves of microbatches must share a first dimension, the number of microbatches, of 1 "
                f"or more; got shapes {jax.tree.map(np.shape, microbatches)}. Reshape a batch to "
                "(microbatches, -1, …)."
            )
        num = sizes.pop()

        def merged_fun(variables: Any, microbatch: Any) -> Any:
            with merged_in(current_manual_axes()):
                value = unmerge(fun(merge_by_max(variables, resolve=False), microbatch))
            # Divided before the backward pass: output gradients are then as large as in one large batch.
            return (value[0] / num, value[1]) if has_aux else value / num

        def step(total: Any, microbatch: Any) -> Any:
            value, grads = jax.value_and_grad(merged_fun, has_aux=has_aux, allow_int=True)(
                variables, microbatch
            )
            return map_state(jnp.maximum, add, total, grads), value

        def add(total: Any, grad: Any) -> Any:
            return total if grad.dtype == jax.dtypes.float0 else total + grad.astype(total.dtype)

        def zeros(leaf: Any) -> Any:
            leaf = jnp.asarray(leaf)
            is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
            return jnp.zeros_like(leaf, dtype=jnp.float32 if is_narrow else leaf.dtype)

        # As one, also un-jitted: what stands for no state at all is no Inf for jax_debug_infs to find.
        @partial(jax.jit, inline=True)
        def run(variables: Any, microbatches: Any) -> Any:
            start = map_state(lambda leaf: jnp.full_like(leaf, -jnp.inf), zeros, variables)
            total, value = lax.scan(step, start, microbatches)
            total = jax.tree.map(
                lambda total, leaf: total.astype(jnp.asarray(leaf).dtype), total, variables
            )
            return next_state(variables, total), value

        def gradient(total: Any) -> Any:
            is_float = jnp.issubdtype(total.dtype, jnp.inexact)
            return total if is_float else np.zeros(total.shape, jax.dtypes.float0)

        total, value = run(variables, microbatches)
        grads = jax.tree.map(gradient, total)
        if has_aux:
            return (jnp.sum(value[0], axis=0), value[1]), grads
        return jnp.sum(value, axis=0), grads

    return accumulated


def pmean_gradients(grads: Any, axis_name: Any) -> Any:
    """Averages gradients over devices, and takes the maximum of what is scaling state.

    For loops that compute a gradient for each device and reduce it by hand, in ``jax.pmap`` or in
    ``jax.shard_map`` with ``check_vma=False``. (With its default checks, and under ``jax.jit`` on sharded
    arrays, the state is already that of all the data.)

    A device whose own data held a NaN or an Inf, or that skipped a layer, has kept its old history, while
    the others moved on by one step. The maximum of both is finite, the same everywhere, and not below any
    amax that either remembers.

    Args:
        grads: a tree of gradients that ``value_and_grad`` or ``grad`` returned, floats of any shapes.
        axis_name: the mapped axis, or a tuple of them.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> state = {"input_scale": jnp.ones((2, 1)), "input_amax_history": jnp.array([[3.0], [5.0]])}
        >>> grads = {"params": jnp.array([1.0, 2.0]), "_overwrite_with_gradient": state}
        >>> reduced = jax.vmap(lambda g: fp8.pmean_gradients(g, "data"), axis_name="data")(grads)
        >>> reduced["params"], reduced["_overwrite_with_gradient"]["input_amax_history"][0]
        (Array([1.5, 1.5], dtype=float32), Array([5.], dtype=float32))

    Source: ``jax.lax.pmean``, which would average the state as well.
    """

    def mean(x: Any) -> Any:  # but not of what stands for the gradient of an integer
        return x if x.dtype == jax.dtypes.float0 else lax.pmean(x, axis_name)

    return map_state(lambda x: lax.pmax(x, axis_name), mean, grads)


class DynamicScale(flax.training.dynamic_scale.DynamicScale):
    """Flax's ``DynamicScale`` for variables that hold FP8 scaling state, which is not a gradient to scale.

    The loss is multiplied by ``scale`` before the gradients are taken, which keeps those of float16 from
    vanishing, and the gradients are divided by it. A step whose gradients hold an Inf or a NaN multiplies
    ``scale`` by ``backoff_factor``, ``growth_interval`` steps without one by ``growth_factor``. The scaling
    state is the next one as ``fp8flax.value_and_grad`` returns it: neither divided nor averaged.

    (Flax's own class is put right by ``TrainState.apply_gradients``, where its scale is a power of two and
    the histories have two entries or more.)

    Attributes:
        growth_factor: as in Flax; powers of two lose nothing in rounding.
        backoff_factor: as in Flax.
        growth_interval: as in Flax.
        fin_steps: how many steps in a row had finite gradients.
        scale: what the loss is multiplied by.
        minimum_scale: the smallest ``scale``; None for no limit.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dtype=jnp.float16, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> def loss(variables, x):
        ...     return jnp.mean(layer.apply(variables, x).astype(jnp.float32) ** 2)
        >>> scale, is_finite, value, grads = fp8.DynamicScale().value_and_grad(loss)(
        ...     variables, jnp.full((2, 4), 3.0)
        ... )
        >>> grads["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"][:2]
        Array([3., 0.], dtype=float32)

    Source: ``flax.training.dynamic_scale.DynamicScale``.
    """

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Callable[..., flax.training.dynamic_scale.DynamicScaleResult]:
        """``fp8flax.value_and_grad`` of the scaled loss.

        Args:
            fun: as for ``fp8flax.value_and_grad``.
            argnums: which positional arguments to differentiate.
            has_aux: whether ``fun`` returns auxiliary data.
            axis_name: the mapped axis, or axes, over which to reduce with ``fp8flax.pmean_gradients``.

        Returns:
            A function with the arguments of ``fun`` that returns a ``DynamicScaleResult``: the next
            ``DynamicScale``, whether all gradients are finite (the state always is), the value (with
            ``has_aux`` the pair), and the gradients, in float32.
        """

        @functools.wraps(fun)
        def scaled_fun(*args: Any, **kwargs: Any) -> Any:
            value, *aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs),)
            scaled = jnp.asarray(value, jnp.float32) * self.scale
            return (scaled, *aux) if has_aux else scaled

        @functools.wraps(fun)
        def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
            value, grads = value_and_grad(scaled_fun, argnums, has_aux)(*args, **kwargs)
            value = (value[0] / self.scale, value[1]) if has_aux else value / self.scale
            grads = map_state(lambda s: s, lambda g: jnp.asarray(g, jnp.float32) / self.scale, grads)
            if axis_name is not None:
                grads = pmean_gradients(grads, axis_name)
            finite = map_state(lambda s: np.True_, lambda g: jnp.all(lax.is_finite(g)), grads)
            is_finite = functools.reduce(jnp.logical_and, jax.tree.leaves(finite), jnp.array(True))
            return flax.training.dynamic_scale.DynamicScaleResult(
                self._after(is_finite), is_finite, value, grads
            )

        return value_and_grad_fun

    def _after(self, is_finite: jax.Array) -> DynamicScale:
        grows = self.fin_steps == self.growth_interval
        largest = np.finfo(np.float32).max
        grown = jnp.where(grows, jnp.minimum(self.scale * self.growth_factor, largest), self.scale)
        smaller = self.scale * self.backoff_factor
        if self.minimum_scale is not None:
            smaller = jnp.maximum(smaller, self.minimum_scale)
        return self.replace(
            scale=jnp.where(is_finite, grown, smaller),
            fin_steps=jnp.where(grows | ~is_finite, 0, self.fin_steps + 1),
        )


@dataclasses.dataclass(frozen=True)
class _MergingApply:
    """``apply_fn(variables, …)`` with the scaling state in ``variables`` merged by maximum.

    A dataclass rather than a closure: two train states of the same model compare equal, so that a jitted
    step is not traced again.
    """

    apply_fn: Callable[..., Any]

    def __call__(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
        return unmerge(self.apply_fn(merge_by_max(variables), *args, **kwargs))


def _is_variables(params: Any) -> bool:
    return isinstance(params, Mapping) and "params" in params


def _replace(variables: Mapping[str, Any], **collections: Any) -> Mapping[str, Any]:
    if isinstance(variables, flax.core.FrozenDict):
        return variables.copy(collections)
    return {**variables, **collections}


class TrainState(flax.training.train_state.TrainState):
    """A Flax ``TrainState`` that keeps FP8 scaling state, and every other collection, as it should be.

    ``params`` is either a bare tree of parameters or a whole dict of variables. Of a dict of variables

    * ``params`` alone is seen by the optimizer: momentum, weight decay, clipping and norms never meet
      the scaling state;
    * ``_overwrite_with_gradient`` is replaced by its gradient, except that a layer that got no gradient
      keeps its state, and a tensor that held a NaN or an Inf its history;
    * other collections (``batch_stats``, …) stay as they are, until you ``replace`` them.

    ``apply_fn`` merges scaling state by maximum, so one ``apply`` under plain ``jax.grad`` is right; a
    loss that calls it several times needs ``fp8flax.value_and_grad``, and so does a gradient taken outside
    of ``jax.shard_map`` with ``check_vma=False``, which is refused there and would be wrong here.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> x = jnp.full((2, 4), 3.0)
        >>> variables = layer.init(jax.random.key(0), x)
        >>> state = fp8.TrainState.create(
        ...     apply_fn=layer.apply, params=variables, tx=optax.adamw(1e-3)
        ... )
        >>> grads = fp8.grad(lambda v: jnp.mean(state.apply_fn(v, x) ** 2))(state.params)
        >>> state = state.apply_gradients(grads=grads)
        >>> state.params["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"][:2]
        Array([3., 0.], dtype=float32)

    Source: ``flax.training.train_state.TrainState``.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> TrainState:
        """Returns the state after one step.

        Args:
            grads: gradient with respect to ``params``, same structure. With scaling state in ``params``
                the gradient must hold it too. Collections other than these two may be missing.
            **kwargs: further fields to ``replace``.

        Raises:
            TypeError: the gradient of scaling state is not float32.
            ValueError: the gradient of the scaling state is missing, or has other names or shapes.
        """
        if not _is_variables(self.params):
            return super().apply_gradients(grads=grads, **kwargs)
        if not _is_variables(grads):
            raise ValueError(
                "params is a dict of variables, so grads must be one with the key 'params'; got "
                f"{sorted(grads) if isinstance(grads, Mapping) else type(grads).__name__}. Differentiate "
                "with respect to the whole of state.params."
            )
        grads = flax.core.unfreeze(grads)
        if isinstance(self.params, flax.core.FrozenDict):
            grads = flax.core.freeze(grads)
        updates, opt_state = self.tx.update(grads["params"], self.opt_state, self.params["params"])
        changed = {"params": optax.apply_updates(self.params["params"], updates)}
        if OVERWRITE_WITH_GRADIENT in self.params:
            changed[OVERWRITE_WITH_GRADIENT] = self._next_scaling_state(grads)
        return self.replace(
            step=self.step + 1,
            params=_replace(self.params, **changed),
            opt_state=opt_state,
            **kwargs,
        )

    def _next_scaling_state(self, grads: Mapping[str, Any]) -> Any:
        old = {OVERWRITE_WITH_GRADIENT: self.params[OVERWRITE_WITH_GRADIENT]}
        if OVERWRITE_WITH_GRADIENT not in grads:
            raise ValueError(
                f"grads has no {OVERWRITE_WITH_GRADIENT!r}, so the FP8 scaling state would stand still. "
                "Differentiate with respect to the whole of state.params. To hold the state on purpose, "
                f"pass the old one: grads={{**grads, {OVERWRITE_WITH_GRADIENT!r}: "
                f"state.params[{OVERWRITE_WITH_GRADIENT!r}]}}."
            )
        new = {OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        if jax.tree.structure(old) != jax.tree.structure(new):
            raise ValueError(
                f"The gradient of {OVERWRITE_WITH_GRADIENT!r} has another structure than the state: "
                f"{jax.tree.structure(new)} instead of {jax.tree.structure(old)}."
            )
        kept, given_up = overwrite(old, new)
        if given_up:
            raise ValueError(
                f"The gradient of {given_up[0]} (and of {len(given_up) - 1} more) is not the next state: "
                "its past amaxes are not those of state.params. It was scaled, clipped, averaged or added "
                f"up with the other gradients, or belongs to other variables. {WHAT_TO_CALL} State from "
                "elsewhere is set with state.replace(params=…)."
            )
        return kept[OVERWRITE_WITH_GRADIENT]

    @classmethod
    def create(cls, *, apply_fn: Callable[..., Any], params: Any, tx: Any, **kwargs: Any) -> Any:
        """Returns a state at step 0.

        Args:
            apply_fn: usually ``model.apply``.
            params: a dict of variables (``model.init``'s result), or a bare tree of parameters.
            tx: an Optax gradient transformation; initialised on the parameters alone.
            **kwargs: further fields of a subclass.

        Raises:
            TypeError: scaling state in ``params`` is not float32.
            ValueError: scaling state lies where the optimizer would see it, or without parameters beside
                it; or the masks or labels in ``tx`` are for all variables, where its state shows that.
        """
        optimized = params
        if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params and "params" not in params:
            raise ValueError(
                f"params has {sorted(params)} and no 'params'. Pass the whole dict of variables that "
                f"model.init returned, {{'params': …, {OVERWRITE_WITH_GRADIENT!r}: …}}."
            )
        if _is_variables(params):
            optimized = params["params"]
            state = {OVERWRITE_WITH_GRADIENT: params.get(OVERWRITE_WITH_GRADIENT)}
            jax.tree_util.tree_map_with_path(check_state_dtype, state)
        if has_state(optimized):
            raise ValueError(
                "The optimizer would see FP8 scaling state: it lies deeper in params than the top level. "
                "Pass one dict of variables, {'params': …, '_overwrite_with_gradient': …}; several models "
                "need a TrainState each, or one module around them."
            )
        if not isinstance(apply_fn, _MergingApply):
            apply_fn = _MergingApply(apply_fn)
        return cls(
            step=0,
            apply_fn=apply_fn,
            params=params,
            tx=tx,
            opt_state=_init_optimizer(tx, optimized, params),
            **kwargs,
        )


def _init_optimizer(tx: Any, optimized: Any, variables: Any) -> Any:
    """Returns ``tx.init(optimized)``, unless the masks or labels of ``tx`` are for all of the variables."""
    opt_state = error = None
    try:
        opt_state = tx.init(optimized)
        fits = not _leaves_all_out(opt_state)
    except (KeyError, TypeError, ValueError) as raised:
        error, fits = raised, False
    if not fits and optimized is not variables:
        try:
            fits = not _takes_params(jax.eval_shape(tx.init, variables))
        except Exception:  # whatever tx is, it is not for these
            fits = True
        if not fits:
            raise ValueError(
                "The masks or labels in tx are for the whole dict of variables, but TrainState gives the "
                "optimizer variables['params'] alone, and keeps the other collections by itself. Make them "
                "for variables['params'], or with a function of that."
            ) from error
    if error is not None:
        raise error
    return opt_state


def _is_mask(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def _leaves_all_out(opt_state: Any) -> bool:
    """Tells whether the masks in an optimizer leave nothing to it that is as large as a parameter."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_mask)
    return any(map(_is_mask, leaves)) and not any(np.ndim(leaf) for leaf in leaves if not _is_mask(leaf))


def _takes_params(opt_state: Any) -> bool:
    """Tells whether an optimizer of all variables keeps something of those below ``params``."""
    leaves = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_is_mask)[0]
    kept = (path for path, leaf in leaves if not _is_mask(leaf) and np.ndim(leaf))
    return any("params" in map(key_name, path) for path in kept)
