"""Rules that decide which contractions of a model run in FP8, and give the reason for the others."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn

from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.op import Form, Op
from fp8flax._core.options import check_bool, check_choice
from fp8flax._core.recipes import Recipe, check_recipe
from fp8flax._core.types import Path
from fp8flax._model.param_origin import Source

LEAVE = "leave"
"""The outcome of a rule that leaves a contraction in its wide dtype."""

SMALLEST_SIZE = 16
"""K and N below this are less than one tile of the FP8 units."""

BREAK_EVEN = 281
"""The value of ``1/(1/M + 1/K + 1/N)`` from which on FP8 can beat bf16 on an H200: with 790 TFLOP/s in
bf16, 1400 TFLOP/s in FP8, and one pass to quantize. For any M the term is less than ``1/(1/K + 1/N)``."""

LOGITS = re.compile(
    r"(^|[/_])(lm_?head|logits?(_dense)?|classifier|unembed(ding)?)(_?\d*)($|/)"
    r"|(^|[/_])(predictions?(/decoder)?)$|(^|/)head$",
    re.IGNORECASE,
)
"""Names of layers that are taken to be the last layer of a model."""

ROUTER = re.compile(r"(^|[/_])router(_?\d*)($|/)", re.IGNORECASE)
"""Names of layers that are taken to be routers of experts."""

DEFAULT = "default"
"""The description of the rule that decides if no other one matches."""


class Site(NamedTuple):
    """A contraction in a model, and the decision of the rules about it."""

    path: Path
    """The path of the module."""
    module: Any
    """The module while the model runs; only its class afterwards."""
    sources: tuple[Source, ...]
    """The parameters that the kernel is made of; none in a product of two activations or two parameters."""
    op: type[Op]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[Any, Any]
    sizes: GemmSizes
    is_matmul: bool
    """False for a convolution that cannot be computed as a matmul."""
    impossible: str | None = None
    """The reason why no FP8 op can compute the contraction; None if one can."""
    name: str = ""
    """The name of its op in the module."""
    product: str = ""
    """What one operand is, if there is no kernel and the operand is no activation either."""
    is_swapped: bool = False
    """Whether the kernel is the left operand in the model."""
    in_custom_vjp: bool = False
    """Whether it is inside of a function with a derivative of its own."""
    stacked: tuple[int, ...] = ()
    """In NNX, the sizes of the axes that ``nnx.vmap`` or ``nnx.scan`` has put in front of the kernel."""
    converts: bool = False
    """Whether the rules convert it. This field and those below are set by ``Rules.decide``."""
    recipe: Recipe | None = None
    """The recipe of a conversion; None for the recipe of ``autocast``, or the default."""
    options: tuple[tuple[str, str], ...] = ()
    """The options of its op beside the recipe, with their values."""
    reason: str = ""
    pattern: str | None = None
    """The description of the rule that decided; None if none did."""

    @property
    def place(self) -> str:
        """The path of the module as text, such as ``encoder/layer_0``, for rules and people."""
        return "/".join(self.path)

    @property
    def kernel(self) -> str | None:
        """The path of the parameter that is the kernel, or of the first that it is made of, as text."""
        return "/".join(self.sources[0].path) if self.sources else None

    @property
    def key(self) -> Hashable:
        """What the contraction is known by, in each trace of the model."""
        return self.path, self.name, self.kernel, self.shapes, self.impossible


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The validated arguments of ``quantize_model`` (hashable)."""

    recipe: Recipe | None = None
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    rules: tuple[Any, ...] = ()
    products: bool = False
    allow_unmatched: bool = False
    form: Form = "direct"

    def __post_init__(self) -> None:
        check_choice("form", self.form, tuple(DotGeneral.plans))
        check_bool("products", self.products)
        check_bool("allow_unmatched", self.allow_unmatched)
        if self.recipe is not None:
            check_recipe(self.recipe)
        for name in ("include", "exclude", "rules"):
            value = getattr(self, name)
            if value is not None or name != "include":
                is_one = isinstance(value, str) or not isinstance(value, Iterable)
                object.__setattr__(self, name, (value,) if is_one else tuple(value))
        for rule in self.rules:
            if callable(rule):
                continue
            if not isinstance(rule, tuple) or len(rule) != 2:
                raise ValueError(
                    "rules must be pairs of a regular expression on module paths and a recipe or "
                    f"'leave', or callables of (path, module, shapes); got {rule!r}."
                )
            _check_outcome(rule[1], f"the rule for {rule[0]!r}")
        for text, pattern, _ in self._in_order():
            try:
                re.compile("" if pattern in self.rules else pattern)  # a rule may be a callable
            except (re.error, TypeError) as error:
                raise ValueError(
                    "include, exclude and rules must have regular expressions on module paths; got "
                    f"{text}: {error}."
                ) from error

    def _in_order(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields the description, the pattern or callable, and the outcome of each rule in order."""
        for pattern in self.exclude:
            yield f"exclude {pattern!r}", pattern, LEAVE
        for rule in self.rules:
            yield ("a rule", rule, None) if callable(rule) else (f"the rule {rule[0]!r}", *rule)
        for pattern in self.include or ():
            yield f"include {pattern!r}", pattern, self.recipe

    def decide(self, site: Site) -> Site:
        """Returns a contraction with the decision of the first rule that matches, or of the default.

        Raises:
            ValueError: the rules convert it, but it is inside of Flax's ``custom_vjp``.
        """
        default = [] if self.include is not None else [(DEFAULT, "", self.recipe)]
        for text, pattern, outcome in (*self._in_order(), *default):
            if callable(pattern):
                outcome = pattern(site.place, site.module, site.shapes)
                if outcome is None:
                    continue
                _check_outcome(outcome, f"a rule, for {site.place!r},")
            elif not any(re.search(pattern, path) for path in (site.place, site.kernel or site.place)):
                continue
            if isinstance(outcome, str):
                return site._replace(reason=f"left by {text}", pattern=text)
            reason = self._why_not(site, is_default=text == DEFAULT)
            if reason is not None:
                return site._replace(reason=reason, pattern=text)
            if site.in_custom_vjp:
                raise ValueError(
                    f"{site.place or 'The model'!r} is inside of Flax's custom_vjp, whose derivative is "
                    "the model's own. An FP8 op there could not update its scaling state. Leave it wide: "
                    f"quantize_model(model, exclude={site.place!r})."
                )
            by = f"by {text}" if site.is_matmul else f"by {text}: FP8 values, convolved in a wide dtype"
            options = (("form", self.form),) if len(site.op.plans) > 1 else ()
            return site._replace(converts=True, recipe=outcome, options=options, reason=by, pattern=text)
        return site._replace(reason="not included")

    def _why_not(self, site: Site, is_default: bool) -> str | None:
        """Returns why a contraction stays wide, at any batch size; None if it is converted.

        By default it stays wide also where FP8 would gain nothing.
        """
        k, n = site.sizes.k, site.sizes.n
        if site.impossible is not None:
            return site.impossible
        if site.kernel is None and not self.products:
            product = f"with {site.product}" if site.product else "of two activations"
            return f"a product {product} (products=True converts them)"
        if narrow := ", ".join(str(d) for d in site.dtypes if not is_wide_float(d)):
            return f"operands of {narrow}"
        if not is_default:
            return None
        if isinstance(site.module, nn.Embed):
            return "an embedding"
        if LOGITS.search(site.place):
            return "the logits, by the layer's name"
        if ROUTER.search(site.place):
            return "a router, by the layer's name"
        if not site.is_matmul:
            return "a convolution that is not a matmul, for which XLA has no FP8 with gradients"
        if min(k, n) < SMALLEST_SIZE:
            return f"K={k}, N={n}: a size below {SMALLEST_SIZE}"
        if site.kernel is not None and (size := 1 / (1 / k + 1 / n)) < BREAK_EVEN:
            return f"K={k}, N={n}: too small to gain, 1/(1/K + 1/N) = {size:.0f} < {BREAK_EVEN}"
        return None

    def check(self, decided: Collection[Site], has_ops: bool) -> None:
        """Raises ``ValueError`` if a pattern decided nothing, or the model would have no FP8 op."""
        if not decided and not has_ops:
            raise ValueError(
                "The model computes no contraction that quantize_model looks into. Layers with an op of "
                "their own, such as Flax's FP8 ops, keep it. quantize_model looks into Flax's scan and "
                "remat, but not into JAX's own lax.scan, jax.checkpoint and custom derivatives. In NNX it "
                "needs inputs to find what modules write out: quantize_model(model, x)."
            )
        used = {site.pattern for site in decided}
        texts = [text for text, pattern, _ in self._in_order() if not callable(pattern)]
        unmatched = ", ".join(text for text in texts if text not in used)
        if unmatched and not self.allow_unmatched:
            paths = ", ".join(sorted({site.place or "(the model itself)" for site in decided}))
            raise ValueError(
                f"No contraction was the first to match {unmatched}. The modules with contractions are: "
                f"{paths}. Correct the pattern, or pass allow_unmatched=True."
            )
        if not has_ops and not any(site.converts for site in decided):
            reasons = sorted({f"{site.place or 'the model'}: {site.reason}" for site in decided})
            raise ValueError(
                f"None of the model's {len(decided)} contractions would run in FP8. "
                f"{'; '.join(reasons[:8])}{'; …' if len(reasons) > 8 else ''}. include=r'.*' converts also "
                "what the defaults leave out."
            )


def _check_outcome(outcome: Any, who: str) -> None:
    if not isinstance(outcome, str):
        check_recipe(outcome)
    elif outcome != LEAVE:
        raise ValueError(f"{who} must give a recipe or 'leave'; got {outcome!r}.")
