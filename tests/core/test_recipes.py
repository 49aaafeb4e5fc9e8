import dataclasses
import functools
import re
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests import ROOT

PAGE = (ROOT / "docs" / "recipes_details.md").read_text()


def test_defaults_are_those_of_transformer_engine():
    recipe = fp8.DelayedScaling()
    assert dataclasses.asdict(recipe) == {
        "fp8_format": fp8.Format.HYBRID,
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "use_power_2_scales": False,
        "accumulation": {"forward": "fast", "dgrad": "exact", "wgrad": "exact"},
    }
    assert hash(recipe) == hash(fp8.DelayedScaling())


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        fp8.DelayedScaling().margin = 1
    with pytest.raises(TypeError, match="positional"):
        fp8.DelayedScaling(fp8.Format.HYBRID)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("amax_history_len", 0, ValueError, "amax_history_len"),
        ("amax_history_len", -3, ValueError, "amax_history_len"),
        ("amax_history_len", 2.0, TypeError, "amax_history_len"),
        ("amax_history_len", True, TypeError, "amax_history_len"),
        ("margin", -1, ValueError, "margin"),
        ("margin", 17, ValueError, "margin"),
        ("margin", "1", TypeError, "margin"),
        ("amax_compute_algo", "mean", ValueError, "most_recent"),
        ("fp8_format", "HYBRID", TypeError, "Format"),
        ("fp8_format", jnp.float8_e4m3fn, TypeError, "Format"),
    ],
)
def test_wrong_values_name_the_field(field, value, error, message):
    with pytest.raises(error, match=message):
        fp8.DelayedScaling(**{field: value})


def test_integers_of_numpy_become_ints():
    """An integer of NumPy has a dtype, which would take part in the promotion of dtypes."""
    delayed = fp8.DelayedScaling(amax_history_len=np.int64(16), margin=np.int32(1)).gemms.delayed["input"]
    block = fp8.BlockQuantizer(dtype=E4M3, block=(np.int64(1), np.int64(128))).block
    assert {type(n) for n in (delayed.amax_history_len, delayed.margin, *block)} == {int}


@pytest.mark.parametrize("field", ["forward", "dgrad", "wgrad"])
def test_accumulation_names_a_wrong_field(field):
    with pytest.raises(ValueError, match=field):
        fp8.Accumulation(**{field: "f32"})


