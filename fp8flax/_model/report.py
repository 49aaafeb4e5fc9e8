"""The report of a converted model: its contractions, whether each runs in FP8, and why."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager

import jax

from fp8flax._compat.jaxprs import Program, equations
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.formats import E2M1
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.names import COUNTED, MODULE
from fp8flax._core.ops.op import OpBase
from fp8flax._core.recipes import DelayedScaling
from fp8flax._core.tables import table_lines
from fp8flax._core.types import Path
from fp8flax._linen.ops import op_type_of
from fp8flax._model.interception import HANDLED
from fp8flax._model.param_origin import Source
from fp8flax._model.rules import Site

NOT_RUN = "its op did not run in this call"
"""The reason in reports for an FP8 op of a model that the call does not reach, or computes without."""

GIVEN = "an op of its own"
"""The reason in reports for an op that the user gave to a layer."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One contraction of a model.

    Attributes:
        path: path of the module.
        kernel: path of the parameter that it multiplies with; None for a product of two activations.
        batch, m, k, n: the contraction is ``batch`` matmuls of (m, k) by (k, n).
        count: how often it is computed in one forward pass.
        converted: whether an FP8 op computes it. (``reason`` says if the op convolves in a wide dtype.)
        reason: the rule that converts it, or the reason why it is not converted. In NNX an op that
            exists, but did not run in the call, has a row with ``count`` and all sizes 0.
        is_fp4: whether its recipe multiplies in FP4 in the forward pass.
    """

    path: str
    kernel: str | None
    batch: int
    m: int
    k: int
    n: int
    count: int
    converted: bool
    reason: str
    is_fp4: bool = False

    @property
    def flops(self) -> int:
        """Returns the FLOPs of all its computations in one forward pass."""
        return self.count * GemmSizes(self.batch, self.m, self.k, self.n).flops


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Table of a model's contractions, and whether each of them runs in FP8.

    Attributes:
        rows: all contractions of the call, in the order in which the model computes them; then, in NNX, the
            FP8 ops that did not run.
    """

    rows: tuple[Row, ...]

    @property
    def converted(self) -> tuple[Row, ...]:
        """Returns the rows that run in FP8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def fp8_share(self) -> float:
        """Returns the share of FLOPs of the contractions that are converted."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.converted) / total if total else 0.0

    def __str__(self) -> str:
        ran = [row for row in self.rows if row.count]
        total, rows = sum(row.flops for row in ran) or 1, []
        for row in self.rows:
            name = (row.kernel or "-").removeprefix(f"{row.path}/" if row.path else "")
            sizes = [row.batch] * (row.batch != 1) + [row.m, row.k, row.n]
            share = f"{100 * row.flops / total:.1f}"
            sizes_text = "×".join(map(str, sizes)) if row.count else "-"
            dtype = "FP4" if row.is_fp4 else "FP8" if row.converted else "no"
            rows.append(
                (row.path or "(the model)", name, sizes_text, str(row.count), share, dtype, row.reason)
            )
        header = ("contraction", "kernel", "B×M×K×N", "times", "% FLOPs", "FP8?", "why")
        lines = [
            *table_lines(header, rows),
            "",
            f"{len(self.converted)} of {len(ran)} contractions are converted "
            f"({100 * self.fp8_share:.1f} % of their FLOPs).",
        ]
        return "\n".join(lines)


def add_site(sites: dict[Hashable, Site], site: Site) -> str:
    """Adds a contraction to those of a model, and returns the scope by which ``report_of`` finds it."""
    sites[site.key] = site
    return f"{COUNTED}{[*sites].index(site.key)}"


def given_site(op: OpBase, path: Path, sources: tuple[Source, ...], *operands: jax.Array) -> Site:
    """Returns the contraction of an op that the user gave to a module, which has the op at this path."""
    lhs, rhs, *arguments = operands
    shapes, dtypes, op_type = (lhs.shape, rhs.shape), (lhs.dtype, rhs.dtype), op.op_type
    sizes = op_type.sizes(*shapes, *arguments)
    site = Site(path[:-1], type(op), sources, op_type, shapes, dtypes, sizes, is_matmul=True)
    name = "_".join((op_type.name, *path[-1:]))
    return site._replace(name=name, converts=True, recipe=op.recipe, reason=GIVEN)


def in_module(path: Path) -> AbstractContextManager[None]:
    """Returns a scope by which ``report`` finds the module of a contraction."""
    return jax.named_scope(f"{MODULE}({'/'.join(path)})")


def report_of(program: Program, sites: dict[Hashable, Site], not_run: Iterable[str] = ()) -> ModelReport:
    """Returns the report of a model, from the jaxpr of a call and its contractions with the decisions.

    In ``program`` each contraction is in the scope ``add_site(sites, site)``. ``not_run`` are the paths of
    ops that did not run.
    """
    decided = {f"{COUNTED}{i}": site for i, site in enumerate(sites.values())}
    counts: Counter[tuple[Site | tuple[str, str], GemmSizes]] = Counter()
    for eqn, scopes, times, inside in equations(program):
        op_type = op_type_of(eqn.primitive)
        if op_type is None:
            continue
        lhs, rhs, *more = (var.aval for var in eqn.invars)
        sizes = op_type.sizes(lhs.shape, rhs.shape, *more, *op_type.arguments(eqn.params))
        handled, modules = HANDLED.findall(scopes), re.findall(rf"{MODULE}\((.*?)\)", scopes)
        if handled and handled[-1] not in decided:
            continue
        # JAX computes the others in a way that quantize_model does not look into.
        key = decided[handled[-1]] if handled else (modules[-1] if modules else "", _reason(inside))
        if isinstance(key, Site) and key.is_swapped:
            sizes = sizes._replace(m=sizes.n, n=sizes.m)
        counts[key, sizes] += times
    rows = []
    for (site, sizes), count in counts.items():
        if not isinstance(site, Site):
            path, reason = site
            rows.append(Row(path, None, *sizes, count, False, reason))
            continue
        converted, reason = site.converts, site.reason
        recipe = recipe_in_use(site.recipe, DelayedScaling()) if converted else None
        if converted and recipe is None:
            converted, reason = False, f"FP8 is off; otherwise in FP8 {reason}"
        is_fp4 = recipe is not None and getattr(recipe.gemms.forward.lhs, "dtype", None) == E2M1
        rows.append(Row(site.place, site.kernel, *sizes, count, converted, reason, is_fp4))
    rows += [Row(path, None, 0, 0, 0, 0, 0, False, NOT_RUN) for path in not_run]
    return ModelReport(rows=tuple(rows))


def _reason(inside: Sequence[str]) -> str:
    """Returns why a contraction inside of these primitives is not converted."""
    name = next((name for name in reversed(inside) if name != "jit"), "a function")
    name = name.replace("remat2", "checkpoint").removesuffix("_call")
    return f"inside of {name}, into which quantize_model does not look"
