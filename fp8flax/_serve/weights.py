"""``weights_for_serving``: what a server takes from a model in training, made by one program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from fp8flax._core.options import check_bool, check_variables, wrong_model
from fp8flax._model.converted_call import seen_of
from fp8flax._serve.freeze import freeze
from fp8flax._serve.renaming import Rename, check_rename
from fp8flax._serve.safetensors import tensors_of
from fp8flax._serve.serving import serving_ops


def weights_for_serving(
    model: nn.Module,
    variables: Mapping[str, Any],
    *args: Any,
    rename: Rename | None = None,
    weight_only: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Returns the FP8 weights of a model in training under the names of an inference server.

    The tensors are those of the file that ``save_safetensors`` writes after ``freeze``, bit for bit. One
    compiled program makes them on the devices. It is compiled at the first call. Later calls with the same
    model object, options and shapes use it again. Use this function where an inference engine samples from
    a model between the steps of its training, as in reinforcement learning.

    XLA derives the sharding of the results from the sharding of the variables. If the variables are on a
    mesh with explicit axes, the results are on the same mesh with automatic axes.

    Args:
        model: the model that ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        variables: all collections of the model, such as ``state.params`` of a ``fp8flax.TrainState``.
        *args: inputs to trace the model with, as in ``freeze``. Their values are not used.
        rename: names of the server for those of the model, as in ``save_safetensors``. A function must be
            the same object at each call; another one compiles a new program.
        weight_only: whether each output feature has a scale, as in ``freeze``.
        **kwargs: keyword inputs of the model.

    Returns:
        Codes, scales and wide tensors by their names, as in the file.

    Raises:
        MissingStateError: an op's scaling state is missing from ``variables``.
        TypeError: ``model`` is not a Linen module; ``variables`` is not a mapping, but for instance a whole
            ``TrainState``; or as ``rename`` in ``save_safetensors``.
        ValueError: ``model`` is frozen; or as in ``freeze`` and ``save_safetensors``.

    Warns:
        UserWarning: at the first call, if kernels of FP8 ops stay wide; see ``freeze``. Scales that have
            seen no data cause no warning.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> variables = model8.init(jax.random.key(0), jnp.ones((2, 4)))
        >>> weights = fp8.weights_for_serving(model8, variables, rename={"^kernel": "proj"})
        >>> {name: x.dtype.name for name, x in weights.items()}
        {'bias': 'float32', 'proj.weight': 'float8_e4m3fn', 'proj.weight_scale': 'float32'}
        >>> weights["proj.weight"].shape
        (8, 4)

    Source: as for ``save_safetensors``.
    """
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.linen.Module", "flax.linen", "weights_for_serving")
    check_variables(variables)
    # The record so far decides which kernels are stored in FP8. Other methods of the model can add ops, or
    # read kernels, so the record is part of the key of the compiled program.
    record: Any = None
    if hasattr(model, "_fp8_rules"):
        seen = seen_of(model)
        ops = ((path, op.op, op.gemms, op.kernel and op.kernel.sources) for path, op in seen.ops.items())
        record = tuple(ops), frozenset(seen.used_otherwise)
    with automatic_axes(variables) as variables:
        return _weights(_Same(model), record, options_of(args, kwargs, rename, weight_only), variables)


class _Same:
    """A model in the key of a compiled program. It equals only itself, because a model may have no hash."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.model is other.model


@partial(jax.jit, static_argnums=(0, 1, 2))
def _weights(same: _Same, record: Any, options: Options, variables: Any) -> dict[str, jax.Array]:
    """Computes the result of ``weights_for_serving``; compiled once for equal static arguments."""
    del record  # it is only part of the key
    args, kwargs = options.inputs()
    served_model, served = freeze(same.model, variables, *args, weight_only=options.weight_only, **kwargs)
    tensors = tensors_of(serving_ops(served_model), nn.meta.unbox(served), options.renaming())
    return {name: tensor.written for name, tensor in tensors.items()}


class Options(NamedTuple):
    """The options that a program is compiled for, beside the model and its variables (hashable)."""

    leaves: tuple[Any, ...]
    treedef: Any
    rename: Any
    weight_only: bool

    def inputs(self) -> Any:
        """Returns the positional and the keyword inputs of the model, with shapes instead of arrays."""
        return self.treedef.unflatten(self.leaves)

    def renaming(self) -> Rename | None:
        """Returns ``rename`` as it was passed."""
        return dict(self.rename) if isinstance(self.rename, tuple) else self.rename


def options_of(args: Any, kwargs: Any, rename: Any, weight_only: bool) -> Options:
    """Returns the options of ``weights_for_serving`` in a hashable form.

    Raises:
        TypeError: as ``check_rename``.
    """
    check_bool("weight_only", weight_only)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x
        for x in leaves
    ]
    if rename is not None:
        check_rename(rename)
    if isinstance(rename, Mapping):
        rename = tuple(rename.items())
    return Options(tuple(shapes), treedef, rename, weight_only)


@contextlib.contextmanager
def automatic_axes(variables: Any) -> Iterator[Any]:
    """Yields variables whose mesh has automatic axes, in a context of that mesh; nothing is copied.

    On explicit axes some reshapes of kernels would need a sharding of their results. All variables on
    explicit axes must have the same mesh.
    """
    found: Mesh | None = None

    def automatic(x: Any) -> Any:
        nonlocal found
        sharding = getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
            return x
        mesh = sharding.mesh
        found = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        return jax.device_put(x, NamedSharding(found, sharding.spec))

    variables = jax.tree.map(automatic, variables)
    with contextlib.nullcontext() if found is None else jax.set_mesh(found):
        yield variables
