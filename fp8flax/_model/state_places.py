"""Where the scaling state of a converted model is while the model runs.

The author of a model wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling
state in mind. Among the parameters, the state of layers in such loops is stacked and sliced as the kernels
are, and nothing in Flax is replaced. All other state is in a collection of this package, which Linen's
other transformations take along::

    the caller has                                a method of the model sees
    --------------                                --------------------------
    params/                                       params/
      Dense_0/kernel                                Dense_0/kernel
      layers/Dense_0/kernel                         layers/Dense_0/
                                                      kernel
    _overwrite_with_gradient/                         fP8dOTgENERALoP_0/INPUT_SCALE
      layers/Dense_0/                             _fp8_state/
        Fp8DotGeneralOp_0/input_scale               Dense_0/
      Dense_0/                                        fP8dOTgENERALoP_0/INPUT_SCALE
        Fp8DotGeneralOp_0/input_scale

Names are written in the other case there. So no parameter of the model has such a name, and the filter
``{"kernel"}`` of ``nn.WeightNorm`` does not match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax.traverse_util import empty_node, flatten_dict, unflatten_dict

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, STATE_LEAF_NAMES

Path = tuple[str, ...]

CODES = "codes"
"""The leaf of an op of a frozen model that holds the codes of its kernel."""
_LEAVES = frozenset(name.swapcase() for name in (*STATE_LEAF_NAMES, CODES))

STATE = "_fp8_state"
"""The collection of the state of ops outside of loops, while the model runs."""


def state_at(variables: Any, path: Path) -> Mapping[str, Any]:
    """Returns the arrays of the op at ``path``, by their names in the other case."""
    found: dict[str, Any] = {}
    for tree in (variables.get(PARAMS, {}), variables.get(STATE, {})):
        for name in (*path[:-1], path[-1].swapcase()):
            tree = tree.get(name, {}) if isinstance(tree, Mapping) else {}
        found |= tree
    return found


def placed(path: Path, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a collection with the arrays of the op at ``path``, as the model sees them."""
    *module, op = path
    named = {(*module, op.swapcase(), name.swapcase()): x for name, x in arrays.items()}
    return dict(unflatten_dict(named))


def merged(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the model sees them, with the state among them."""
    flat = flatten_dict(dict(variables), keep_empty_nodes=True)
    state = {path: flat.pop(path) for path in list(flat) if path[0] == OVERWRITE_WITH_GRADIENT}
    ndims: dict[Path, list[int]] = defaultdict(list)
    for path, x in state.items():
        ndims[path[:-1]].append(np.ndim(x))
    for path, x in state.items():
        if x is not empty_node:
            *module, op, leaf = path[1:]
            is_in_loop = min(ndims[path[:-1]]) > 1
            flat[PARAMS if is_in_loop else STATE, *module, op.swapcase(), leaf.swapcase()] = x
    return dict(unflatten_dict(flat))


def split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the caller sees them: with the state in its own collection."""
    flat: dict[Path, Any] = {}
    for path, x in flatten_dict(dict(variables), keep_empty_nodes=True).items():
        if path[0] in (PARAMS, STATE) and path[-1] in _LEAVES:
            *module, op, leaf = path[1:]
            flat[OVERWRITE_WITH_GRADIENT, *module, op.swapcase(), leaf.swapcase()] = x
        elif path[0] != STATE:
            flat[path] = x
    found = dict(unflatten_dict(flat))
    return {PARAMS: {}, **found} if PARAMS in variables else found
