r"""Do the loaders of transformers compute in PyTorch what a frozen Flax model computes?

Run ``make bench-loaders PYTHON=…`` with a Python that has this package, torch, accelerate, compressed-
tensors, and transformers 4.57, the last with Flax models. ``ARGS="--python …"`` loads with another Python
too, such as one that has transformers 5. Nothing is downloaded.

Model: FlaxLlamaForCausalLM of transformers, random weights from one key, width 768, 2 layers, vocabulary
512, 64 tokens, batch 2, float32; quantize_model with its default rules; delayed scaling after calibrate
on the same batch. Written by save_safetensors with rename={'\.(kernel|embedding)$': '.weight'}.

Loaded: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), on a CPU, in a process of its
own. Where that is refused for want of a GPU: without the check, its matmul in Triton's interpreter,
inputs cast by PyTorch with the loader's scales. What its kernels compute on a GPU is not seen here.

SQNR in dB = 10 log10(sum(wanted^2) / sum((loaded - wanted)^2)) of the logits; 6.02 dB are one bit.
Nudged: the frozen Flax model with each embedding moved to the next float32. Where a value lies between
two codes, a last bit decides which of them it gets, and Flax and PyTorch differ in last bits; nudged
shows what that alone does.

Layer: the largest relative error, Frobenius norm, of a loaded layer that is in FP8 in the file, beside
the product of the file's codes and scales with the input that it got, in float64.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8flax as fp8
from benchmarks import common, models
from benchmarks.common import sqnr

QUESTION, METHOD = common.question_and_method(__doc__)
RESULT = common.RESULTS / "loaders.json"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "transformers", "safetensors")
RECIPES = {
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "weight_only": fp8.Float8CurrentScaling(),
    "block128": fp8.Float8BlockScaling(),
    "block128_f32": fp8.Float8BlockScaling(use_f32_scales=True),
}
TO_TORCH = {r"\.(kernel|embedding)$": ".weight"}
"""Flax's Llama has PyTorch's names but for these."""


def save(recipe: str, folder: Path) -> dict[str, Any]:
    """Writes what ``from_pretrained`` loads; returns the logits that it is to give."""
    case = models.MODELS["Llama"]()
    model8 = fp8.quantize_model(case.model, RECIPES[recipe])
    variables = jax.jit(functools.partial(model8.init, **case.kwargs))(jax.random.key(0), *case.args)
    if recipe == "delayed":
        variables = fp8.calibrate(lambda v, x: case.logits(model8, v, *x), variables, [case.args])
    model, frozen = fp8.freeze(model8, variables, weight_only=recipe == "weight_only")
    config = {**case.model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    folder.mkdir()
    fp8.save_safetensors(folder / "model.safetensors", model, frozen, rename=TO_TORCH, config=config)
    np.save(folder / "tokens.npy", np.asarray(case.args[0]))

    def nudged(path: Any, leaf: jax.Array) -> jax.Array:
        return jnp.nextafter(leaf, jnp.inf) if path[-1].key == "embedding" else leaf

    return {
        "float32": models.jitted(case, case.model, {"params": variables["params"]}),
        "frozen": models.jitted(case, model, frozen),
        "nudged": models.jitted(case, model, jax.tree_util.tree_map_with_path(nudged, frozen)),
    }


def loaded(python: str, folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns what a Python's transformers made of each folder."""
    script = Path(__file__).with_name("load_in_torch.py")
    done = subprocess.run([python, script, *folders], stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(recipes: Sequence[str], pythons: Sequence[str]) -> list[dict[str, Any]]:
    """Returns a row for each recipe and Python."""
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = {recipe: Path(root, recipe) for recipe in recipes}
        logits = {recipe: save(recipe, folder) for recipe, folder in folders.items()}
        rows = []
        for row in (row for python in pythons for row in loaded(python, list(folders.values()))):
            recipe, of = folders[row["recipe"]], logits[row["recipe"]]
            config = json.loads((recipe / "config.json").read_text())["quantization_config"]
            row = {**row, "quant_method": config["quant_method"]}
            if "layer_error" in row:
                out = np.load(recipe / "logits.npy")
                row |= {
                    "sqnr_db": round(sqnr([(of["frozen"], out)]), 1),
                    "nudged_sqnr_db": round(sqnr([(of["frozen"], of["nudged"])]), 1),
                    "sqnr_to_float32_db": round(sqnr([(of["float32"], out)]), 1),
                    "frozen_sqnr_to_float32_db": round(sqnr([(of["float32"], of["frozen"])]), 1),
                    "same_tokens": round(float(np.mean(out.argmax(-1) == of["frozen"].argmax(-1))), 4),
                    "layer_error": float(f"{row['layer_error']:.1g}"),
                }
                (recipe / "logits.npy").unlink()
            rows.append(row)
    return rows


def _of_loaded(cell: Callable[[common.Row], str]) -> Callable[[common.Row], str]:
    return lambda row: cell(row) if "layer_error" in row else ""


def _to_frozen(row: common.Row) -> str:
    if "layer_error" in row:
        return f"{row['sqnr_db']:.1f} dB"
    return "refused: no GPU" if "No GPU" in row["error"] else row["error"]


COLUMNS: common.Columns = {
    "frozen with": lambda row: f"`{row['recipe']}`",
    "`quant_method`": lambda row: f"`{row['quant_method']}`",
    "transformers": lambda row: row["transformers"] + ", interpreted" * ("triton_interpreter" in row),
    "SQNR to frozen": _to_frozen,
    "float32 noise": _of_loaded(lambda row: f"{row['nudged_sqnr_db']:.1f} dB"),
    "SQNR to float32: loaded, frozen": _of_loaded(
        lambda row: f"{row['sqnr_to_float32_db']:.1f}, {row['frozen_sqnr_to_float32_db']:.1f} dB"
    ),
    "same tokens": _of_loaded(lambda row: f"{100 * row['same_tokens']:.1f} %"),
    "layer error": _of_loaded(lambda row: f"{row['layer_error']:.0e}"),
}


def table(rows: Sequence[common.Row]) -> str:
    """Returns the table of docs/pytorch.md."""
    return common.markdown(COLUMNS, rows)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION)
    more = "load with this one too; may be repeated"
    parser.add_argument("--python", action="append", default=[], metavar="PYTHON", help=more)
    common.add_json(parser, RESULT)
    args = parser.parse_args(argv)
    report = common.begin(QUESTION, METHOD, common.machine(PACKAGES, ("gpu", "cores")))
    report["rows"] = measure(list(RECIPES), [sys.executable, *args.python])
    print("", table(report["rows"]), sep="\n")
    common.write(report, args.json)


if __name__ == "__main__":
    common.run(main)
