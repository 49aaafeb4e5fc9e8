"""MaxText's own trainer with the FP8 ops of this package; ``make test-trainers`` installs it."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
from tests import ROOT

maxtext = pytest.importorskip("maxtext")
PAGE = ROOT / "docs" / "trainers.md"
TINY = {
    "run_name": "tiny",
    "base_emb_dim": 32,
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "vocab_size": 64,
    "max_target_length": 16,
    "dtype": "float32",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "sharding_tolerance": 1.0,
    "learning_rate": 0.01,
    "warmup_steps_fraction": 0.0,
    "enable_goodput_recording": False,
    "log_config": False,
    "jax_cache_dir": "",
    "enable_checkpointing": False,
}
ACCUMULATED = {"quantization": "fp8_e4m3", "per_device_batch_size": 1, "gradient_accumulation_steps": 4}


def array_of(variable):
    x = variable.get_value()
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def arrays_of(state):
    return {path: array_of(x) for path, x in nnx.to_flat_state(state)}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("promotion_of_users")
def test_accumulation_scan_and_restore(tmp_path, monkeypatch):
    """On 8 devices: the state is that of one large batch, and its checkpoint restores bit for bit."""
    from maxtext.trainers.pre_train import train
    from maxtext.utils import train_utils
    from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad

    patch = re.search('^```py\n("""MaxText.*?)^```', PAGE.read_text(), re.DOTALL | re.MULTILINE)[1]
    assert len(patch.splitlines()) <= 40
    exec(compile(patch, PAGE, "exec"), {"__name__": "fp8_maxtext"})

    def config_of(**options):
        options = {**TINY, "base_output_directory": str(tmp_path), **options}
        base = os.path.join(maxtext.__path__[0], "configs", "base.yml")
        return train.initialize(["", base, *(f"{name}={value}" for name, value in options.items())])

    saved = {"enable_checkpointing": True, "checkpoint_period": 1, "async_checkpointing": False}
    trained = train.train_loop(*config_of(steps=2, **ACCUMULATED, **saved))
    fp8.check_state(trained)
    accumulated = arrays_of(trained)
    histories = [x for path, x in accumulated.items() if path[-1].endswith("amax_history")]
    assert len(histories) == 7 * 3
    assert all(x.shape == (2, 1024) and x[:, [0, -1]].all() for x in histories)  # 2 layers, 2 steps

    *_, restored = train_utils.setup_train_loop(*config_of(steps=3, **ACCUMULATED, **saved))
    restored = arrays_of(nnx.state(restored))
    assert accumulated.keys() == restored.keys()
    jax.tree.map(np.testing.assert_array_equal, accumulated, restored)

    whole = train.train_loop(*config_of(steps=2, quantization="fp8", per_device_batch_size=4))
    for path, x in arrays_of(whole).items():
        np.testing.assert_allclose(accumulated[path], x, 1e-5, 1e-6 * np.max(x, initial=0), err_msg=path)

    # MaxText's own accumulation differentiates parameters alone. It is traced, not compiled.
    def trace(config, step, args):
        step.trace(*args)
        raise StopIteration

    monkeypatch.setattr(train, "gradient_accumulation_loss_and_grad", gradient_accumulation_loss_and_grad)
    monkeypatch.setattr(train.maxtext_utils, "maybe_dump_jaxpr", trace)
    with pytest.warns(UserWarning, match="the scales never change"), pytest.raises(StopIteration):
        train.train_loop(*config_of(steps=1, **ACCUMULATED))
