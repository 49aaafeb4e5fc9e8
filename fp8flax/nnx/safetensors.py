"""Frozen NNX models as safetensors files."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8flax._core.names import PARAMS
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._serve.hidden_state import ServedOp
from fp8flax._serve.renaming import Rename
from fp8flax._serve.safetensors import load_safetensors as load_variables
from fp8flax._serve.safetensors import tensors_of, write
from fp8flax._serve.weights import Options, automatic_axes, options_of
from fp8flax.nnx.freezing import Frozen, FrozenOp, freeze
from fp8flax.nnx.models import Layer, layers_of
from fp8flax.nnx.ops import Fp8Op
from fp8flax.nnx.variables import Places, RouterLoss, values_of, written_variables


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
    ``layers.0.weight_scale``. Random number generators and the losses of routers are left out.

    Args:
        path: the file to write; an existing file is replaced.
        model: the model that ``freeze`` returned.
        {args}

    Raises:
        {errors}

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
        >>> other = nnx.clone(frozen)
        >>> fp8nnx.load_safetensors(path, other)
        >>> bool((other(x) == frozen(x)).all())
        True

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

    {computation}

    Args:
        model: a model with FP8 ops, given to its layers or set by ``quantize_model``.
        {args}

    Returns:
        {result}

    Raises:
        TypeError: as in ``freeze``; or as ``rename`` in ``fp8flax.save_safetensors``.
        ValueError: ``model`` is frozen; or as in ``freeze`` and ``save_safetensors``.

    Warns:
        {warns}

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
    """Returns the ops of a frozen model, and its variables in collections.

    Raises:
        TypeError: nothing in the model is frozen.
    """
    ops = []
    places = {id(node): tuple(map(str, keys)) for keys, node in nnx.iter_graph(model)}
    for layer in layers_of(model):
        op = getattr(layer.module, layer.kind.field)
        if isinstance(op, FrozenOp):
            ops.append(_served(layer, op, places[id(layer.module)]))
    if not ops:
        raise wrong_model(model, "come from fp8flax.nnx.freeze", "flax.nnx", "save_safetensors")
    for keys, node in nnx.iter_graph(model):
        if isinstance(node, Fp8Op):  # of a wide kernel
            recipe = node._recipe_in_use()
            gemms = CustomRecipe() if recipe is None else recipe.gemms
            ops.append(ServedOp(tuple(map(str, keys)), gemms, ()))
    return tuple(ops), values_of(_places(model))


def _served(layer: Layer, op: FrozenOp, place: tuple[str, ...]) -> ServedOp:
    """Returns a layer as the writer of files sees it."""
    kernel = layer.module.kernel.get_value()
    contracted, batched = layer.kind.axes(layer.module)
    rest = range(kernel.ndim - len(layer.stacked))
    out = tuple(i for i in rest if i not in contracted)
    scales = {name: x.get_value() for name, x in vars(op).items() if isinstance(x, Frozen)}
    return ServedOp(
        (*place, layer.kind.field),
        op.recipe,
        (((*place, "kernel"), kernel.dtype),),
        tuple((name, x.shape, x.dtype) for name, x in scales.items()),
        None if batched else (out, tuple(contracted)),
    )


def _places(model: nnx.Module) -> Places:
    places = {}
    for collection, path, variable in written_variables(model):
        collection = PARAMS if isinstance(variable, Frozen) else collection  # as Linen's
        places[collection, *map(str, path)] = path, variable
    return places


def load_safetensors(path: str | os.PathLike[str], model: Any) -> None:
    """Reads a file of ``save_safetensors`` into a frozen NNX model, bit for bit.

    Args:
        path: the file to read.
        model: a frozen model of the same modules, with any values; its variables change. It may be
            abstract, as ``nnx.eval_shape`` of ``freeze`` returns it. The losses of routers become 0.

    Raises:
        {errors}
            Also if the variables are not those of the model, which then stays unchanged.

    Example:
        See ``save_safetensors``.

    Source: the safetensors format.
    """
    if not isinstance(model, nnx.Module):
        more = " The order is load_safetensors(path, model)."
        raise wrong_model(model, "be a flax.nnx.Module", "flax.nnx", "load_safetensors", more)
    given = nnx.traversals.flatten_mapping(load_variables(path))
    places = _places(model)
    expected = {place: (x.shape, x.dtype) for place, (_, x) in places.items()}
    found = {place: (x.shape, x.dtype) for place, x in given.items()}
    wrong = sorted("/".join(p) for p in expected.keys() | found if expected.get(p) != found.get(p))
    if wrong:
        raise ValueError(
            f"The variables in {path} are not those of this model: {', '.join(wrong)} differ in shape or "
            "dtype, or exist in only one of the two. Freeze a model of the same modules and recipes."
        )
    new = [(keys, variable.replace(given[place])) for place, (keys, variable) in places.items()]
    for keys, loss in nnx.to_flat_state(nnx.state(model, RouterLoss)):  # of no call yet
        new.append((keys, loss.replace(jnp.zeros(loss.shape, loss.dtype))))
    nnx.update(model, nnx.from_flat_state(new))
