"""Trains an NNX model: gradients that hold its next scaling state, and the optimizer that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence

import jax
import optax
from flax import nnx

from fp8flax._compat.max_dtype import differentiating, from_max_dtype, is_max_dtype
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import line_search
from fp8flax._core.options import check_optimizer
from fp8flax._core.state.tree import enter, from_max
from fp8flax._core.types import PyTree
from fp8flax._nnx.ops import OverwriteWithGradient, check_model, errors_search, is_node, set_state, state_of
from fp8flax._train.check import checked_next_state
from fp8flax._train.gradients import accumulate, without_value


class _StateGradient(OverwriteWithGradient, nnx.Param[jax.Array]):
    """Scaling state in a gradient, where it counts as the gradient of a parameter, too.

    Otherwise ``nnx.Optimizer.update`` would leave the state out, and it would never change. With this type
    it raises an error, because the model has no such parameter.
    """


def _mark(grads: PyTree) -> PyTree:
    def mark(x: PyTree) -> PyTree:
        return _StateGradient(x.get_value()) if isinstance(x, OverwriteWithGradient) else x

    return jax.tree.map(mark, grads, is_leaf=is_node)


def _without_max_dtype(tree: PyTree) -> PyTree:
    """Casts the arrays that merge by maximum to float32, in a tree and in the variables of its modules."""
    nodes = list(filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)))
    nnx.update(nodes, from_max(nnx.state(nodes, lambda _, x: any(map(is_max_dtype, jax.tree.leaves(x))))))
    return jax.tree.map(from_max_dtype, tree, is_leaf=is_node)


def value_and_grad(
    f: Callable[..., PyTree],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function like ``nnx.value_and_grad`` for models that hold FP8 scaling state.

    The gradient of the scaling state is its next value; see ``fp8flax.value_and_grad``. The model itself
    keeps its state until ``Optimizer.update`` or ``overwrite_state``. The gradient of a model always has
    the variables of ``OverwriteWithGradient``, so ``nnx.Optimizer.update`` refuses it: its keys are not
    those of the parameters.

    Raises:
        TypeError: (when called) scaling state is not float32; or an argument is passed that ``f`` takes by
            name alone, which ``nnx.value_and_grad`` refuses, too.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> def loss(layer, x):
        ...     return jnp.sum(layer(x) + layer(3 * x))
        >>> value, grads = fp8nnx.value_and_grad(loss)(layer, jnp.ones((2, 4)))
        >>> grads["dot_general"]["input_amax_history"][:2]
        Array([3., 0.], dtype=float32)
    """
    differentiated = argnums if isinstance(argnums, Sequence) else (argnums,)
    wanted = [d if isinstance(d, nnx.DiffState) else nnx.DiffState(d, nnx.Param) for d in differentiated]

    @functools.wraps(f)
    def value_and_grad_f(*args: PyTree, **kwargs: PyTree) -> PyTree:
        if kwargs:  # as nnx.value_and_grad, which differentiates arguments that are passed by name, too
            bound = inspect.signature(f).bind(*args, **kwargs)
            bound.apply_defaults()
            if only_by_name := [name for name in bound.kwargs if name in kwargs]:
                raise TypeError(
                    f"f takes the arguments {only_by_name} by name alone. Bind them before: "
                    "value_and_grad(functools.partial(f, name=value))."
                )
            args = bound.args
        positions = [d.argnum + len(args) if d.argnum < 0 else d.argnum for d in wanted]
        filters = [nnx.Any(d.filter, OverwriteWithGradient) for d in wanted]
        entered_state, leave = enter(state_of({i: args[i] for i in positions}))

        def of_entered(*args_and_entered: PyTree) -> PyTree:
            *args, entered = args_and_entered  # the modules are NNX's copies
            nodes = {i: args[i] for i in positions}
            # f sees the entered state, an argument of its own: its gradient is the next state. That of the
            # models gets zeros as its gradient, which ``leave`` overwrites below.
            before = state_of(nodes)
            set_state(nodes, entered)
            with errors_search(nodes):
                out = f(*args)
            # A module may keep or return state that it read, which must not merge by maximum any more.
            out, _ = _without_max_dtype((out, args))
            set_state(nodes, before)
            return out

        nnx_value_and_grad = nnx.value_and_grad(
            of_entered,
            argnums=(*map(nnx.DiffState, positions, filters), len(args)),
            has_aux=has_aux,
            holomorphic=holomorphic,
            # JAX takes the dtype that merges by maximum for an integer.
            allow_int=allow_int or bool(entered_state[OVERWRITE_WITH_GRADIENT]),
            # Only graph mode has filters that choose what is differentiated; nnx.set_graph_mode is ignored.
            graph=True,
            graph_updates=True,
        )
        with differentiating():
            value, (*grads, of_state) = nnx_value_and_grad(*args, entered_state)
        # Both have the state of a module that two arguments share once.
        set_state(dict(zip(positions, grads)), leave(of_state))
        marked = tuple(map(_mark, grads))
        return value, marked if isinstance(argnums, Sequence) else marked[0]

    return value_and_grad_f


def grad(
    f: Callable[..., PyTree],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., PyTree]:
    """Returns a function like ``nnx.grad`` that returns the gradients of ``value_and_grad``.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> sorted(fp8nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((2, 4)))))(layer))
        ['bias', 'dot_general', 'kernel']
    """
    return without_value(value_and_grad(f, argnums, has_aux, holomorphic, allow_int), has_aux)


