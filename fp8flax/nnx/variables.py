"""Converts the variables of NNX models to trees for the functions of ``fp8flax`` and for files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.options import wrong_model
from fp8flax.nnx.ops import OverwriteWithGradient


def is_node(x: Any) -> bool:
    """Returns whether a value is a module or a variable of NNX."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def check_model(model: Any, more: str = "") -> None:
    """Raises ``TypeError`` if a value has no module or variable of NNX, but is for instance a Linen model.

    Args:
        model: the value that was passed as a model. It may also be an ``nnx.State`` or a tuple of models.
        more: what to do, as a sentence that begins with a space.
    """
    nodes = jax.tree.leaves(model, is_leaf=is_node)
    if not (isinstance(model, nnx.State) or any(map(is_node, nodes))):
        raise wrong_model(model, "be a flax.nnx.Module", more)


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


def as_function_of_variables(
    f: Callable[[Any, Any], Any], model: nnx.Module
) -> tuple[Callable[[Any, Any], Any], dict[str, Any]]:
    """Returns ``f(model, batch)`` as a function of a tree of variables and a batch, and this tree."""
    graphdef, whole = nnx.split(model)

    def of_variables(variables: Mapping[str, Any], batch: Any) -> Any:
        # A copy has variables of this trace, to which f may write.
        merged = nnx.merge(graphdef, jax.tree.map(lambda x: x, variables["model"]))
        set_state(merged, variables)
        return f(merged, batch)

    # The model is an argument, because a compiled function would hold weights of its closure as constants.
    return of_variables, {**state_of(model), "model": whole}


def written_variables(model: nnx.Module) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Yields each variable that files hold, after its collection and its path.

    Random number generators are left out.
    """
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        yield nnx.variable_name_from_type(type(variable), allow_register=True), path, variable
