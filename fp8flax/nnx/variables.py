"""Converts the variables of NNX models to trees for the functions of ``fp8flax``, and to Linen's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.options import check_variables, wrong_model
from fp8flax.nnx.ops import Fp8Op, OverwriteWithGradient

Places = dict[tuple[str, ...], tuple[tuple[Any, ...], Any]]
"""The path and the variable of each place, in Linen's layout or in a file; it begins with a collection."""


def is_node(x: Any) -> bool:
    """Returns whether a value is a module or a variable of NNX."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def check_model(model: Any, function: str, more: str = "") -> None:
    """Raises ``TypeError`` if a value has no module or variable of NNX, but is for instance a Linen model.

    Args:
        model: the value that was passed as a model. It may also be an ``nnx.State`` or a tuple of models.
        function: the name of our function in ``fp8flax``; empty if only ``fp8flax.nnx`` has one.
        more: what to do, as a sentence that begins with a space.
    """
    nodes = jax.tree.leaves(model, is_leaf=is_node)
    if not (isinstance(model, nnx.State) or any(map(is_node, nodes))):
        raise wrong_model(model, "be a flax.nnx.Module", "flax.nnx", function, more)


def state_of(node: Any) -> dict[str, Any]:
    """Returns the scaling state of a model or an ``nnx.State`` as a collection, by NNX's paths."""
    # NNX cannot search an array. A module with ``pytree=False`` is a leaf to JAX, too.
    if not is_node(node) and jax.tree_util.treedef_is_leaf(jax.tree.structure(node)):
        return {OVERWRITE_WITH_GRADIENT: {}}
    return {OVERWRITE_WITH_GRADIENT: nnx.to_pure_dict(nnx.state(node, OverwriteWithGradient))}


def set_state(node: Any, state: Mapping[str, Any]) -> None:
    """Writes a state with the structure of ``state_of`` into a model or an ``nnx.State``."""
    if state[OVERWRITE_WITH_GRADIENT]:
        nnx.update(node, state[OVERWRITE_WITH_GRADIENT])


def _linen_name(op: Any) -> str:
    """Returns the name of an op in Linen, where a layer makes the op from its class."""
    name = type(op).__name__
    return f"{'Fp8DotGeneralOp' if name == 'Fp8Einsum' else name}_0"


def _ops(model: nnx.Module) -> dict[tuple[Any, ...], Fp8Op]:
    """Returns the FP8 ops of layers by their paths."""
    ops = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, Fp8Op)}
    return {path: op for path, op in ops.items() if path and path[-1] == op.row.nnx_field}


def _linen_path(path: tuple[Any, ...], ops: Mapping[tuple[Any, ...], Fp8Op]) -> tuple[str, ...]:
    """Returns the path of a variable in a Linen model whose modules have the same names."""
    op = ops.get(path[:-1])
    if op is not None:
        path = (*path[:-2], _linen_name(op), path[-1])
    names: list[str] = []
    for key in path:
        if isinstance(key, int) and names:
            names[-1] = f"{names[-1]}_{key}"  # an entry of a list of modules
        else:
            names.append(str(key))
    return tuple(names)


def written_variables(model: nnx.Module) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yields each variable that Linen's layout and files hold, after its collection and its path.

    Random number generators are left out.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        yield nnx.variable_name_from_type(type(variable), allow_register=True), path, variable


def values_of(places: Places) -> dict[str, Any]:
    """Returns the values of variables as collections: dicts by the names of their places."""
    values = {place: variable.get_value() for place, (_, variable) in places.items()}
    return nnx.traversals.unflatten_mapping(values)


def _places(model: nnx.Module) -> Places:
    ops, places = _ops(model), Places()
    for collection, path, variable in written_variables(model):
        place = collection, *_linen_path(path, ops)
        if place in places:
            one, other = ("/".join(map(str, p)) for p in (places[place][0], path))
            raise ValueError(
                f"Linen's layout has one place, {'/'.join(place)}, for both {one} and {other}: entry 0 of "
                "a list `layers` is called layers_0 there. Rename one of the two."
            )
        places[place] = path, variable
    return places


def to_linen(model: nnx.Module) -> dict[str, Any]:
    """Returns the variables of an NNX model, as a Linen model with modules of the same names has them.

    The collections are ``params``, ``_overwrite_with_gradient``, ``batch_stats`` and so on. An op of a
    layer is called ``Fp8DotGeneralOp_0`` there, and entry 0 of a list ``layers`` is called ``layers_0``.
    Functions of ``fp8flax`` that take variables, and checkpoints of Linen models, fit this layout. Random
    number generators are left out.

    Args:
        model: any NNX module.

    Returns:
        Dicts of arrays, with the shapes and dtypes that they have in the model; nothing is copied.

    Raises:
        TypeError: ``model`` is not an NNX module.
        ValueError: two variables would have one place, such as entry 0 of a list ``layers`` and a field
            ``layers_0``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> variables = fp8nnx.to_linen(layer)
        >>> sorted(variables["params"]), list(variables["_overwrite_with_gradient"])
        (['bias', 'kernel'], ['Fp8DotGeneralOp_0'])

    Source: the layouts of ``flax.linen`` and ``flax.nnx``.
    """
    check_model(model, "")
    return values_of(_places(model))


def update_from_linen(model: nnx.Module, variables: Mapping[str, Any]) -> None:
    """Writes the variables of a Linen model into an NNX model whose modules have the same names.

    Collections that are missing in ``variables`` stay unchanged in the model.

    Args:
        model: any NNX module; its variables change.
        variables: collections in Linen's layout, with the shapes and dtypes of the model; see ``to_linen``.

    Raises:
        TypeError: ``model`` is not an NNX module, or ``variables`` is not a mapping.
        ValueError: a variable of the model is missing in its collection, or has another shape or dtype
            there; the collection has something that the model does not have; or two variables have one
            place. The model then stays unchanged.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> linen_layer = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> variables = linen_layer.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> fp8nnx.update_from_linen(layer, variables)
        >>> bool(jnp.all(layer.kernel.get_value() == variables["params"]["kernel"]))
        True

    Source: the layouts of ``flax.linen`` and ``flax.nnx``.
    """
    check_model(model, "", " The order is update_from_linen(model, variables).")
    check_variables(variables)
    given = nnx.traversals.flatten_mapping(nn.meta.unbox(variables))
    places = {place: entry for place, entry in _places(model).items() if place[0] in variables}
    missing, unknown = sorted(places.keys() - given.keys()), sorted(given.keys() - places.keys())
    if missing or unknown:
        what = [f"{', '.join('/'.join(p) for p in missing)} is missing in them"] if missing else []
        what += [f"the model has no {', '.join('/'.join(p) for p in unknown)}"] if unknown else []
        raise ValueError(
            f"The variables are not those of this model: {'; '.join(what)}. Modules must have the same "
            "names; fp8flax.nnx.to_linen(model) shows what they are."
        )
    for place, (_, variable) in places.items():
        old, new = variable.get_value(), given[place]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"{'/'.join(place)} has shape {new.shape} and dtype {new.dtype}; the model's has shape "
                f"{old.shape} and dtype {old.dtype}."
            )
    nnx.update(model, nnx.from_flat_state([(path, v.replace(given[p])) for p, (path, v) in places.items()]))