def accumulate_gradients(f: Callable[..., PyTree], has_aux: bool = False) -> Callable[..., PyTree]:
    """Returns a function that computes ``value_and_grad`` of a mean over microbatches, one at a time.

    See ``fp8flax.accumulate_gradients``, with a model in the place of ``variables``. Other changes of a
    microbatch to the model (statistics, random number generators) stay in it. ``f`` may not add variables.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> microbatches = jnp.arange(1.0, 5.0)[:, None, None] * jnp.ones((4, 2, 4))
        >>> step = fp8nnx.accumulate_gradients(lambda layer, x: jnp.mean(layer(x) ** 2))
        >>> value, grads = step(layer, microbatches)
        >>> grads["dot_general"]["input_amax_history"][:2]
        Array([4., 0.], dtype=float32)
    """

    @functools.wraps(f)
    def accumulated(model: PyTree, microbatches: PyTree) -> PyTree:
        check_model(model)
        filters = nnx.Param, OverwriteWithGradient, ...
        graphdef, *states = nnx.split(model, *filters)
        params, scaling, rest = states

        def of_variables(variables: PyTree, rest: PyTree, microbatch: PyTree) -> PyTree:
            # A copy has variables of this trace, to which f may write.
            merged = nnx.merge(graphdef, *variables.values(), rest, copy=True)
            return f(merged, microbatch), nnx.state(merged, *filters)[-1]

        variables = {PARAMS: params, OVERWRITE_WITH_GRADIENT: scaling}
        value, grads, rest = accumulate(of_variables, variables, rest, microbatches, has_aux)
        nnx.update(model, rest)
        return value, _mark(nnx.merge_state(*grads.values()))

    return accumulated


def overwrite_state(model: nnx.Module, grads: PyTree) -> None:
    """Replaces the scaling state of a model by its gradient, in a loop without our ``Optimizer``.

    ``grads`` are those that ``value_and_grad`` returned for the model. An ``nnx.Optimizer`` takes the
    others, ``nnx.state(grads, nnx.Not(OverwriteWithGradient))``.

    Raises:
        TypeError: ``model`` is not an NNX module, or the gradient of scaling state is not float32.
        ValueError: the gradient has no state, or one that no step can make. Under ``jax.jit`` its scale
            becomes NaN instead, so that the next loss is NaN, and ``check_state`` names the layer.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> grads = fp8nnx.grad(lambda layer: jnp.sum(layer(jnp.full((2, 4), 3.0))))(layer)
        >>> fp8nnx.overwrite_state(layer, grads)
        >>> layer.dot_general.input_amax_history.get_value()[:2]
        Array([3., 0.], dtype=float32)

    Source: the guide of ``flax.linen.fp8_ops``, which overwrites a collection.
    """
    check_model(model)
    set_state(model, checked_next_state(state_of(model), state_of(grads)))


class Optimizer(nnx.Optimizer):
    """``nnx.Optimizer`` that updates the parameters and overwrites the FP8 scaling state.

    Optax sees the variables of ``wrt``, which must not include scaling state: momentum, weight decay,
    clipping and norms are those of the parameters. The state is replaced as in ``overwrite_state``.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, optax, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> optimizer = fp8nnx.Optimizer(layer, optax.adamw(1e-3))
        >>> @nnx.jit
        ... def train_step(layer, optimizer, x):
        ...     loss, grads = fp8nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(layer)
        ...     optimizer.update(layer, grads)
        ...     return loss
        >>> loss = train_step(layer, optimizer, jnp.full((2, 4), 3.0))
        >>> layer.dot_general.input_amax_history.get_value()[:2]
        Array([3., 0.], dtype=float32)
    """

    def __init__(
        self, model: nnx.Module, tx: optax.GradientTransformation, *, wrt: nnx.filterlib.Filter = nnx.Param
    ):
        check_optimizer(tx)
        check_model(model)
        if state_of(nnx.state(model, wrt))[OVERWRITE_WITH_GRADIENT]:
            raise ValueError(
                f"wrt must choose parameters; got {wrt!r}, which also chooses FP8 scaling state (variables "
                "of OverwriteWithGradient), and the optimizer must not see it. Pass nnx.Param, or "
                "nnx.All(…, nnx.Not(fp8flax.nnx.OverwriteWithGradient))."
            )
        super().__init__(model, tx, wrt=wrt)

    def update(self, model: nnx.Module, grads: PyTree, /, **kwargs: PyTree) -> PyTree:
        """Updates the parameters as ``nnx.Optimizer``, and the scaling state as ``overwrite_state``.

        Optax gets the keyword arguments, such as ``grad``, ``value`` and ``value_fn`` of a line search,
        without the scaling state. ``value_fn`` is a function of the parameters.
        """
        check_model(model)
        state = checked_next_state(state_of(model), state_of(grads))
        others = nnx.Not(OverwriteWithGradient)
        kwargs = {k: nnx.state(x, others) if isinstance(x, nnx.State) else x for k, x in kwargs.items()}
        with line_search("value_fn" in kwargs):
            result = super().update(model, nnx.state(grads, others), **kwargs)
        set_state(model, state)
        return result
