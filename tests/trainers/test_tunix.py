"""Tunix: its trainer, sharding, checkpoints and sampler, by the code of docs/trainers.md."""

import functools
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import assert_same_bits, assert_trees_equal, normal
from tests.pages import examples_for

pytest.importorskip("tunix", reason="google-tunix is not installed: make test-trainers")

with warnings.catch_warnings(action="ignore"):
    import orbax.checkpoint as ocp
    import qwix
    from tunix.generate import sampler
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

pytestmark = [pytest.mark.usefixtures("promotion_of_users"), pytest.mark.filterwarnings("ignore")]
FUNCTION, CONVERT_AND_TRAIN, AFTER_RESTORE = examples_for("Tunix")
RULES = {"recipe": fp8.DelayedScaling(amax_history_len=8), "include": "attn/|mlp/.*proj"}
SIZES = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 10_000}


def qwen(**options):
    config = {"num_layers": 1, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64, **SIZES, **options}
    model = qwen3.Qwen3(qwen3.ModelConfig(**config), rngs=nnx.Rngs(0))
    for seed, name in enumerate([] if "num_experts" in options else ["gate_proj", "up_proj", "down_proj"]):
        kernel = getattr(model.layers[0].mlp, name).kernel
        kernel.set_value(0.1 * normal(seed, *kernel.shape))  # they are zeros
    return model


def batch(seed):
    tokens = np.random.default_rng(seed).integers(1, 64, (8, 8))
    return peft_trainer.TrainingInput(jnp.asarray(tokens), jnp.ones((8, 8), bool))


def inputs_of(batch):
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": batch.input_mask,
        "positions": utils.build_positions_from_mask(batch.input_mask),
        "attention_mask": utils.make_causal_attn_mask(batch.input_mask),
    }


BATCHES = [batch(seed) for seed in range(4)]
_inputs = inputs_of(BATCHES[0])
INPUTS = _inputs["input_tokens"], _inputs["positions"], None, _inputs["attention_mask"]


def convert(model):
    return fp8.quantize_model(model, *INPUTS, **RULES)


def with_lora(model):
    provider = qwix.LoraProvider(module_path=".*q_proj|.*up_proj", rank=4, alpha=2.0)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input())


def trainer_of(model, **options):
    config = peft_trainer.TrainingConfig(eval_every_n_steps=100, **options)
    trainer = peft_trainer.PeftTrainer(model, optax.sgd(0.1, momentum=0.9), config)
    return trainer.with_gen_model_input_fn(inputs_of)


def train(model, batches, **options):
    trainer = trainer_of(model, **options)
    trainer.train(batches)
    return trainer


def checkpoints_in(folder):
    policy = ocp.CheckpointManagerOptions(save_interval_steps=1)
    return {"checkpoint_root_directory": str(folder), "checkpointing_options": policy}


def state_of(model):
    return nnx.state(model, fp8nnx.OverwriteWithGradient)


