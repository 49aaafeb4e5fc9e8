"""Linen models of other authors become FP8 models unchanged, train, and freeze."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from tests.model import foreign

pytest.importorskip("transformers")
pytest.importorskip("flaxmodels")

pytestmark = [
    pytest.mark.usefixtures("_all_cells", "_lenient_jax"),
    # Raised by these packages.
    pytest.mark.filterwarnings("ignore"),
]

STEPS = 1
CONVERTED = {
    "BERT": {
        "attention/self/query",
        "attention/output/dense",
        "layer/*/intermediate/dense",
        "layer/*/output/dense",
    },
    "GPT-2": {"attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj"},
    "Llama": {"self_attn/q_proj", "self_attn/o_proj", "mlp/gate_proj", "mlp/up_proj", "mlp/down_proj"},
    "T5": {"SelfAttention/q", "EncDecAttention/v", "DenseReluDense/wi_*", "DenseReluDense/wo"},
    "BART": {"self_attn/q_proj", "encoder_attn/out_proj", "fc*"},
    "Whisper": {"self_attn/q_proj", "encoder_attn/out_proj", "fc*"},
    "ViT": {"attention/attention/query", "attention/output/dense", "intermediate/dense"},
    "CLIP": {"text_model/encoder/layers/*/self_attn/q_proj", "vision_model/encoder/layers/*/mlp/fc*"},
    "ResNet-50": {"Bottleneck_*/Conv_*"},
}
CONVERTED["BERT, with nn.remat"] = CONVERTED["BERT"]


@pytest.fixture(name="_lenient_jax")
def lenient_jax(_strict_jax: None) -> Any:
    """The models of other authors promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def measured(name: str) -> dict[str, Any]:
    row = foreign.measure(name, STEPS)
    jax.clear_caches()
    return row


@pytest.mark.parametrize("name", foreign.MODELS)
class TestModel:
    def test_params_are_those_of_the_model(self, name: str) -> None:
        assert measured(name)["same_initial_params"]

    def test_attention_and_mlp_are_converted(self, name: str) -> None:
        layers = measured(name)["converted_layers"]
        assert all(any(layer.endswith(ending) for layer in layers) for ending in CONVERTED[name])

    def test_the_rest_is_left_for_a_reason(self, name: str) -> None:
        row = measured(name)
        assert all(row["left"])
        assert row["unseen"] == []

    def test_logits(self, name: str) -> None:
        row = measured(name)
        assert row["sqnr_db"] > 18

    def test_training(self, name: str) -> None:
        row = measured(name)
        wide, narrow = row["losses_float32"], row["losses_fp8"]
        assert (narrow[-1] < narrow[0]) == (
            wide[-1] < wide[0]
        )  # that of CLIP, of four pairs, rises at first
        assert narrow == pytest.approx(wide, rel=0.1, abs=0.05)

    def test_frozen_logits_are_the_same_bits(self, name: str) -> None:
        assert measured(name)["frozen_is_bitwise_equal"]

    def test_frozen_bytes(self, name: str) -> None:
        row = measured(name)
        assert row["frozen_over_float32"] == pytest.approx(1 - 0.75 * row["weights_in_fp8"], abs=0.01)
