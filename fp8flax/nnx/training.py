"""Trains an NNX model: gradients that hold its next scaling state, and the optimizer that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from fp8flax._compat.max_dtype import differentiating, from_max_dtype, is_max_dtype
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.state.tree import from_max, kept_tree, merge_by_max
from fp8flax._train.check import checked_next_state
from fp8flax._train.gradients import accumulate, without_value
from fp8flax.nnx.ops import OverwriteWithGradient
from fp8flax.nnx.variables import check_model, is_node, set_state, state_of


@contextmanager
def _replaced(nodes: Sequence[Any], f: Callable[[Any], Any]) -> Iterator[None]:
    """A context in which the scaling state of models is replaced by ``f`` of it."""
    before = []
    try:
        for node in nodes:
            before.append((node, state_of(node)))
            set_state(node, f(before[-1][1]))
        yield
    finally:
        # Restored in reverse order, because models may share modules.
        for node, state in reversed(before):
            set_state(node, state)


def _as_in(new: Any, old: Any) -> Any:
    """Returns the part of ``old`` at the paths of ``new``: NNX returns a shared module's gradient once."""
    flat = nnx.traversals.flatten_mapping(old)
    kept = {path: flat[path] for path in nnx.traversals.flatten_mapping(new)}
    return nnx.traversals.unflatten_mapping(kept) if kept else new


def _without_max_dtype(tree: Any) -> Any:
    """Casts the arrays that merge by maximum to float32, in a tree and in the variables of its modules."""
    for node in filter(is_node, jax.tree.leaves(tree, is_leaf=is_node)):
        inside = [node] if isinstance(node, nnx.Variable) else [x for _, x in nnx.iter_graph(node)]
        for variable in inside:
            value = variable.get_value() if isinstance(variable, nnx.Variable) else None
            if any(map(is_max_dtype, jax.tree.leaves(value))):
                variable.set_value(from_max(value))
    return jax.tree.map(from_max_dtype, tree, is_leaf=is_node)


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function like ``nnx.value_and_grad`` for models that hold FP8 scaling state.

    The gradient of the scaling state is its next value; see ``fp8flax.value_and_grad``. The model itself
    keeps its state until ``Optimizer.update`` or ``overwrite_state``. An ``nnx.Optimizer`` alone leaves the
    state as it is, without an error.

    The arguments are those of ``nnx.value_and_grad``. The gradient of a model is an ``nnx.State``, which
    always has the variables of ``OverwriteWithGradient``.

    Raises:
        TypeError: (when called) scaling state is not float32.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> def loss(layer, x):
        ...     return jnp.sum(layer(x) + layer(3 * x))
        >>> value, grads = fp8nnx.value_and_grad(loss)(layer, jnp.ones((2, 4)))
        >>> grads["dot_general"]["input_amax_history"][:2]
        Array([3., 0.], dtype=float32)

    Source: signature of ``nnx.value_and_grad``.
    """
    single = not isinstance(argnums, Sequence)
    wanted: list[Any] = [argnums] if single else list(argnums)  # type: ignore[arg-type]
    wanted = [d if isinstance(d, nnx.DiffState) else nnx.DiffState(d, nnx.Param) for d in wanted]
    positions = [d.argnum for d in wanted]
    with_state = [nnx.DiffState(d.argnum, nnx.Any(d.filter, OverwriteWithGradient)) for d in wanted]

    @functools.wraps(f)
    def merged_f(*args: Any, **kwargs: Any) -> Any:
        with _replaced([args[i] for i in positions], merge_by_max):
            out = f(*args, **kwargs)
        # A module may keep or return state that it read here, which must not have the dtype of the merge.
        _without_max_dtype((args, kwargs))
        return _without_max_dtype(out)

    nnx_value_and_grad = nnx.value_and_grad(
        merged_f,
        argnums=with_state[0] if single else tuple(with_state),
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        # Only graph mode has filters that choose what is differentiated, so nnx.set_graph_mode is ignored.
        graph=True,
        graph_updates=True,
    )

    @functools.wraps(f)
    def value_and_grad_f(*args: Any, **kwargs: Any) -> Any:
        if kwargs:  # as nnx.value_and_grad, which differentiates arguments that are passed by name, too
            bound = inspect.signature(f).bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        nodes = [args[i] for i in positions]
        # Inside of another value_and_grad the state is merged already. It is not differentiated twice.
        with _replaced(nodes, from_max):
            old = [state_of(node) for node in nodes]
            with differentiating():
                value, grads = nnx_value_and_grad(*args, **kwargs)
        for before, after in zip(old, [grads] if single else grads):
            new = state_of(after)
            set_state(after, kept_tree(_as_in(new, before), new))
        return value, grads

    return value_and_grad_f


def grad(
    f: Callable[..., Any],
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Returns a function like ``nnx.grad`` that returns the gradients of ``value_and_grad``.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> sorted(fp8nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((2, 4)))))(layer))
        ['bias', 'dot_general', 'kernel']

    Source: signature of ``nnx.grad``.
    """
    return without_value(value_and_grad(f, argnums, has_aux, holomorphic, allow_int), has_aux)


