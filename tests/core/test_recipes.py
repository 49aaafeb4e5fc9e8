import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8


def test_defaults_are_those_of_transformer_engine():
    assert dataclasses.asdict(fp8.DelayedScaling()) == {
        "fp8_format": fp8.Format.HYBRID,
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "use_power_2_scales": False,
        "accumulation": ("fast", "exact", "exact"),
    }


def test_integers_of_numpy_become_ints():
    """An integer of NumPy has a dtype, which would take part in the promotion of dtypes."""
    delayed = fp8.DelayedScaling(amax_history_len=np.int64(16), margin=np.int32(1)).gemms.delayed["input"]
    block = fp8.BlockQuantizer(dtype=E4M3, block=(np.int64(1), np.int64(128))).block
    assert {type(n) for n in (delayed.amax_history_len, delayed.margin, *block)} == {int}


@pytest.mark.parametrize("recipe", [fp8.DelayedScaling, fp8.Float8CurrentScaling])
def test_accumulation_has_one_of_three_words_for_each_gemm(recipe):
    words = ("exact", "fast", "default")
    gemms = recipe(accumulation=words).gemms
    assert (gemms.forward.accumulation, gemms.dgrad.accumulation, gemms.wgrad.accumulation) == words
    with pytest.raises(ValueError, match=r"accumulation must be one of .* got 'f32'"):
        recipe(accumulation=("fast", "f32", "exact"))
    for value in ("fast", ("fast", "exact")):
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
        None if q is None else (q.dtype.name.removeprefix("float8_"), q.block)
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


class DerivedQuantizer(fp8.CurrentQuantizer):
    """A class of a user, which could quantize in another way."""


# class: fields with wrong values, the error and a word of its message
WRONG = {
    fp8.DelayedScaling: [
        ({"amax_history_len": 0}, ValueError, "amax_history_len must be 1 or more; got 0"),
        ({"amax_history_len": True}, TypeError, "amax_history_len .*bool"),
        ({"margin": 17}, ValueError, "margin .*16 or less"),
        ({"amax_compute_algo": "mean"}, ValueError, "most_recent.*'mean'"),
        ({"fp8_format": "HYBRID"}, TypeError, "fp8flax.Format.*'HYBRID'"),
    ],
    fp8.Float8CurrentScaling: [
        ({"granularity": "rowwise"}, ValueError, "granularity .*'rowwise'"),
        ({"high_precision_wgrad": "yes"}, TypeError, "high_precision_wgrad .*str"),
    ],
    fp8.MXFP8BlockScaling: [
        ({"fp8_format": fp8.Format.E4M3_FNUZ}, ValueError, "e4m3fnuz.*DelayedScaling"),
        ({"scale_rounding": "nearest"}, ValueError, "scale_rounding .*'nearest'"),
    ],
    fp8.Float8BlockScaling: [({"use_f32_scales": 0}, TypeError, "use_f32_scales .*got 0")],
    fp8.DelayedQuantizer: [
        ({"dtype": "bfloat16"}, TypeError, "must be an FP8 dtype, one of float8_e4m3fn.*'bfloat16'"),
        ({"dtype": jnp.float8_e4m3b11fnuz}, TypeError, "must be an FP8 dtype"),
    ],
    fp8.CurrentQuantizer: [
        ({"dtype": E4M3, "granularity": None}, ValueError, "granularity"),
        *(
            ({"dtype": E4M3, "amax_epsilon": value}, ValueError, "amax_epsilon")
            for value in (-1e-12, 1e-40, float("nan"))
        ),
    ],
    fp8.BlockQuantizer: [
        ({"dtype": E4M3, "block": 32}, TypeError, "block .*got 32"),
        ({"dtype": E4M3, "block": (1, 0)}, ValueError, r"block\[1\]"),
        ({"dtype": E4M3, "scale": "e4m3"}, ValueError, "scale .*'e4m3'"),
        ({"dtype": E4M3, "scale": "float32", "scale_rounding": "floor"}, ValueError, "scale='e8m0'"),
    ],
    fp8.GemmRecipe: [
        ({"lhs": E4M3}, TypeError, "lhs must be a DelayedQuantizer"),
        ({"rhs": DerivedQuantizer(dtype=E4M3)}, TypeError, "rhs must be a DelayedQuantizer"),
        ({"accumulation": "slow"}, ValueError, "accumulation .*'slow'"),
    ],
    fp8.CustomRecipe: [
        ({"forward": DELAYED}, TypeError, "forward must be a GemmRecipe"),
        (
            {
                "forward": fp8.GemmRecipe(lhs=DELAYED),
                "wgrad": fp8.GemmRecipe(lhs=dataclasses.replace(DELAYED, margin=2)),
            },
            ValueError,
            "the input has only one",
        ),
    ],
}


@pytest.mark.parametrize("cls", WRONG, ids=lambda cls: cls.__name__)
def test_wrong_values_name_the_field(cls):
    for fields, error, message in WRONG[cls]:
        with pytest.raises(error, match=message):
            cls(**fields)


class Derived(fp8.DelayedScaling):
    """A class of a user, whose attributes could change."""


class Own(fp8.Recipe):
    """A class of a user that is no dataclass."""

    gemms = fp8.MXFP8BlockScaling().gemms


@pytest.mark.parametrize(
    "cls", [Derived, dataclasses.make_dataclass("Mine", [], bases=(Own,), frozen=True)]
)
def test_other_dataclasses_are_refused_when_they_are_made(cls):
    with pytest.raises(TypeError, match=rf"recipe must be an instance.*{cls.__name__}.*CustomRecipe"):
        cls()


def test_formats_and_bools_of_numpy():
    assert fp8.CustomRecipe().fp8_format is fp8.NVFP4BlockScaling().fp8_format is None
    recipe = fp8.DelayedScaling(use_power_2_scales=np.True_)
    assert recipe == fp8.DelayedScaling(use_power_2_scales=True)
    fp8.autocast(enabled=np.True_)


@pytest.mark.parametrize("recipe", [fp8.Recipe(), Own(), fp8.DelayedScaling], ids=["base", "own", "class"])
def test_other_classes_are_not_recipes(recipe):
    for use in (
        lambda: fp8.autocast(recipe=recipe),
        lambda: fp8.Fp8DotGeneralOp(recipe=recipe),
        lambda: fp8.quantize_model(nn.Dense(4), recipe),
    ):
        with pytest.raises(TypeError, match="recipe must be an instance.*CustomRecipe"):
            use()
