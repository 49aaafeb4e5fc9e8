"""Where the scaling state of a converted model is while the model runs: among the parameters.

The author of a model wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling
state in mind. Among the parameters, the state is stacked, sliced and shared as the kernels are::

    the caller has                                a method of the model sees
    --------------                                --------------------------
    params/                                       params/
      layers/Dense_0/kernel                         layers/Dense_0/
    _overwrite_with_gradient/                         kernel
      layers/Dense_0/                                 fP8dOTgENERALoP_0/INPUT_SCALE
        Fp8DotGeneralOp_0/input_scale

Names are written in the other case there. So no parameter of the model has such a name, and the filter
``{"kernel"}`` of ``nn.WeightNorm`` does not match.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, STATE_LEAF_NAMES

Path = tuple[str, ...]

CODES = "codes"
"""The leaf of an op of a frozen model that holds the codes of its kernel."""
_LEAVES = frozenset((*STATE_LEAF_NAMES, CODES))


def swapped(path: Path) -> Path:
    """Returns the path of an array of an op in the parameters, given that in its collection, or back."""
    *module, op, leaf = path
    return (*module, op.swapcase(), leaf.swapcase())


def merged(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the model sees them: with the state among the parameters."""
    return _moved(variables, OVERWRITE_WITH_GRADIENT, _LEAVES, PARAMS)


def split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the caller sees them: with the state in its own collection."""
    leaves = {name.swapcase() for name in _LEAVES}
    found = _moved(variables, PARAMS, leaves, OVERWRITE_WITH_GRADIENT)
    return {PARAMS: {}, **found} if PARAMS in variables else found


def _moved(variables: Mapping[str, Any], here: str, leaves: Collection[str], there: str) -> dict[str, Any]:
    """Returns variables with the leaves of these names moved to another collection."""
    flat: dict[Path, Any] = {}
    for path, x in flatten_dict(dict(variables), keep_empty_nodes=True).items():
        is_state = path[0] == here and path[-1] in leaves
        flat[(there, *swapped(path[1:])) if is_state else path] = x
    return dict(unflatten_dict(flat))