def accumulate_gradients(f: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
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
    def accumulated(model: Any, microbatches: Any) -> Any:
        check_model(model, "accumulate_gradients", " The order is (model, microbatches).")
        graphdef, *states = nnx.split(model, nnx.Param, OverwriteWithGradient, ...)
        params, scaling, rest = states

        def of_variables(variables: Any, rest: Any, microbatch: Any) -> Any:
            # A copy has variables of this trace, to which f may write.
            states = jax.tree.map(lambda x: x, (*variables.values(), rest))
            merged = nnx.merge(graphdef, *states)
            return f(merged, microbatch), nnx.state(merged, _REST)

        variables = {PARAMS: params, OVERWRITE_WITH_GRADIENT: scaling}
        value, grads, rest = accumulate(of_variables, variables, rest, microbatches, has_aux)
        nnx.update(model, rest)
        return value, nnx.merge_state(*grads.values())

    return accumulated


_REST = nnx.Not(nnx.Any(nnx.Param, OverwriteWithGradient))

_WHAT_TO_CALL = (
    "Compute gradients with fp8flax.nnx.value_and_grad, and change only the gradients of the parameters, "
    "nnx.state(grads, nnx.Param)."
)


def overwrite_state(model: nnx.Module, grads: Any) -> None:
    """Replaces the scaling state of a model by its gradient, for a loop with an ``nnx.Optimizer``.

    ``grads`` are those that ``value_and_grad`` returned for the model.

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
    check_model(model, "TrainState")
    old, new = state_of(model), state_of(grads)
    if old[OVERWRITE_WITH_GRADIENT] and not new[OVERWRITE_WITH_GRADIENT]:
        raise ValueError(f"grads have no scaling state, so the model's would never change. {_WHAT_TO_CALL}")
    set_state(model, checked_next_state(old, new, _WHAT_TO_CALL))


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

    Source: ``flax.nnx.Optimizer``.
    """

    def __init__(self, model: nnx.Module, tx: Any, *, wrt: Any = nnx.Param):
        check_model(model, "TrainState")
        if state_of(nnx.state(model, wrt))[OVERWRITE_WITH_GRADIENT]:
            raise ValueError(
                f"The optimizer would see FP8 scaling state, because wrt={wrt!r} includes it. Leave it "
                "out: wrt=nnx.Param, or nnx.All(…, nnx.Not(fp8flax.nnx.OverwriteWithGradient))."
            )
        super().__init__(model, tx, wrt=wrt)

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> Any:
        """Updates the parameters as ``nnx.Optimizer``, and the scaling state as ``overwrite_state``."""
        overwrite_state(model, grads)
        return super().update(model, grads, **kwargs)
