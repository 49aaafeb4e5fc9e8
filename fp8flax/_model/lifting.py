"""Lets Linen's lifted transformations treat collections of ours as they treat the parameters.

Whoever wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` did not know of the scaling
state. In a model that ``quantize_model`` converted, the state of an op is to be stacked, sliced and shared
as the kernel beside it is, so its collection goes wherever ``params`` goes, unless the transformation names
it or takes all collections. And what a model maps, as ``nn.WeightNorm`` does, is its own:
``nn.map_variables`` of all collections passes the scaling state by, that of ops given by hand too.

Internals: ``flax.core.scope``, for its filters, and ``flax.core.lift``, through whose ``pack`` every lifted
transformation says which collections it takes. It is replaced by a function that does the same, except for
those maps and inside of ``beside_params``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax.core import lift
from flax.core.scope import DenyList, in_filter, subtract_filters, union_filters

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._linen.conversion import OnMap, conversion, converting

_flax_pack = lift.pack


@contextlib.contextmanager
def beside_params(collection: str, on_map: OnMap) -> Iterator[None]:
    """A context in which lifted transformations take a collection along with the parameters.

    Args:
        collection: its name.
        on_map: told what ``nn.map_variables`` makes of the parameters.
    """
    with converting(beside_params=collection, on_map=(*conversion().on_map, on_map)):
        yield


def _beside(filters: Sequence[Any], ours: str) -> tuple[Any, ...]:
    """Returns the collections of each group of variables, ours with the parameters."""
    groups = list(filters)
    if not any(in_filter(group, ours) for group in groups):
        of_params = [i for i, group in enumerate(groups) if in_filter(group, PARAMS)][:1]
        for i in of_params:
            groups[i] = union_filters(groups[i], ours)
    return tuple(groups)


def _passed_by(filters: Sequence[Any], ours: str) -> tuple[Any, ...]:
    """Returns the collections that ``nn.map_variables`` maps, without ours, and those that it does not."""
    mapped, others = filters
    return subtract_filters(mapped, ours), union_filters(others, ours)


def _pack(fn: Any, ins: Sequence[Any], outs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    ours, name = conversion().beside_params, kwargs.get("name")
    if name == "map_variables" and (ins[0] is True or isinstance(ins[0], DenyList)):
        for collection in {OVERWRITE_WITH_GRADIENT, ours or OVERWRITE_WITH_GRADIENT}:
            ins, outs = _passed_by(ins, collection), _passed_by(outs, collection)
    if ours is not None:
        ins, outs = _beside(ins, ours), _beside(outs, ours)
    if name == "map_variables" and conversion().on_map and in_filter(ins[0], PARAMS):

        def packed(scopes: Any, *rest: Any, **options: Any) -> Any:
            return _flax_pack(_telling(fn, scopes), ins, outs, *args, **kwargs)(scopes, *rest, **options)

        return packed
    return _flax_pack(_marked(fn) if name == "custom_vjp" else fn, ins, outs, *args, **kwargs)


def _marked(fn: Any) -> Any:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with converting(in_custom_vjp=True):
            return fn(*args, **kwargs)

    return marked


def _telling(fn: Any, outer: Any) -> Any:
    """Returns the body of ``nn.map_variables``, telling those who asked what it has mapped."""

    def telling(make_scopes: Any, repack: Any, groups: Any, *rest: Any, **kwargs: Any) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            scopes = make_scopes(*args, **options)
            for tell in conversion().on_map:
                for before, after in zip(jax.tree.leaves(outer), jax.tree.leaves(scopes)):
                    tell(before, groups[0], after)
            return scopes

        return fn(make, repack, groups, *rest, **kwargs)

    return telling


lift.pack = _pack  # type: ignore[assignment]
