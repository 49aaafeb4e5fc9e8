"""Frozen NNX models as safetensors files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx

from fp8flax._core.names import PARAMS
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._serve.hidden_state import ServedOp
from fp8flax._serve.renaming import Rename
from fp8flax._serve.safetensors import tensors_of, write
from fp8flax._serve.weights import Options, automatic_axes, options_of
from fp8flax.nnx.freezing import Frozen, FrozenOp, freeze
from fp8flax.nnx.models import layers_of
from fp8flax.nnx.ops import Fp8Op
from fp8flax.nnx.variables import written_variables


def save_safetensors(
    path: str | os.PathLike[str],
    model: nnx.Module,
    *,
    rename: Rename | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes the variables of a frozen NNX model to a safetensors file.

    The file is that of ``fp8flax.save_safetensors``, with the names of NNX's paths. The kernel of
    ``model.layers[0]`` is ``layers.0.weight``, of shape ``(out, in)`` and in FP8; its scale is
    ``layers.0.weight_scale``. Random number generators are left out.

    Args:
        path: the file to write; an existing file is replaced.
        model: the model that ``freeze`` returned.
        rename: other names for the tensors, as in ``fp8flax.save_safetensors``.
        config: contents of a ``config.json``, as in ``fp8flax.save_safetensors``.

    Raises:
        ImportError, OSError, TypeError, ValueError: as in ``fp8flax.save_safetensors``.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, os, tempfile, fp8flax as fp8, fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
        >>> x = jnp.ones((2, 4))
        >>> frozen = fp8nnx.freeze(nnx.Linear(4, 8, dot_general=op, rngs=nnx.Rngs(0)), x)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> fp8nnx.save_safetensors(path, frozen, rename={"^kernel": "proj"})
        >>> import safetensors
        >>> sorted(safetensors.safe_open(path, "np").keys())
        ['bias', 'proj.weight', 'proj.weight_scale']

    Source: as for ``fp8flax.save_safetensors``.
    """
    write(path, *_described(model), rename, config)


def weights_for_serving(
    model: nnx.Module,
    *args: Any,
    rename: Rename | None = None,
    weight_only: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns the FP8 weights of an NNX model in training under the names of an inference server.

    See ``fp8flax.weights_for_serving``.

    Args:
        model: a model with FP8 ops, given to its layers or set by ``quantize_model``.
        *args: inputs to trace the model with, as in ``freeze``. Their values are not used.
        rename: names of the server for those of the model, as in ``fp8flax.weights_for_serving``.
        weight_only: whether each output feature has a scale, as in ``freeze``.
        **kwargs: keyword inputs of the model.

    Returns:
        Codes, scales and wide tensors by their names, as in the file.

    Raises:
        TypeError: as in ``freeze``; or as ``rename`` in ``fp8flax.save_safetensors``.
        ValueError: ``model`` is frozen; or as in ``freeze`` and ``save_safetensors``.

    Warns:
        UserWarning: at the first call, if kernels of FP8 ops stay wide; see ``freeze``.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp, fp8flax as fp8, fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
        >>> layer = nnx.Linear(4, 8, dot_general=op, rngs=nnx.Rngs(0))
        >>> weights = fp8nnx.weights_for_serving(layer, jnp.ones((2, 4)), rename={"^kernel": "proj"})
        >>> {name: x.dtype.name for name, x in weights.items()}
        {'bias': 'float32', 'proj.weight': 'float8_e4m3fn', 'proj.weight_scale': 'float32'}

    Source: as for ``fp8flax.save_safetensors``.
    """
    if not isinstance(model, nnx.Module):
        raise wrong_model(model, "be a flax.nnx.Module", "flax.nnx", "weights_for_serving")
    graphdef, state = nnx.split(model)
    with automatic_axes(state) as state:
        return _weights(graphdef, options_of(args, kwargs, rename, weight_only), state)


@partial(jax.jit, static_argnums=(0, 1))
def _weights(graphdef: Any, options: Options, state: Any) -> dict[str, jax.Array]:
    args, kwargs = options.inputs()
    model = nnx.merge(graphdef, state)
    frozen = freeze(model, *args, weight_only=options.weight_only, **kwargs)
    tensors = tensors_of(*_described(frozen), options.renaming())
    return {name: tensor.written for name, tensor in tensors.items()}


def _described(model: nnx.Module) -> tuple[tuple[ServedOp, ...], dict[str, Any]]:
    """Returns the ops of a frozen model, and the values of its variables in collections, as Linen has them.

    Raises:
        TypeError: nothing in the model is frozen.
    """
    ops: list[ServedOp] = []
    places = {id(node): tuple(map(str, keys)) for keys, node in nnx.iter_graph(model)}
    for layer in layers_of(model):
        op = getattr(layer.module, layer.kind.field)
        if isinstance(op, FrozenOp):
            place, kernel = places[id(layer.module)], layer.module.kernel.get_value()
            contracted, batched = layer.kind.axes(layer.module)
            out = tuple(i for i in range(kernel.ndim - len(layer.stacked)) if i not in contracted)
            layout = None if batched else (out, tuple(contracted))
            stored = (*place, "kernel"), kernel.dtype
            ops.append(ServedOp((*place, layer.kind.field), op.recipe, stored, layout=layout))
    if not ops:
        raise wrong_model(model, "come from fp8flax.nnx.freeze", "flax.nnx", "save_safetensors")
    for keys, node in nnx.iter_graph(model):
        if isinstance(node, Fp8Op):  # of a wide kernel
            recipe = node._recipe_in_use()
            gemms = CustomRecipe() if recipe is None else recipe.gemms
            ops.append(ServedOp(tuple(map(str, keys)), gemms, None))
    values = {}
    for collection, path, variable in written_variables(model):
        collection = PARAMS if isinstance(variable, Frozen) else collection
        values[collection, *map(str, path)] = variable.get_value()
    return tuple(ops), nnx.traversals.unflatten_mapping(values)
