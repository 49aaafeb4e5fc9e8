"""Changes which collections of variables Linen's lifted transformations (``nn.scan``, ``nn.vmap``, …) take.

Why: whoever wrote ``nn.scan(..., variable_axes={"params": 0})`` did not know of the scaling state, which
must be sliced and stacked as the parameters are. And ``nn.WeightNorm``, which maps all variables of its
layer, must not normalize the scaling state. Every lifted transformation of Flax says by
``flax.core.lift.pack`` which collections it takes, and nothing public changes that of a transformation in a
model's source. So this file replaces that function, once, at import.

Internals: ``flax.core.lift``, of which ``pack`` is replaced, and ``flax.core.scope``, for the filters that
say which collections are taken. Without them ``quantize_model`` raises an error, and an op given by hand
inside ``nn.WeightNorm`` cannot be trained with delayed scaling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flax.core import DenyList

from fp8flax._compat.missing import MissingPart, missing

_PART = "flax.core.lift.pack"
_FEATURE = "fp8flax.quantize_model"
try:
    from flax.core import lift

    _flax_pack: Any = lift.pack
except (ImportError, AttributeError):
    _flax_pack = MissingPart(_PART, _FEATURE)
try:
    from flax.core.scope import in_filter, subtract_filters, union_filters
except ImportError:
    in_filter = subtract_filters = union_filters = MissingPart("flax.core.scope", _FEATURE)

Filters = Sequence[Any]
"""Which collections each group of variables has."""


class Packing(NamedTuple):
    """What a transformation gives to ``pack``."""

    body: Callable[..., Any]
    """Called as ``(make_scopes, repack, groups, rngs, *args)``."""
    taken: Filters
    """The collections that it takes."""
    returned: Filters
    """The collections that it returns."""


def change_packing(change: Callable[[str | None, Any, Packing], Packing]) -> None:
    """Has all lifted transformations take what ``change`` returns.

    Args:
        change: called as ``(name, scopes, packing)``, with the name of the transformation, such as
            ``"map_variables"``, and the scopes that it is applied to.
    """
    if isinstance(_flax_pack, MissingPart):
        return

    def pack(fn: Any, ins: Filters, outs: Filters, *args: Any, **kwargs: Any) -> Any:
        @functools.wraps(fn)
        def packed(scopes: Any, *rest: Any, **options: Any) -> Any:
            packing = change(kwargs.get("name"), scopes, Packing(fn, ins, outs))
            return _flax_pack(*packing, *args, **kwargs)(scopes, *rest, **options)

        return packed

    lift.pack = pack  # type: ignore[assignment]


def check_pack() -> None:
    """Raises ``RuntimeError`` where transformations do not take what ``change_packing`` said."""
    if isinstance(_flax_pack, MissingPart):
        raise missing(_PART, _FEATURE)


def takes(group: Any, collection: str) -> bool:
    """Tells whether a group of variables has a collection."""
    return bool(in_filter(group, collection))


def takes_all(group: Any) -> bool:
    """Tells whether a group of variables has all collections, or all but some that are named."""
    return group is True or isinstance(group, DenyList)


def with_collection(group: Any, collection: str) -> Any:
    """Returns a group of variables with one more collection."""
    return union_filters(group, collection)


def without_collection(group: Any, collection: str) -> Any:
    """Returns a group of variables without a collection."""
    return subtract_filters(group, collection)
