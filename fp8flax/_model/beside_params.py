"""Makes Linen's lifted transformations treat collections of this package like the parameters.

The author of a model wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling
state in mind. In a converted model the state of an op must be stacked, sliced and shared like its kernel.
So its collection is treated like ``params``, unless the transformation names it or takes all collections.

In a converted model ``nn.map_variables`` of all collections, as in ``nn.WeightNorm``, does not map the
scaling state, not even that of ops that a user placed. Its function belongs to the model, and is for
weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fp8flax._compat.flax_pack import (
    Filters,
    Packing,
    axis_of,
    changing_packing,
    takes,
    takes_all,
    with_collection,
    without_collection,
)
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._linen.conversion import Stacking, conversion, converting


@contextlib.contextmanager
def beside_params(collection: str) -> Iterator[None]:
    """A context in which lifted transformations treat a collection like the parameters."""
    with _PACKING, converting(beside_params=collection):
        yield


def _beside(groups: Filters, ours: str) -> Filters:
    """Returns the groups of variables, with the collection ``ours`` added to that of the parameters.

    If a group has the collection already, the groups are unchanged.
    """
    if any(takes(group, ours) for group in groups):
        return groups
    first = next((i for i, group in enumerate(groups) if takes(group, PARAMS)), None)
    return [with_collection(group, ours) if i == first else group for i, group in enumerate(groups)]


def _passed_by(groups: Filters, ours: str) -> Filters:
    """Returns the groups of ``nn.map_variables``, with the collection ``ours`` among the unmapped ones."""
    mapped, others = groups
    return [without_collection(mapped, ours), with_collection(others, ours)]


def _change(name: str | None, packing: Packing) -> Packing:
    """Returns the changed packing of a lifted transformation; see ``changing_packing``."""
    ours = conversion().beside_params
    if ours is None:  # the code of another thread, or of a function that runs after the model
        return packing
    body, taken, returned = packing
    if name == "map_variables" and takes_all(taken[0]):
        for collection in {OVERWRITE_WITH_GRADIENT, ours}:
            taken, returned = _passed_by(taken, collection), _passed_by(returned, collection)
    taken, returned = _beside(taken, ours), _beside(returned, ours)
    if name == "map_variables" and takes(taken[0], PARAMS):
        body = _within(body, in_map=True)
    elif name in ("scan", "vmap"):
        stacking = Stacking(*(axis_of(of, Packing(body, taken, returned)) for of in (PARAMS, ours)))
        if stacking != Stacking(None, None):
            body = _within(body, stacked=(*conversion().stacked, stacking))
    elif name == "custom_vjp":
        body = _within(body, in_custom_vjp=True)
    return Packing(body, taken, returned)


def _within(body: Any, **changes: Any) -> Any:
    """Returns the body of a lifted transformation, which runs with these fields of the conversion."""

    def within(*args: Any, **kwargs: Any) -> Any:
        with converting(**changes):
            return body(*args, **kwargs)

    return within


_PACKING = changing_packing(_change)