RECIPES = [
    fp8.DelayedScaling(),
    fp8.Float8CurrentScaling(),
    fp8.MXFP8BlockScaling(),
    fp8.Float8BlockScaling(),
    fp8.CustomRecipe(),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_every_recipe_is_frozen_keyword_only_and_hashable(recipe):
    assert isinstance(recipe, fp8.Recipe)
    assert hash(recipe) == hash(type(recipe)())
    assert recipe == type(recipe)()
    assert recipe.gemms.gemms == recipe.gemms
    field = dataclasses.fields(recipe)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(recipe, field, None)
    with pytest.raises(TypeError, match="positional"):
        type(recipe)(getattr(recipe, field))


def parts(recipe):
    gemms = recipe.gemms
    return [
        None if q is None else (q.dtype.name.removeprefix("float8_"), getattr(q, "block", None))
        for gemm in (gemms.forward, gemms.dgrad, gemms.wgrad)
        for q in (gemm.lhs, gemm.rhs)
    ]


def test_the_parts_of_each_recipe():
    """Forward (input, kernel), dgrad (output gradient, kernel), wgrad (input, output gradient)."""
    x, g = ("e4m3fn", None), ("e5m2", None)
    assert parts(fp8.DelayedScaling()) == parts(fp8.Float8CurrentScaling()) == [x, x, g, x, x, g]
    assert parts(fp8.Float8CurrentScaling(high_precision_wgrad=True)) == [x, x, g, x, None, None]
    assert parts(fp8.MXFP8BlockScaling()) == [("e4m3fn", (1, 32))] * 6
    tile, block = ("e4m3fn", (1, 128)), ("e4m3fn", (128, 128))
    assert parts(fp8.Float8BlockScaling()) == [tile, block, tile, block, tile, tile]
    hybrid = fp8.MXFP8BlockScaling(fp8_format=fp8.Format.HYBRID)
    assert [p[0] for p in parts(hybrid)] == ["e4m3fn", "e4m3fn", "e5m2", "e4m3fn", "e4m3fn", "e5m2"]


E4M3 = jnp.float8_e4m3fn
DELAYED = fp8.DelayedQuantizer(dtype=E4M3)


@pytest.mark.parametrize(
    ("cls", "fields", "error", "message"),
    [
        (fp8.DelayedScaling, {"use_power_2_scales": 1}, TypeError, "use_power_2_scales"),
        (fp8.Float8CurrentScaling, {"fp8_format": "E4M3"}, TypeError, "fp8_format"),
        (fp8.Float8CurrentScaling, {"granularity": "rowwise"}, ValueError, "granularity"),
        (fp8.Float8CurrentScaling, {"high_precision_wgrad": "yes"}, TypeError, "high_precision_wgrad"),
        (
            fp8.Float8CurrentScaling,
            {"use_power_2_scales": None},
            TypeError,
            "use_power_2_scales must be True",
        ),
        (fp8.Float8CurrentScaling, {"accumulation": "fast"}, TypeError, "accumulation"),
        (fp8.MXFP8BlockScaling, {"fp8_format": E4M3}, TypeError, "fp8_format"),
        (fp8.MXFP8BlockScaling, {"fp8_format": fp8.Format.E4M3_FNUZ}, ValueError, "use DelayedScaling"),
        (fp8.MXFP8BlockScaling, {"scale_rounding": "nearest"}, ValueError, "scale_rounding"),
        (fp8.Float8BlockScaling, {"use_f32_scales": 0}, TypeError, "use_f32_scales"),
        (fp8.Float8BlockScaling, {"fp8_format": fp8.Format.HYBRID_FNUZ}, ValueError, "got HYBRID_FNUZ"),
        (fp8.DelayedQuantizer, {"dtype": "bfloat16"}, TypeError, "dtype"),
        (fp8.DelayedQuantizer, {"dtype": E4M3, "margin": 17}, ValueError, "margin"),
        (
            fp8.DelayedQuantizer,
            {"dtype": E4M3, "amax_history_len": 0},
            ValueError,
            "amax_history_len must be 1",
        ),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "granularity": None}, ValueError, "granularity"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": -1e-12}, ValueError, "amax_epsilon"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": 1e-40}, ValueError, "normal.*got 1e-40"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": 1e300}, ValueError, "got 1e\\+300"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": "0"}, TypeError, "a float"),
        (fp8.BlockQuantizer, {"dtype": jnp.float8_e8m0fnu}, TypeError, "dtype"),
        (fp8.BlockQuantizer, {"dtype": E4M3, "block": 32}, TypeError, "block must be a pair"),
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "block": (1, 0)},
            ValueError,
            r"block\[1\] \(columns\) must be 1",
        ),
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "block": (1.0, 32)},
            TypeError,
            r"block\[0\] \(rows\) must be an int",
        ),
        (fp8.BlockQuantizer, {"dtype": E4M3, "scale": "e4m3"}, ValueError, "scale .*e4m3"),
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "scale": "float32", "scale_rounding": "floor"},
            ValueError,
            "scale='e8m0'",
        ),
        (fp8.GemmRecipe, {"lhs": E4M3}, TypeError, "lhs"),
        (fp8.GemmRecipe, {"rhs": "bf16"}, TypeError, "rhs"),
        (fp8.GemmRecipe, {"accumulation": "slow"}, ValueError, "accumulation"),
        (fp8.CustomRecipe, {"forward": DELAYED}, TypeError, "forward"),
        (fp8.CustomRecipe, {"wgrad": None}, TypeError, "wgrad"),
        (fp8.CustomRecipe, {"dgrad": fp8.MXFP8BlockScaling()}, TypeError, "dgrad"),
        (
            fp8.CustomRecipe,
            {
                "forward": fp8.GemmRecipe(lhs=DELAYED),
                "wgrad": fp8.GemmRecipe(lhs=dataclasses.replace(DELAYED, margin=2)),
            },
            ValueError,
            "forward.lhs and wgrad.lhs",
        ),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else None,
)
def test_wrong_values_of_the_other_classes(cls, fields, error, message):
    with pytest.raises(error, match=message):
        cls(**fields)


