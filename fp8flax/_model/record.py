"""The record of the calls of a converted model, which its clones share."""

from __future__ import annotations

from typing import Any

from fp8flax._model.rules import Decision, Site


class Seen:
    """The record of the calls of a converted model."""

    def __init__(self) -> None:
        self.decided: list[tuple[Site, Decision]] = []
        """The contractions of the last call, and the decisions about them."""
        self.calls: dict[str, Any] = {}
        """By the name of each method that was called: the arguments of its last call, without arrays."""

    def __deepcopy__(self, memo: Any) -> Seen:
        return self  # a copy of the model shares the record

    def __reduce__(self) -> Any:
        return Seen, ()  # an unpickled model starts with an empty record


def seen_of(model: Any) -> Seen:
    """Returns the record of a converted model, which is empty before its first call."""
    if "_fp8_seen" not in vars(model):
        object.__setattr__(model, "_fp8_seen", Seen())
    seen: Seen = model._fp8_seen
    return seen
