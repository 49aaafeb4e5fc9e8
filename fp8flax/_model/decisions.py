"""The decisions of the rules about a model, and the errors for rules that decide nothing."""

from __future__ import annotations

import dataclasses
import zlib
from typing import NamedTuple

from fp8flax._core.names import COUNTED
from fp8flax._model.rules import Decision, Rules, Site


class SeenSite(NamedTuple):
    """A contraction that a model computes, with the decision of the rules."""

    site: Site
    decision: Decision
    name: str
    """The name of the contraction in its module, and of the op if it was converted."""
    is_swapped: bool
    """Whether the kernel is the left operand in the model."""

    @property
    def scope(self) -> str:
        """The name of the scope by which ``report`` finds the contraction in a program.

        The name is the same in each trace.
        """
        text = f"{self.site.path}/{self.name}/{self.site.shapes}/{self.site.impossible}"
        return f"{COUNTED}{zlib.crc32(text.encode()):08x}"


NOTHING_SEEN = (
    "The model's methods compute no contraction that quantize_model looks into. Layers with an op of their "
    "own, such as Flax's FP8 ops, keep it: leave out their dot_general_cls to have them converted. "
    "quantize_model looks into Linen's nn.scan and nn.remat, but not into JAX's own lax.scan, "
    "jax.checkpoint and custom derivatives."
)


def check_matched(rules: Rules, sites: list[SeenSite]) -> None:
    """Raises ``ValueError`` if a rule was not the first to match any contraction.

    Args:
        rules: the rules of the model.
        sites: the contractions that the model computes.
    """
    paths = sorted({found.site.path or "(the model itself)" for found in sites})
    used = {found.decision.rule for found in sites}
    unmatched = [text for i, text in enumerate(rules.patterns) if i not in used]
    if unmatched and not rules.allow_unmatched:
        if not sites:
            raise ValueError(f"No contraction was found for {', '.join(unmatched)}. {NOTHING_SEEN}")
        raise ValueError(
            f"No contraction was the first to match {', '.join(unmatched)}. The modules with contractions "
            f"are: {', '.join(paths)}. Correct the pattern, or pass allow_unmatched=True."
        )


def why_unconverted(rules: Rules, sites: list[SeenSite]) -> str:
    """Returns a message: why the rules convert none of these contractions, and what to do."""
    reasons = sorted({f"{f.site.path or 'the model'}: {f.decision.reason}" for f in sites})
    patterns = tuple(rule for rule in rules.rules if not callable(rule))
    everything = dataclasses.replace(rules, rules=patterns, include=(".*",))
    advice = ""
    if rules.include is None and any(everything.decide(found.site).converts for found in sites):
        advice = " include=r'.*' converts all layers, small ones too."
    return (
        f"None of the model's {len(sites)} contractions would run in FP8. {'; '.join(reasons[:8])}"
        f"{'; …' if len(reasons) > 8 else ''}.{advice}"
    )
