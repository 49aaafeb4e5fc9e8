"""Changes which collections of variables Linen's lifted transformations (``nn.scan``, ``nn.vmap``, …) take.

Why: a model's ``nn.scan(..., variable_axes={"params": 0})`` does not name the scaling state, which must be
sliced and stacked as the parameters are. Every lifted transformation of Flax calls ``flax.core.lift.pack``
with the collections that it takes. Flax has no public way to change these for a transformation in a model's
source. So ``changing_packing`` replaces ``pack`` while a converted model runs.

Internals: ``flax.core.lift``, whose function ``pack`` is replaced; ``flax.core.scope``, for the filters
that say which collections are taken; and the variable ``variable_in_axes`` of the bodies of ``nn.scan`` and
``nn.vmap``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax.core import DenyList, lift
from flax.core.scope import in_filter, subtract_filters, union_filters

from fp8flax._compat.replacing import Replacing

Filters = Sequence[Any]
"""For each group of variables, a Flax filter that says which collections are in the group."""


class Packing(NamedTuple):
    """The arguments of ``pack`` that a lifted transformation passes, and that may be changed."""

    body: Callable[..., Any]
    """The function that runs the transformation, ``body(make_scopes, repack, groups, rngs, *args)``."""
    taken: Filters
    """The collections that the transformation takes."""
    returned: Filters
    """The collections that the transformation returns."""


def changing_packing(change: Callable[[str | None, Packing], Packing]) -> Replacing:
    """Returns a context in which ``change`` can change the arguments of each call of ``pack``.

    Args:
        change: a function that is called as ``change(name, packing)`` and returns a ``Packing``. ``name``
            is the name of the transformation, such as ``"map_variables"``, and ``packing`` are the
            arguments of Flax.
    """

    def make(flax_pack: Any) -> Callable[..., Any]:
        def pack(fn: Any, ins: Filters, outs: Filters, *args: Any, **kwargs: Any) -> Any:
            """Replaces Flax's ``pack``: a decorator of ``fn`` with the filters that ``change`` returns."""

            @functools.wraps(fn)
            def packed(*scopes: Any, **options: Any) -> Any:
                packing = change(kwargs.get("name"), Packing(fn, ins, outs))
                return flax_pack(*packing, *args, **kwargs)(*scopes, **options)

            return packed

        return pack

    return Replacing(vars(lift), "pack", make)


def axis_of(collection: str, packing: Packing) -> int | None:
    """Returns the axis along which ``nn.scan`` or ``nn.vmap`` stacks a collection; None if it does not.

    The axis may be counted from the end.
    """
    axes = inspect.getclosurevars(packing.body).nonlocals["variable_in_axes"]
    # The groups without axes come first.
    stacked = zip(axes, packing.taken[len(packing.taken) - len(axes) :])
    return next((axis for axis, group in stacked if takes(group, collection)), None)


def takes(group: Any, collection: str) -> bool:
    """Returns whether a group of variables (given by its filter) has a collection."""
    return bool(in_filter(group, collection))


def takes_all(group: Any) -> bool:
    """Returns whether a group of variables has all collections, or all except some that are named."""
    return group is True or isinstance(group, DenyList)


def with_collection(group: Any, collection: str) -> Any:
    """Returns the filter of a group of variables with one more collection."""
    return union_filters(group, collection)


def without_collection(group: Any, collection: str) -> Any:
    """Returns the filter of a group of variables without a collection."""
    return subtract_filters(group, collection)
