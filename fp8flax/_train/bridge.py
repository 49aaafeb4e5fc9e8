"""Moves variables between a model without FP8 and the same model with it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, ROLES, state_leaf_names
from fp8flax._core.options import check_params, check_variables, wrong_model
from fp8flax._core.state.tree import check_state_dtype, path_str
from fp8flax._linen.op import SAME_STATE, USE_THAT_OP, Fp8Op
from fp8flax._train.check import warn_if_damaged

_SCALE_OF = {history: scale for scale, history in map(state_leaf_names, ROLES)}


def add_fp8_state(
    variables: Mapping[str, Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Mapping[str, Any]:
    """Returns ``variables`` with the scaling state that ``model`` needs; missing state is initialized.

    Use it to go from a checkpoint without FP8 to a run with FP8, or from one history length to another. No
    weight is changed and no layer runs: the shapes come from tracing ``model.init``. Recipes without
    delayed scaling need no state; the result is then ``variables`` with the state that it has.

    Args:
        variables: collections of the model, with or without FP8, as JAX or NumPy arrays; ``params`` at
            least.
        model: the model with FP8 layers.
        *args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        **kwargs: keyword inputs of the model.

    Returns:
        A dict (a ``FrozenDict`` if ``variables`` is one) with all the collections of ``variables`` and
        ``_overwrite_with_gradient``. Existing state is kept. A history of another length becomes the one
        that a run with the new length would have now: its newest amaxes, and zeros for older ones that are
        not known. State of layers that the model does not run in FP8 is left out.

    Raises:
        TypeError: ``model`` is not a Linen module, or existing state is not float32.
        ValueError: ``model`` has no FP8 layer; its parameters are not those of ``variables``; or existing
            state has other shapes (but for the length of the history). (``check_state`` checks values.)

    Warns:
        UserWarning: state has the name of another op, such as ``Fp8DirectDotGeneralOp_0`` for an
            ``Fp8DotGeneralOp``; it is left out. Or a scale does not follow from its history, see
            ``check_state``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> x = jnp.ones((2, 4))
        >>> variables = nn.Dense(4).init(jax.random.key(0), x)
        >>> model8 = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> sorted(fp8.add_fp8_state(variables, model8, x))
        ['_overwrite_with_gradient', 'params']

        >>> from functools import partial
        >>> short = fp8.DelayedScaling(amax_history_len=2)
        >>> shorter = nn.Dense(4, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=short))
        >>> history = jnp.array([4.0, 1.0, 2.0, 3.0])  # 4 is the newest, 1 the oldest
        >>> state = {"Fp8DotGeneralOp_0": {"input_amax_history": history}}
        >>> changed = fp8.add_fp8_state({**variables, "_overwrite_with_gradient": state}, shorter, x)
        >>> changed["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_amax_history"]
        Array([4., 3.], dtype=float32)

    Source: ``flax.linen.fp8_ops``, for the layout of the history.
    """
    check_variables(variables)
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.linen.Module")
    wanted, has_fp8 = eval_init(model, args, kwargs)
    if not has_fp8:
        raise ValueError(
            f"{type(model).__name__} has no FP8 layer, so there is no scaling state to add. Give its "
            "layers dot_general_cls=fp8flax.Fp8DotGeneralOp."
        )
    if PARAMS in wanted:
        check_params(variables)
    _check_same_params(variables, wanted)
    if OVERWRITE_WITH_GRADIENT not in wanted:
        return variables
    old = dict(jax.tree_util.tree_flatten_with_path(variables.get(OVERWRITE_WITH_GRADIENT, {}))[0])
    new = dict(jax.tree_util.tree_flatten_with_path(wanted[OVERWRITE_WITH_GRADIENT])[0])
    _warn_of_other_names({path[:-1] for path in old}, {path[:-1] for path in new})

    def fill(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Any:
        if path in old:
            scale = new.get((*path[:-1], DictKey(_SCALE_OF.get(path[-1].key))))
            return _fit((DictKey(OVERWRITE_WITH_GRADIENT), *path), old[path], leaf, scale)
        fresh = np.ones if path[-1].key in _SCALE_OF.values() else np.zeros
        return jax.device_put(fresh(leaf.shape, leaf.dtype))

    advice = (
        "It is kept. To have new state made, call fp8flax.remove_fp8_state first, and then "
        "fp8flax.calibrate."
    )
    warn_if_damaged(variables.get(OVERWRITE_WITH_GRADIENT, {}), advice, stacklevel=3)
    state = jax.tree_util.tree_map_with_path(fill, wanted[OVERWRITE_WITH_GRADIENT])
    result = {**variables, OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(state)}
    return flax.core.freeze(result) if isinstance(variables, flax.core.FrozenDict) else result


def _warn_of_other_names(old: set[KeyPath], new: set[KeyPath]) -> None:
    """Warns if state is left out, and made anew, because it has the name of another op."""
    fresh = {path[:-1] for path in new - old}  # the layers of these ops
    left_out = sorted(
        path_str(path)
        for path in old - new
        if path[:-1] in fresh and path[-1].key.rpartition("_")[0] in SAME_STATE
    )
    if left_out:
        op, _, _ = left_out[0].rpartition("/")[2].rpartition("_")
        more = f" and of {len(left_out) - 1} more" if len(left_out) > 1 else ""
        warnings.warn(
            f"The scaling state of {left_out[0]}{more} is left out, and new state is made under the name "
            f"of the model's op. To keep the state, {USE_THAT_OP.format(op=op)}",
            stacklevel=3,
        )


def _fit(path: KeyPath, value: Any, leaf: jax.ShapeDtypeStruct, scale: Any) -> Any:
    """Returns the state ``value`` with the shape of ``leaf``; only the length of a history may change.

    ``scale`` has the shape of the scale beside ``leaf`` if this is a history, and is None otherwise.
    """
    check_state_dtype(path, value)
    if value.shape == leaf.shape:
        return value
    differing = []
    if scale is not None and len(value.shape) == len(leaf.shape):
        sizes = list(zip(scale.shape, leaf.shape, value.shape))
        differing = [axis for axis, of_axis in enumerate(sizes) if len(set(of_axis)) > 1]
    if len(differing) != 1 or scale.shape[differing[0]] != 1:
        raise ValueError(
            f"The scaling state at {path_str(path)} has shape {value.shape}, but the model needs "
            f"{leaf.shape}; only the length of a history may differ. Pass the state of the same model, or "
            "have new state made: fp8flax.add_fp8_state(fp8flax.remove_fp8_state(variables), model, "
            "*inputs)."
        )
    return _change_length(value, differing[0], leaf.shape[differing[0]])


@partial(jax.jit, static_argnums=(1, 2))
def _change_length(history: Any, axis: int, length: int) -> jax.Array:
    """Returns a history of the newest ``length`` amaxes; zeros stand for amaxes that are not known."""
    # Index 0 holds the newest amax. The others follow, from the oldest to the second newest.
    history = jnp.moveaxis(history, axis, -1)
    newest, past = history[..., :1], history[..., max(1, history.shape[-1] - length + 1) :]
    zeros = jnp.zeros((*history.shape[:-1], length - newest.shape[-1] - past.shape[-1]))
    return jnp.moveaxis(jnp.concatenate([newest, zeros, past], -1), -1, axis)


def split_arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the arrays among the arguments, and a function that puts other arrays in their places.

    A ``jax.ShapeDtypeStruct`` counts as an array. All other arguments stay concrete.

    Raises:
        TypeError: there is no array, but a tuple of ints, which looks like a shape.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    for value in () if any(is_array) else (*args, *kwargs.values()):
        if isinstance(value, tuple) and value and all(type(size) is int for size in value):
            raise TypeError(
                f"Inputs of the model must be arrays or jax.ShapeDtypeStruct; got {value}. For an input of "
                f"this shape pass jax.ShapeDtypeStruct({value}, jnp.float32)."
            )

    def fill(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        return treedef.unflatten([next(remaining) if a else leaf for a, leaf in zip(is_array, leaves)])

    return [leaf for a, leaf in zip(is_array, leaves) if a], fill


@contextlib.contextmanager
def needing_inputs(args: Any, kwargs: Any) -> Iterator[None]:
    """A context in which a model is called; if it gets no inputs and needs some, the error says so."""
    try:
        yield
    except TypeError as error:
        if args or kwargs or "required positional argument" not in str(error):
            raise
        raise TypeError(
            f"The model needs sample inputs, and got none: {error}. Pass them as arrays or "
            "jax.ShapeDtypeStruct; their values are not used."
        ) from error


def eval_init(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Returns the shapes and dtypes of ``model.init``, and whether an FP8 op ran in it."""
    has_fp8 = False

    def note_ops(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal has_fp8
        has_fp8 = has_fp8 or isinstance(context.module, Fp8Op)
        return call(*args, **kwargs)

    arrays, fill = split_arrays(args, kwargs)

    def init(arrays: list[Any]) -> Any:
        args, kwargs = fill(arrays)
        return model.init(jax.random.key(0), *args, **kwargs)

    with nn.intercept_methods(note_ops), needing_inputs(args, kwargs):
        shapes = jax.eval_shape(init, arrays)
    return shapes, has_fp8


def _check_same_params(variables: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if the names or shapes of parameters differ from those of the model."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(flax.core.unfreeze(tree)))[0]
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    have, want = (shapes(tree.get(PARAMS, {})) for tree in (variables, wanted))
    for path in sorted({*have, *want}):
        if have.get(path) != want.get(path):
            here = f"has shape {have[path]}" if path in have else "is missing"
            there = f"a parameter of shape {want[path]}" if path in want else "no such parameter"
            raise ValueError(
                f"variables['params']{path} {here}, but the model has {there}. Pass the variables of the "
                "same model."
            )


def remove_fp8_state(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``variables`` without the scaling state, for the model without FP8.

    Args:
        variables: collections of a model with or without FP8 layers.

    Returns:
        The other collections, unchanged; a ``FrozenDict`` if ``variables`` is one.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> list(fp8.remove_fp8_state(layer.init(jax.random.key(0), jnp.ones((2, 4)))))
        ['params']
    """
    check_variables(variables)
    others = {k: v for k, v in variables.items() if k != OVERWRITE_WITH_GRADIENT}
    return flax.core.freeze(others) if isinstance(variables, flax.core.FrozenDict) else others
