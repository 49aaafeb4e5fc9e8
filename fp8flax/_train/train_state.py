"""Train state that overwrites the scaling state with its gradient; loss scale that leaves it unscaled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import flax.core
import flax.training.dynamic_scale
import flax.training.train_state
import jax
import jax.numpy as jnp
import optax
from jax.dtypes import float0

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_function, check_optimizer
from fp8flax._core.state.tree import StateTree, from_max, has_state, map_state, merge_by_max
from fp8flax._core.types import PyTree
from fp8flax._train.check import checked_next_state
from fp8flax._train.gradients import pmean_gradients, value_and_grad


class DynamicScale(flax.training.dynamic_scale.DynamicScale):
    """Flax's ``DynamicScale`` for variables with FP8 scaling state, which must not be scaled.

    The state in the gradients is that of ``fp8flax.value_and_grad``. All else is as in Flax's class.

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
    """

    def value_and_grad(
        self,
        fun: Callable[..., PyTree],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Hashable | None = None,
    ) -> Callable[..., flax.training.dynamic_scale.DynamicScaleResult]:
        """Returns a function that returns a ``DynamicScaleResult``, with the gradients in float32.

        The arguments are those of Flax's method. ``axis_name`` reduces by ``fp8flax.pmean_gradients``.
        """

        def scaled_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
            value, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), None)
            return jnp.asarray(value, jnp.float32) * self.scale, aux

        @functools.wraps(fun)
        def value_and_grad_fun(*args: PyTree, **kwargs: PyTree) -> PyTree:
            (value, aux), grads = value_and_grad(scaled_fun, argnums, has_aux=True)(*args, **kwargs)
            grads = map_state(  # an integer has no gradient, and the dtype float0
                lambda s: s, lambda g: g if g.dtype == float0 else g.astype(jnp.float32) / self.scale, grads
            )
            if axis_name is not None:
                grads = pmean_gradients(grads, axis_name)
            finite = map_state(lambda s: True, lambda g: g.dtype == float0 or jnp.isfinite(g).all(), grads)
            all_finite = functools.reduce(jnp.logical_and, jax.tree.leaves(finite), True)
            slope = jnp.where(all_finite, 1.0, jnp.nan)
            # Flax's method computes the next scale, from a gradient that is as finite as all gradients.
            after = super(DynamicScale, self).value_and_grad(lambda x: slope * x)(0.0)
            value = (value / self.scale, aux) if has_aux else value / self.scale
            return after._replace(aux=value, grad=grads)

        return value_and_grad_fun


@dataclasses.dataclass(frozen=True)
class _MergingApply:
    """Calls ``apply_fn(variables, …)`` with scaling state whose gradients merge by maximum.

    Two of one ``apply_fn`` are equal, so that ``jax.jit`` does not trace a step again.
    """

    apply_fn: Callable[..., PyTree]

    def __call__(self, variables: PyTree, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return from_max(self.apply_fn(merge_by_max(variables), *args, **kwargs))


class TrainState(flax.training.train_state.TrainState):
    """Flax ``TrainState`` that also updates FP8 scaling state, and keeps every other collection.

    ``params`` is either a bare tree of parameters or a whole dict of variables. In a dict of variables

    * ``params`` is the only collection that the optimizer sees.
    * ``_overwrite_with_gradient`` is replaced by its gradient.
    * other collections (``batch_stats``, …) stay unchanged until you ``replace`` them.

    ``apply_fn`` merges scaling state by maximum, so plain ``jax.grad`` of a loss that calls ``apply_fn``
    once is correct, but not if it is taken outside of ``jax.shard_map`` with ``check_vma=False``. Use
    ``fp8flax.value_and_grad`` for a loss that calls it several times.

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
    """

    def apply_gradients(self, *, grads: PyTree, **kwargs: PyTree) -> TrainState:
        """Returns the train state after one step.

        Args:
            grads: gradient with respect to ``params``. If ``params`` has scaling state, ``grads`` must have
                it too. Collections other than these two may be missing.
            **kwargs: further fields to ``replace``.

        Raises:
            TypeError: the gradient of scaling state is not float32.
            ValueError: a gradient is missing, or no step can make the scaling state in it. Under
                ``jax.jit`` its scales become NaN, so the next loss is NaN; see ``fp8flax.check_state``.
        """
        if not (isinstance(self.params, Mapping) and PARAMS in self.params):  # bare parameters
            return super().apply_gradients(grads=grads, **kwargs)
        for name in (PARAMS, OVERWRITE_WITH_GRADIENT):
            if name in self.params and name not in grads:
                raise ValueError(
                    f"grads has no {name!r}, so it would never change. Differentiate with respect to the "
                    "whole of state.params. To keep the old scaling state on purpose, pass it in grads."
                )
        updates, opt_state = self.tx.update(grads[PARAMS], self.opt_state, self.params[PARAMS])
        changed = {PARAMS: optax.apply_updates(self.params[PARAMS], updates)}
        if OVERWRITE_WITH_GRADIENT in self.params:
            old, new = ({OVERWRITE_WITH_GRADIENT: x[OVERWRITE_WITH_GRADIENT]} for x in (self.params, grads))
            changed |= checked_next_state(old, new)
        params = flax.core.copy(self.params, changed)
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable[..., PyTree], params: PyTree, tx: Any, **kwargs: Any) -> Any:
        """Returns a train state at step 0.

        Args:
            apply_fn: usually ``model.apply``.
            params: a dict of variables (the result of ``model.init``), or a bare tree of parameters.
            tx: an Optax gradient transformation. It gets the parameters only, so masks and labels in it are
                made for them.
            **kwargs: further fields of a subclass.

        Raises:
            TypeError: scaling state in ``params`` is not float32; or ``apply_fn`` is not a function, or
                ``tx`` not an optimizer.
            ValueError: the optimizer would see scaling state; or a scale and its history do not fit.
        """
        if apply_fn is not None:
            check_function("apply_fn", apply_fn, "model.apply")
        check_optimizer(tx)
        optimized = params
        if isinstance(params, Mapping) and PARAMS in params:
            optimized = params[PARAMS]
            StateTree.of({OVERWRITE_WITH_GRADIENT: params.get(OVERWRITE_WITH_GRADIENT)})  # checks it
        if has_state(optimized):
            raise ValueError(
                "The optimizer would see FP8 scaling state: it has no 'params' next to it, or lies deeper. "
                "Pass one dict of variables, {'params': …, '_overwrite_with_gradient': …}; for several "
                "models one TrainState each, or one module around them."
            )
        try:
            opt_state = tx.init(optimized)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "tx refuses the parameters. It gets variables['params'] alone, so make masks and labels "
                f"for these, and not for all variables. Optax's error: {error}"
            ) from error
        merging = _MergingApply(apply_fn)
        return cls(step=0, apply_fn=merging, params=params, tx=tx, opt_state=opt_state, **kwargs)
