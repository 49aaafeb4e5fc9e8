"""``weights_for_serving``: what a server takes from a model in training."""

from __future__ import annotations

from typing import Any

from fp8flax._serve.freeze import described, freeze
from fp8flax._serve.renaming import Rename
from fp8flax._serve.server_layout import tensors_of


def weights_for_serving(
    model: Any, *args: Any, rename: Rename | None = None, weight_only: bool = False, **kwargs: Any
) -> dict[str, Any]:
    """Returns the FP8 weights of a model in training under the names of an inference server.

    The tensors are those of the file that ``save_safetensors`` writes after ``freeze``, bit for bit. Put
    this function into ``jax.jit``, or ``nnx.jit``, as a function of the variables: then one compiled
    program makes the tensors on the devices, for instance for an inference engine that samples between the
    steps of training, and XLA derives their sharding from that of the variables.

    Args:
        model: as in ``freeze``.
        *args: as in ``freeze``: for a Linen model all its collections; then inputs to trace the model with.
        rename: names of the server for those of the model, as in ``save_safetensors``.
        weight_only: whether each output feature has a scale, as in ``freeze``.
        **kwargs: keyword inputs of the model.

    Returns:
        Codes, scales and wide tensors by their names, as in the file.

    Raises:
        MissingStateError, TypeError, ValueError: as ``freeze`` and ``save_safetensors``.

    Warns:
        UserWarning: as ``freeze``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> x = jnp.ones((2, 4))
        >>> variables = model8.init(jax.random.key(0), x)
        >>> rename = {"^kernel": "proj"}
        >>> weights_of = jax.jit(lambda v: fp8.weights_for_serving(model8, v, x, rename=rename))
        >>> weights = weights_of(variables)
        >>> {name: x.dtype.name for name, x in weights.items()}
        {'bias': 'float32', 'proj.weight': 'float8_e4m3fn', 'proj.weight_scale': 'float32'}
        >>> weights["proj.weight"].shape
        (8, 4)

    Source: as for ``save_safetensors``.
    """
    frozen = freeze(model, *args, weight_only=weight_only, **kwargs)
    tensors = tensors_of(*described(*(frozen if isinstance(frozen, tuple) else (frozen,))), rename)
    return {name: tensor.array for name, tensor in tensors.items()}