def assert_state_close(a, b):
    """Compares the states of two programs, in which XLA may add in another order."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), state_of(a), state_of(b))


@pytest.fixture(scope="module", autouse=True)
def _with_function():
    """The function of the page in the trainer's file."""
    with warnings.catch_warnings(action="ignore"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(peft_trainer, "nnx", nnx)  # put back afterwards
        exec(FUNCTION, {})
        yield


@pytest.fixture(scope="module")
def converted():
    return convert(qwen())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return checkpoints_in(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def trained(converted, checkpoints):
    model = nnx.clone(converted)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        train(model, BATCHES, gradient_accumulation_steps=2, **checkpoints)
    return model


def test_the_page(monkeypatch):
    monkeypatch.setattr(fp8, "quantize_model", functools.partial(fp8.quantize_model, **RULES))
    tokens, positions, _, attention_mask = INPUTS
    names = {"fp8": fp8, "fp8nnx": fp8nnx, "peft_trainer": peft_trainer, "model": qwen(), "tokens": tokens}
    names |= {"positions": positions, "attention_mask": attention_mask, "tx": optax.sgd(0.1)}
    names |= {"config": peft_trainer.TrainingConfig(eval_every_n_steps=100), "batch": BATCHES[0]}
    exec(CONVERT_AND_TRAIN, names)
    model, trainer = names["model"], names["trainer"].with_gen_model_input_fn(inputs_of)
    before = nnx.clone(model)
    trainer.train(BATCHES[:1])
    fp8.check_state(model, before=before)
    exec(AFTER_RESTORE, names)
    fp8.check_state(model)


def test_without_the_function_it_warns(converted, monkeypatch):
    monkeypatch.setattr(peft_trainer, "nnx", nnx)
    model = nnx.clone(converted)
    with pytest.warns(UserWarning, match=r"the scales never change.*fp8flax\.nnx\.value_and_grad"):
        train(model, BATCHES[:1])
    assert_trees_equal(state_of(model), state_of(converted))


def test_accumulation_and_restore(converted, trained, checkpoints):
    """Each microbatch is a step of the state; a resumed run has the bits of one that never stopped."""
    shutil.rmtree(Path(checkpoints["checkpoint_root_directory"]) / "2")
    resumed, by_hand = nnx.clone(converted), nnx.clone(converted)
    trainer = trainer_of(resumed, gradient_accumulation_steps=2, **checkpoints)
    assert trainer.train_steps == 1
    gradient = nnx.jit(lambda model, x: fp8nnx.grad(peft_trainer._default_loss_fn)(model, **x))
    for x in BATCHES[:2]:
        fp8nnx.overwrite_state(by_hand, gradient(by_hand, inputs_of(x)))
    assert_state_close(resumed, by_hand)
    trainer.train(BATCHES)
    assert_trees_equal(nnx.state(resumed), nnx.state(trained))


def test_lora(converted, tmp_path):
    """Adapters train, the base stays, and the state moves; the checkpoint has the adapters alone."""
    options = checkpoints_in(tmp_path)
    model, restored = with_lora(nnx.clone(converted)), with_lora(nnx.clone(converted))
    train(model, BATCHES[:2], **options)
    for name in ("kernel", "kernel_lora_b"):
        a, b = (getattr(m.layers[0].mlp.up_proj, name)[...] for m in (model, restored))
        assert np.array_equal(a, b) == (name == "kernel")
    assert np.count_nonzero(model.layers[0].mlp.up_proj.dot_general.input_amax_history[...]) == 2
    trainer_of(restored, **options)
    assert_trees_equal(nnx.state(restored, nnx.LoRAParam), nnx.state(model, nnx.LoRAParam))
    assert_trees_equal(state_of(restored), state_of(converted))
    assert len(fp8.report(model, *INPUTS).converted) == 7


def test_eight_devices(converted, trained):
    model, mesh = nnx.clone(converted), Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    with mesh:
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(jax.device_put, state, nnx.get_named_sharding(state, mesh)))
        train(model, BATCHES, gradient_accumulation_steps=2)
    assert model.layers[0].mlp.up_proj.kernel[...].sharding.spec == P("fsdp", "tp")
    assert_state_close(model, trained)


TOKENIZER = SimpleNamespace(
    encode=lambda text, **_: [int(token) for token in text.split()],
    decode=lambda ids, **_: " ".join(map(str, ids)),
    bos_id=lambda: 1,
    eos_id=lambda: 2,
    pad_id=lambda: 0,
)


def sampled(model):
    cache = sampler.CacheConfig(cache_size=16, num_layers=1, num_kv_heads=2, head_dim=8)
    return sampler.Sampler(model, TOKENIZER, cache)(["5 6 7", "9"], max_generation_steps=4).text


def test_frozen(trained):
    """The frozen model has the logits of the trained one, and generates the same tokens."""
    frozen = fp8.freeze(trained, *INPUTS)
    assert_same_bits(frozen(*INPUTS)[0], trained(*INPUTS)[0])
    assert sampled(frozen) == sampled(trained)


def test_experts():
    model = convert(qwen(num_experts=2, num_experts_per_tok=1))
    before = nnx.clone(model)
    train(model, BATCHES[:1])
    fp8.check_state(model, before=before)
    frozen = fp8.freeze(model, *INPUTS)
    assert_same_bits(frozen(*INPUTS)[0], model(*INPUTS)[0])
    kernels = [getattr(frozen.layers[0].mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    assert all(kernel.get_raw_value().dtype.itemsize == 1 for kernel in kernels)
