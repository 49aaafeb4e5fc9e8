"""Linen models of transformers and flaxmodels as they stand, and what quantize_model makes of them.

Random weights from one key; width 768, 2 layers, vocabulary 512, texts of 64 tokens, images of 64x64,
float32. Layers are as wide as those of the models that people use, so the default rules decide as there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fp8flax as fp8
from benchmarks.common import sqnr

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 768, 12, 2
TEXT, IMAGE, PATCH, LABELS = 64, 64, 16, 128
LEARNING_RATE = 1e-4
REPORT_BATCH = 64
"""The batch of the report is as many times that of the measurement."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what it is called with.

    Attributes:
        package: where the model's class comes from.
        model: the Linen module.
        args: inputs.
        kwargs: options of a call that serves.
        training: options of a call that trains.
        shim: a context in which the package's source runs on this version of JAX.
    """

    package: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    training: dict[str, Any]
    shim: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def convert(self) -> nn.Module:
        """Returns the model in FP8."""
        return fp8.quantize_model(self.model)

    def logits(self, model: nn.Module, variables: Any, *args: Any) -> jax.Array:
        """Returns what the model computes, in float32."""
        out = model.apply(variables, *(args or self.args), **self.kwargs)
        return first(out).astype(jnp.float32)

    def loss(self, model: nn.Module, variables: Any) -> jax.Array:
        """Returns the cross entropy of logits, and targets drawn once."""
        out, _ = model.apply(variables, *self.args, **self.training, mutable=["batch_stats"])
        logits = first(out).astype(jnp.float32)
        targets = np.random.default_rng(1).integers(0, logits.shape[-1], logits.shape[:-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def first(out: Any) -> jax.Array:
    return out[0] if isinstance(out, tuple) else out


def tokens(batch: int, length: int) -> jax.Array:
    drawn = np.random.default_rng(0).integers(3, VOCABULARY - 1, (batch, length))
    drawn[:, -1] = VOCABULARY - 1  # what CLIP takes for the end of a text
    return jnp.asarray(drawn, jnp.int32)


def positions(like: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.arange(like.shape[1]), like.shape)


def images(batch: int) -> jax.Array:
    return jax.random.normal(jax.random.key(2), (batch, IMAGE, IMAGE, 3))


@contextlib.contextmanager
def with_old_clip() -> Iterator[None]:
    """A context in which ``jnp.clip`` takes ``a_min`` and ``a_max``, which JAX 0.10 dropped."""
    clip = jnp.clip

    def old_clip(x: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> Any:
        return clip(x, min if a_min is None else a_min, max if a_max is None else a_max)

    jnp.clip = functools.wraps(clip)(old_clip)  # type: ignore[assignment]
    try:
        yield
    finally:
        jnp.clip = clip


def of_transformers(
    model: str,
    config: str,
    args: Any,
    shim: Any = contextlib.nullcontext,
    remat: bool = False,
    **sizes: Any,
) -> Case:
    """Returns a model of transformers; ``config`` is the class that is made with ``sizes``."""
    import transformers

    with shim(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        made = getattr(transformers, model)(getattr(transformers, config)(**sizes), _do_init=False)
        if remat:
            made.enable_gradient_checkpointing()
    options = {"deterministic": True, "return_dict": False}
    return Case(f"transformers {model}", made.module, args, options, options, shim)


ENCODER_AND_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH,
}
ENCODER: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}


def masked(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns tokens, and a mask that hides none."""
    return x, jnp.ones_like(x)


def bert(remat: bool = False) -> Case:
    x = tokens(2, TEXT)
    return of_transformers(
        "FlaxBertForMaskedLM",
        "BertConfig",
        (*masked(x), jnp.zeros_like(x), positions(x), None),
        remat=remat,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        **ENCODER,
    )


def gpt2() -> Case:
    x = tokens(2, TEXT)
    sizes: Any = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    args = (*masked(x), positions(x))
    return of_transformers("FlaxGPT2LMHeadModel", "GPT2Config", args, n_positions=128, **sizes)


def llama() -> Case:
    x = tokens(2, TEXT)
    return of_transformers(
        "FlaxLlamaForCausalLM",
        "LlamaConfig",
        (*masked(x), positions(x)),
        vocab_size=VOCABULARY,
        intermediate_size=2048,
        num_key_value_heads=4,
        max_position_embeddings=128,
        **ENCODER,
    )