class Plain(fp8.Recipe):
    def __init__(self, block=(1, 32)):
        self.block = block

    @property
    def gemms(self):
        return fp8.MXFP8BlockScaling().gemms


@dataclasses.dataclass(kw_only=True)
class Thawed(Plain):
    block: tuple = (1, 32)


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class ThawedButHashable(Plain):
    block: tuple = (1, 32)


class Base(fp8.Recipe):
    gemms = Plain.gemms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frozen(Base):
    block: tuple = (1, 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncompared(Base):
    blocks: list = dataclasses.field(default_factory=list, compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unhashable(Base):
    __hash__ = None


class AddsAnnotation(Frozen):
    margin: int = 0


class AddsAttribute(Frozen):
    def __init__(self):
        super().__init__()
        self.margin = 0


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (Plain(), "class Plain is not a dataclass"),
        (Thawed(), "class Thawed is not frozen"),
        (ThawedButHashable(), "is not frozen"),
        (
            Frozen(block=[1, 32]),
            r"has a field block that cannot be hashed, \[1, 32\] \(make a list a tuple\)",
        ),
        (Uncompared(), "has a field blocks that cannot be hashed"),
        (Unhashable(), "cannot be hashed"),
        (AddsAnnotation(), "adds margin to the frozen dataclass that it is derived from"),
        (AddsAttribute(), "adds margin to"),
    ],
    ids=lambda v: None if isinstance(v, str) else type(v).__name__,
)
def test_a_recipe_that_can_be_changed(recipe, why):
    message = rf"frozen.*{why}"
    for use in (
        lambda: fp8.autocast(recipe=recipe),
        lambda: fp8.Fp8DotGeneralOp(recipe=recipe),
        lambda: fp8.quantize_model(nn.Dense(4), recipe),
    ):
        with pytest.raises(TypeError, match=message):
            use()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slots(Base):
    block: tuple = (1, 32)


@dataclasses.dataclass(frozen=True, eq=False)
class ById(Base):
    pass


class AddsNothing(Frozen):
    """No field, but what may be computed from the fields."""

    name: ClassVar[str] = "nothing"

    @functools.cached_property
    def gemms(self):
        return super().gemms


class Derived(AddsNothing):
    """Has the cached property of the class that it is derived from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Caches(fp8.Recipe):
    @functools.cached_property
    def gemms(self):
        return fp8.MXFP8BlockScaling().gemms


class DerivedFromCaches(Caches):
    pass


@pytest.mark.parametrize("cls", [Frozen, Slots, ById, AddsNothing, Derived, DerivedFromCaches])
def test_a_frozen_recipe_of_ones_own(cls):
    recipe = cls()
    for _ in range(2):
        assert recipe.gemms == fp8.MXFP8BlockScaling().gemms
        assert fp8.Fp8DotGeneralOp(recipe=recipe).recipe is recipe


# The fields of transformer_engine.common.recipe that a recipe here could have.
TRANSFORMER_ENGINE = {
    "DelayedScaling": {
        *("margin", "fp8_format", "amax_history_len", "amax_compute_algo", "scaling_factor_compute_algo"),
        *("reduce_amax", "fp8_dpa", "fp8_mha", "backward_override"),
    },
    "Float8CurrentScaling": {"use_power_2_scales", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override"},
    "MXFP8BlockScaling": {"margin", "fp8_format", "fp8_dpa", "fp8_mha", "backward_override"},
    "Float8BlockScaling": {"use_f32_scales", "fp8_format", "x_block_scaling_dim", "w_block_scaling_dim"},
    "CustomRecipe": {"qfactory"},
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_the_page_says_which_fields_are_transformer_engines(recipe):
    name = type(recipe).__name__
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    theirs, ours = (set(re.findall(r"`(\w+)`", cell)) for cell in row.split("|")[2:4])
    fields = {field.name for field in dataclasses.fields(recipe)}
    assert theirs == fields & TRANSFORMER_ENGINE[name]
    assert ours == fields - TRANSFORMER_ENGINE[name]
