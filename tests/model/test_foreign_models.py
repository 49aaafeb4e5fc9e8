"""Linen models of transformers and flaxmodels become FP8 models unchanged, train, and freeze.

Random weights from one key; width 768, 2 layers, vocabulary 512, texts of 64 tokens, images of 64x64,
float32. Layers are as wide as those of the models that people use, so the default rules decide as there.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from benchmarks.common import sqnr

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.all_cells,
    pytest.mark.usefixtures("_lenient_jax"),
    # Raised by these packages.
    pytest.mark.filterwarnings("ignore"),
]

VOCABULARY, WIDTH, HEADS, LAYERS, TEXT = 512, 768, 12, 2, 64
rng = np.random.default_rng(0)
TOKENS = jnp.asarray(rng.integers(3, VOCABULARY - 1, (2, TEXT)), jnp.int32)
ONES, ZEROS = jnp.ones_like(TOKENS), jnp.zeros_like(TOKENS)
PLACES = jnp.broadcast_to(jnp.arange(TEXT), TOKENS.shape)
IMAGES, SOUND = (
    jnp.asarray(rng.standard_normal(size), jnp.float32) for size in ((4, 64, 64, 3), (2, 80, 128))
)
SHORT = tuple(x[:, : TEXT // 2] for x in (TOKENS, ONES, PLACES))
ENCODER = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 4 * WIDTH))
}
BERT = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, **ENCODER}
T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2048, "num_layers": LAYERS, "num_heads": HEADS}
WHISPER = {"d_model": WIDTH, "num_mel_bins": 80, "max_source_positions": TEXT, "max_target_positions": TEXT}

# The class of the model, that of its config with its arguments, the inputs, and layers that are converted.
MODELS = {
    "BERT": (
        "FlaxBertForMaskedLM",
        ("BertConfig", BERT),
        (TOKENS, ONES, ZEROS, PLACES, None),
        ("attention/self/query", "attention/output/dense", "layer/*/intermediate/dense"),
    ),
    "GPT-2": (
        "FlaxGPT2LMHeadModel",
        ("GPT2Config", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}),
        (TOKENS, ONES, PLACES),
        ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj"),
    ),
    "Llama": (
        "FlaxLlamaForCausalLM",
        ("LlamaConfig", {**BERT, "intermediate_size": 2048, "num_key_value_heads": 4}),
        (TOKENS, ONES, PLACES),
        ("self_attn/q_proj", "self_attn/o_proj", "mlp/gate_proj", "mlp/up_proj", "mlp/down_proj"),
    ),
    "T5": (
        "FlaxT5ForConditionalGeneration",
        ("T5Config", {**T5, "vocab_size": VOCABULARY, "tie_word_embeddings": False}),
        (TOKENS, ONES, *SHORT[:2]),
        ("SelfAttention/q", "EncDecAttention/v", "DenseReluDense/wi", "DenseReluDense/wo"),
    ),
    "Whisper": (
        "FlaxWhisperForConditionalGeneration",
        ("WhisperConfig", {**WHISPER, **SIDES, "vocab_size": VOCABULARY, "pad_token_id": 0}),
        (SOUND, *SHORT),
        ("self_attn/q_proj", "encoder_attn/out_proj", "fc*"),
    ),
    "ViT": (
        "FlaxViTForImageClassification",
        ("ViTConfig", {**ENCODER, "image_size": 64, "patch_size": 16, "num_labels": 128}),
        (IMAGES,),
        ("attention/attention/query", "attention/output/dense", "intermediate/dense"),
    ),
    "ResNet-50": ("", ("", {}), (IMAGES,), ("Bottleneck_*/Conv_*",)),
}
MODELS["BERT, with nn.remat"] = MODELS["BERT"]


@pytest.fixture(name="_lenient_jax")
def lenient_jax(_strict_jax, monkeypatch):
    """The models of other authors promote dtypes and ranks. T5 calls ``jnp.clip`` as older JAX had it."""
    clip = jnp.clip

    def old_clip(x, min=None, max=None, *, a_min=None, a_max=None):
        return clip(x, min if a_min is None else a_min, max if a_max is None else a_max)

    monkeypatch.setattr(jnp, "clip", functools.wraps(clip)(old_clip))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def model_of(name):
    """Returns a model, and the options of calls that serve and that train."""
    cls, (config, sizes), _, _ = MODELS[name]
    if not cls:
        flaxmodels = pytest.importorskip("flaxmodels")
        made = flaxmodels.ResNet50(output="logits", pretrained=None, normalize=False, num_classes=128)
        return made, {"train": False}, {"train": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(transformers, cls)(getattr(transformers, config)(**sizes), _do_init=False)
        if "remat" in name:
            made.enable_gradient_checkpointing()
    options = {"deterministic": True, "return_dict": False}
    return made.module, options, options


def first(out):
    return (out[0] if isinstance(out, tuple) else out).astype(jnp.float32)


def loss_of(model, args, options, variables):
    """Returns the cross entropy of logits, and targets drawn once."""
    logits = first(model.apply(variables, *args, **options, mutable=["batch_stats"])[0])
    targets = np.random.default_rng(1).integers(0, logits.shape[-1], logits.shape[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def losses(model, loss, variables):
    """Returns the loss before and after a training step."""
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adamw(1e-4))
    before, grads = jax.jit(fp8.value_and_grad(loss))(state.params)
    return float(before), float(jax.jit(loss)(state.apply_gradients(grads=grads).params))


@pytest.mark.parametrize("name", MODELS)
def test_a_model(name):
    model, options, training = model_of(name)
    *_, args, layers = MODELS[name]
    model8 = fp8.quantize_model(model)
    variables, variables8 = (
        jax.jit(functools.partial(m.init, **options))(jax.random.key(0), *args) for m in (model, model8)
    )
    jax.tree.map(np.testing.assert_array_equal, variables["params"], variables8["params"])

    report = fp8.report(model8, *args, **options)
    converted = {re.sub(r"\d+", "*", row.path) for row in report.converted}
    assert all(any(path.endswith(layer) for path in converted) for layer in layers)
    assert all(row.reason and not row.reason.startswith("inside of") for row in report.rows)

    calibrated = fp8.calibrate(lambda v, x: first(model8.apply(v, *x, **options)), variables8, [args])
    plain, logits = (
        jax.jit(lambda v, m=m: first(m.apply(v, *args, **options)))(v)
        for m, v in ((model, variables), (model8, calibrated))
    )
    assert sqnr([(plain, logits)]) > 18

    loss, loss8 = (functools.partial(loss_of, m, args, training) for m in (model, model8))
    trained8 = fp8.calibrate(lambda v, _: loss8(v), variables8, [0], backward=True)
    wide, narrow = losses(model, loss, variables), losses(model8, loss8, trained8)
    assert narrow[1] < narrow[0]
    assert narrow == pytest.approx(wide, rel=0.1, abs=0.05)

    served, frozen = fp8.freeze(model8, calibrated)
    # Without jit, where each operation is a program of its own: a compiler fuses two models differently.
    same = (first(m.apply(v, *args, **options)) for m, v in ((served, frozen), (model8, calibrated)))
    np.testing.assert_array_equal(*same)
    weights = jax.tree.leaves(frozen["params"])
    share = sum(x.size for x in weights if x.dtype.itemsize == 1) / sum(x.size for x in weights)
    ratio = sum(x.nbytes for x in weights) / sum(x.nbytes for x in jax.tree.leaves(variables["params"]))
    assert ratio == pytest.approx(1 - 0.75 * share, abs=0.01)
    jax.clear_caches()