def t5() -> Case:
    return of_transformers(
        "FlaxT5ForConditionalGeneration",
        "T5Config",
        (*masked(tokens(2, TEXT)), *masked(tokens(2, TEXT // 2))),
        shim=with_old_clip,
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2048,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )


def bart() -> Case:
    x, y = tokens(2, TEXT), tokens(2, TEXT // 2)
    args = (*masked(x), *masked(y), positions(x), positions(y))
    sizes = {**ENCODER_AND_DECODER, "max_position_embeddings": 128}
    return of_transformers("FlaxBartForConditionalGeneration", "BartConfig", args, **sizes)


def whisper() -> Case:
    bands, y = 80, tokens(2, TEXT // 2)
    sound = jax.random.normal(jax.random.key(2), (2, bands, 2 * TEXT))
    return of_transformers(
        "FlaxWhisperForConditionalGeneration",
        "WhisperConfig",
        (sound, *masked(y), positions(y)),
        **ENCODER_AND_DECODER,
        num_mel_bins=bands,
        max_source_positions=TEXT,
        max_target_positions=TEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def vit() -> Case:
    sizes = {**ENCODER, "image_size": IMAGE, "patch_size": PATCH, "num_labels": LABELS}
    return of_transformers("FlaxViTForImageClassification", "ViTConfig", (images(4),), **sizes)


def clip() -> Case:
    both: Any = {**ENCODER, "intermediate_size": 4 * WIDTH}
    x = tokens(4, TEXT // 2)
    return of_transformers(
        "FlaxCLIPModel",
        "CLIPConfig",
        (x, images(4), jnp.ones_like(x), positions(x)),
        text_config={"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1, **both},
        vision_config={"image_size": IMAGE, "patch_size": PATCH, **both},
    )


def resnet50() -> Case:
    import flaxmodels

    model = flaxmodels.ResNet50(output="logits", pretrained=None, normalize=False, num_classes=LABELS)
    return Case("flaxmodels ResNet50", model, (images(4),), {"train": False}, {"train": True})


MODELS: dict[str, Callable[[], Case]] = {
    "BERT": bert,
    "BERT, with nn.remat": functools.partial(bert, remat=True),
    "GPT-2": gpt2,
    "Llama": llama,
    "T5": t5,
    "BART": bart,
    "Whisper": whisper,
    "ViT": vit,
    "CLIP": clip,
    "ResNet-50": resnet50,
}


# The figures of each model.


def size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def count_fp8(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.dtype.itemsize == 1)


def contractions(case: Case, model8: nn.Module) -> dict[str, Any]:
    """Returns what ``fp8flax.report`` says at a batch as in training."""

    def enlarged(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((REPORT_BATCH * x.shape[0], *x.shape[1:]), x.dtype)

    report = fp8.report(model8, *jax.tree.map(enlarged, case.args), **case.kwargs)
    return {
        "left": [row.reason for row in report.rows if not row.converted],
        "converted_layers": sorted({re.sub(r"\d+", "*", row.path) for row in report.converted}),
        "unseen": list(report.unseen),
    }


def losses(case: Case, model: nn.Module, variables: Any, steps: int) -> list[float]:
    """Returns the loss before each of the training steps, and after the last."""
    state = fp8.TrainState.create(
        apply_fn=model.apply, params=variables, tx=optax.adamw(LEARNING_RATE, weight_decay=0.0)
    )

    @jax.jit
    def step(state: Any) -> Any:
        loss, grads = fp8.value_and_grad(lambda v: case.loss(model, v))(state.params)
        return state.apply_gradients(grads=grads), loss

    seen = []
    for _ in range(steps + 1):
        state, loss = step(state)
        seen.append(round(float(loss), 4))
    return seen


def measure(name: str, steps: int) -> dict[str, Any]:
    """Returns what becomes of a model: its contractions, errors, losses and frozen bytes."""
    case = MODELS[name]()
    with case.shim(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _measure(case, steps)


def jitted(case: Case, model: nn.Module, variables: Any) -> jax.Array:
    return jax.jit(functools.partial(case.logits, model))(variables, *case.args)


def _measure(case: Case, steps: int) -> dict[str, Any]:
    model, model8 = case.model, case.convert()
    key = jax.random.key(0)
    variables, variables8 = (
        jax.jit(functools.partial(m.init, **case.kwargs))(key, *case.args) for m in (model, model8)
    )
    params, params8 = variables["params"], variables8["params"]
    same_tree = jax.tree.structure(params) == jax.tree.structure(params8)
    same = same_tree and jax.tree.all(jax.tree.map(lambda a, b: jnp.array_equal(a, b), params, params8))

    calibrated = fp8.calibrate(lambda v, x: case.logits(model8, v, *x), variables8, [case.args])
    plain = jitted(case, model, variables)
    logits8 = jitted(case, model8, calibrated)

    served, frozen = fp8.freeze(model8, calibrated)
    # Without jit, where each operation is a program of its own: a compiler fuses two models differently.
    bitwise = jnp.array_equal(case.logits(served, frozen), case.logits(model8, calibrated))

    trained8 = fp8.calibrate(lambda v, _: case.loss(model8, v), variables8, [0], backward=True)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    return {
        "same_initial_params": bool(same),
        **contractions(case, model8),
        "sqnr_db": sqnr([(plain, logits8)]),
        "losses_float32": losses(case, model, variables, steps),
        "losses_fp8": losses(case, model8, trained8, steps),
        "frozen_over_float32": size(frozen) / size(variables),
        "weights_in_fp8": count_fp8(frozen["params"]) / weights,
        "frozen_is_bitwise_equal": bool(bitwise),
    }
