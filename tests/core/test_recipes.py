import dataclasses
import re

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
        "accumulation": ("fast", "exact", "exact"),
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
        ("amax_history_len", 0, ValueError, "amax_history_len must be 1 or more; got 0"),
        ("amax_history_len", -3, ValueError, "amax_history_len must be 1 or more; got -3"),
        ("amax_history_len", 2.0, TypeError, "amax_history_len must be an int; got 2.0 of type float"),
        ("amax_history_len", True, TypeError, "amax_history_len must be an int; got True of type bool"),
        ("margin", -1, ValueError, "margin must be 0 or more; got -1"),
        ("margin", 17, ValueError, "margin must be 16 or less; got 17"),
        ("margin", "1", TypeError, "margin must be an int; got '1' of type str"),
        ("amax_compute_algo", "mean", ValueError, r"one of \('max', 'most_recent'\); got 'mean'"),
        ("fp8_format", "HYBRID", TypeError, "must be a member of fp8flax.Format.*got 'HYBRID'"),
        ("fp8_format", jnp.float8_e4m3fn, TypeError, "must be a member of fp8flax.Format"),
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


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling, fp8.Float8CurrentScaling])
def test_accumulation_has_one_of_three_words_for_each_gemm(recipe):
    gemms = recipe(accumulation=("exact", "fast", "default")).gemms
    assert [g.accumulation for g in (gemms.forward, gemms.dgrad, gemms.wgrad)] == [
        "exact",
        "fast",
        "default",
    ]
    with pytest.raises(ValueError, match=r"accumulation must be one of .* got 'f32'"):
        recipe(accumulation=("fast", "f32", "exact"))
    for value in ("fast", ("fast", "exact"), ["fast", "exact", "exact"]):
        with pytest.raises(TypeError, match="accumulation must be a tuple of three words"):
            recipe(accumulation=value)


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
        (
            fp8.DelayedScaling,
            {"use_power_2_scales": 1},
            TypeError,
            "use_power_2_scales must be True or False",
        ),
        (
            fp8.Float8CurrentScaling,
            {"fp8_format": "E4M3"},
            TypeError,
            "fp8_format must be a member.*'E4M3'",
        ),
        (
            fp8.Float8CurrentScaling,
            {"granularity": "rowwise"},
            ValueError,
            r"granularity must be one of \('tensorwise', 'axiswise'\); got 'rowwise'",
        ),
        (
            fp8.Float8CurrentScaling,
            {"high_precision_wgrad": "yes"},
            TypeError,
            "high_precision_wgrad must be True or False; got 'yes' of type str",
        ),
        (
            fp8.Float8CurrentScaling,
            {"use_power_2_scales": None},
            TypeError,
            "use_power_2_scales must be True",
        ),
        (fp8.MXFP8BlockScaling, {"fp8_format": E4M3}, TypeError, "fp8_format must be a member of"),
        (
            fp8.MXFP8BlockScaling,
            {"fp8_format": fp8.Format.E4M3_FNUZ},
            ValueError,
            "must be E4M3, E5M2 or HYBRID.*got E4M3_FNUZ. For FNUZ formats use DelayedScaling",
        ),
        (
            fp8.MXFP8BlockScaling,
            {"scale_rounding": "nearest"},
            ValueError,
            r"scale_rounding must be one of \('up', 'floor'\); got 'nearest'",
        ),
        (
            fp8.Float8BlockScaling,
            {"use_f32_scales": 0},
            TypeError,
            "use_f32_scales must be True or False; got 0",
        ),
        (fp8.Float8BlockScaling, {"fp8_format": fp8.Format.HYBRID_FNUZ}, ValueError, "got HYBRID_FNUZ"),
        (
            fp8.DelayedQuantizer,
            {"dtype": "bfloat16"},
            TypeError,
            "dtype must be an FP8 dtype.*got 'bfloat16'",
        ),
        (
            fp8.DelayedQuantizer,
            {"dtype": E4M3, "margin": 17},
            ValueError,
            "margin must be 16 or less; got 17",
        ),
        (
            fp8.DelayedQuantizer,
            {"dtype": E4M3, "amax_history_len": 0},
            ValueError,
            "amax_history_len must be 1",
        ),
        (
            fp8.CurrentQuantizer,
            {"dtype": E4M3, "granularity": None},
            ValueError,
            "granularity must be one of",
        ),
        (
            fp8.CurrentQuantizer,
            {"dtype": E4M3, "amax_epsilon": -1e-12},
            ValueError,
            "amax_epsilon must be 0 or a normal, positive float32; got -1e-12",
        ),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": 1e-40}, ValueError, "normal.*got 1e-40"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": 1e300}, ValueError, "got 1e\\+300"),
        (fp8.CurrentQuantizer, {"dtype": E4M3, "amax_epsilon": "0"}, TypeError, "must be a float; got '0'"),
        (fp8.BlockQuantizer, {"dtype": jnp.float8_e8m0fnu}, TypeError, "dtype must be an FP8 dtype"),
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "block": 32},
            TypeError,
            r"block must be a pair.*\(1, 32\); got 32",
        ),
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
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "scale": "e4m3"},
            ValueError,
            "scale must be one of.*got 'e4m3'",
        ),
        (
            fp8.BlockQuantizer,
            {"dtype": E4M3, "scale": "float32", "scale_rounding": "floor"},
            ValueError,
            "scale_rounding='floor' requires scale='e8m0'; got scale='float32'. Use scale='e8m0'",
        ),
        (fp8.GemmRecipe, {"lhs": E4M3}, TypeError, "lhs must be a DelayedQuantizer.*or None"),
        (fp8.GemmRecipe, {"rhs": "bf16"}, TypeError, "rhs must be .* got 'bf16'"),
        (fp8.GemmRecipe, {"accumulation": "slow"}, ValueError, "accumulation must be one of.*got 'slow'"),
        (
            fp8.CustomRecipe,
            {"forward": DELAYED},
            TypeError,
            r"forward must be a GemmRecipe\(lhs=…, rhs=…\)",
        ),
        (fp8.CustomRecipe, {"wgrad": None}, TypeError, "wgrad must be a GemmRecipe.*got None"),
        (
            fp8.CustomRecipe,
            {"dgrad": fp8.MXFP8BlockScaling()},
            TypeError,
            "dgrad must be a GemmRecipe.*take it from its gemms",
        ),
        (
            fp8.CustomRecipe,
            {
                "forward": fp8.GemmRecipe(lhs=DELAYED),
                "wgrad": fp8.GemmRecipe(lhs=dataclasses.replace(DELAYED, margin=2)),
            },
            ValueError,
            "forward.lhs and wgrad.lhs quantize the input by two different.*Make them equal",
        ),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else None,
)
def test_wrong_values_of_the_other_classes(cls, fields, error, message):
    with pytest.raises(error, match=message):
        cls(**fields)


class Derived(fp8.DelayedScaling):
    """A class of a user, whose attributes could change."""


class DerivedQuantizer(fp8.CurrentQuantizer):
    """A class of a user, which could quantize in another way."""


@pytest.mark.parametrize(
    "recipe", [Derived(), fp8.Recipe(), fp8.DelayedScaling], ids=["derived", "base", "class"]
)
def test_other_classes_are_not_recipes(recipe):
    for use in (
        lambda: fp8.autocast(recipe=recipe),
        lambda: fp8.Fp8DotGeneralOp(recipe=recipe),
        lambda: fp8.quantize_model(nn.Dense(4), recipe),
    ):
        with pytest.raises(TypeError, match="recipe must be an instance.*CustomRecipe"):
            use()


def test_other_classes_are_not_quantizers():
    with pytest.raises(TypeError, match="lhs must be a DelayedQuantizer"):
        fp8.GemmRecipe(lhs=DerivedQuantizer(dtype=E4M3))


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
