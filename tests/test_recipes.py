import dataclasses

import pytest

import fp8flax as fp8


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
        ("amax_history_len", 0, ValueError, "amax_history_len must be 1 or more; got 0"),
        ("amax_history_len", -3, ValueError, "amax_history_len must be 1 or more; got -3"),
        ("amax_history_len", 2.0, TypeError, "amax_history_len must be an int; got 2.0 of type float"),
        ("amax_history_len", True, TypeError, "amax_history_len must be an int; got True of type bool"),
        ("margin", -1, ValueError, "margin must be 0 or more; got -1"),
        ("margin", 17, ValueError, "margin must be 16 or less; got 17"),
        ("margin", "1", TypeError, "margin must be an int; got '1' of type str"),
        ("amax_compute_algo", "mean", ValueError, r"one of \('max', 'most_recent'\); got 'mean'"),
        ("fp8_format", "HYBRID", TypeError, "must be a member of fp8flax.Format.*got 'HYBRID'"),
        ("fp8_format", fp8.float8_e4m3fn, TypeError, "must be a member of fp8flax.Format"),
    ],
)
def test_wrong_values_name_the_field(field, value, error, message):
    with pytest.raises(error, match=message):
        fp8.DelayedScaling(**{field: value})


@pytest.mark.parametrize("field", ["forward", "dgrad", "wgrad"])
def test_accumulation_names_a_wrong_field(field):
    with pytest.raises(
        ValueError, match=rf"{field} must be one of \('fast', 'exact', 'default'\); got 'f32'"
    ):
        fp8.Accumulation(**{field: "f32"})


def test_accumulation_is_not_a_word():
    with pytest.raises(TypeError, match="accumulation must be an fp8flax.Accumulation"):
        fp8.DelayedScaling(accumulation="fast")
