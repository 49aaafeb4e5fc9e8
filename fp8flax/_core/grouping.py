"""Calls a function once for all items of a kind, such as all small arrays of one shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any


def in_groups(
    f: Callable[..., Iterable[Any]], keys: Iterable[Hashable], *lists: Sequence[Any]
) -> list[Any]:
    """Calls ``f`` once for all items with equal keys; returns the results in the order of the items.

    Groups are called in the order of their first items.

    Args:
        f: a function of one list for each of ``lists``, with the items of one group. It returns a result
            for each of these items.
        keys: the key of each item.
        *lists: lists of items; each has as many as there are keys.
    """
    positions: dict[Hashable, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        positions[key].append(i)
    results: dict[int, Any] = {}
    for group in positions.values():
        results.update(zip(group, f(*([items[i] for i in group] for items in lists)), strict=True))
    return [results[i] for i in range(len(results))]
