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
from contextvars import ContextVar
from typing import Any

from flax.core import lift
from flax.core.scope import DenyList, in_filter, subtract_filters, union_filters

_PARAMS = "params"
_beside_params: ContextVar[tuple[str, ...]] = ContextVar("beside_params", default=())
_in_custom_vjp: ContextVar[bool] = ContextVar("in_custom_vjp", default=False)
_flax_pack = lift.pack


@contextlib.contextmanager
def beside_params(*collections: str) -> Iterator[None]:
    """A context in which lifted transformations take these collections along with the parameters."""
    token = _beside_params.set(collections)
    try:
        yield
    finally:
        _beside_params.reset(token)


def in_custom_vjp() -> bool:
    """Tells whether the code that runs is that of ``nn.custom_vjp``, inside of ``beside_params``."""
    return _in_custom_vjp.get()


def _with_ours(filters: Sequence[Any], is_map: bool) -> tuple[Any, ...]:
    """Returns the collections of each group of variables, ours in the right one."""
    groups = list(filters)
    for ours in _beside_params.get():
        if is_map and (groups[0] is True or isinstance(groups[0], DenyList)):
            groups[0] = subtract_filters(groups[0], ours)
        elif not any(in_filter(group, ours) for group in groups):
            of_params = [i for i, group in enumerate(groups) if in_filter(group, _PARAMS)][:1]
            for i in of_params:
                groups[i] = union_filters(groups[i], ours)
    return tuple(groups)


def _pack(fn: Any, ins: Sequence[Any], outs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if not _beside_params.get():
        return _flax_pack(fn, ins, outs, *args, **kwargs)
    name = kwargs.get("name")

    def marked(*args: Any, **kwargs: Any) -> Any:
        token = _in_custom_vjp.set(True)
        try:
            return fn(*args, **kwargs)
        finally:
            _in_custom_vjp.reset(token)

    is_map = name == "map_variables"
    inner = marked if name == "custom_vjp" else fn
    return _flax_pack(inner, _with_ours(ins, is_map), _with_ours(outs, is_map), *args, **kwargs)


lift.pack = _pack  # type: ignore[assignment]
