"""The code in the README and in the pages under docs runs as shown."""

import json
import re

import jax
import pytest

from benchmarks import fidelity
from tests import ROOT

README = (ROOT / "README.md").read_text()
FILES = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}


def examples_of(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


IN_CHINESE = "README.zh-CN.md"


LONG = (
    *("docs/serving.md", "docs/pytorch.md", "docs/checkpoints.md", "docs/clusters.md", "docs/diagnose.md"),
    *("docs/performance.md", "docs/state.md", "docs/layers.md", "docs/nnx.md", "docs/quickstart.md"),
)


# test_loops.py, test_moe.py and test_migrating.py run the code of these pages.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page in LONG else ())
        for page in PAGES
        if page not in ("docs/loops.md", "docs/moe.md", IN_CHINESE)
        and not page.startswith("docs/migrating_")
    ],
)
def test_examples_run_in_order(page):
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in examples_of(PAGES[page]):
            exec(compile(example, page, "exec"), namespace)


def test_accuracy_in_the_docs_is_that_of_the_benchmark():
    rows = json.loads((ROOT / "benchmarks" / "results" / "accuracy.json").read_text())["rows"]
    found = re.findall(
        r"^\| ([\w-]+) \|" + r" ([\d.]+) / ([\d.]+) / ([\d.]+) \|" * 3,
        PAGES["docs/recipes_details.md"],
        re.M,
    )
    table = {name: figures for name, *figures in found}
    assert set(table) == {row["recipe"] for row in rows}
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for row in rows:
        first = 3 * kinds.index(row["kind"])
        shown = table[row["recipe"]][first : first + 3]
        assert shown == [f"{row[gemm]:.1f}" for gemm in ("forward", "dgrad", "wgrad")]
    # The page on choosing repeats the forward errors of six recipes and of bf16, in this order.
    chosen = re.findall(r" \| (\d\d\.\d) \| (\d\d\.\d) \|", PAGES["docs/recipes.md"])
    names = ["bf16", "delayed", "current", "axiswise", "mxfp8", "block128", "block128-f32"]
    assert chosen == [(table[name][0], table[name][3]) for name in names]


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


MEASURED = {name: PAGES[name].split("## ")[-2] for name in ("README.md", IN_CHINESE)}


@pytest.mark.parametrize("page", MEASURED)
def test_figures_of_the_readme_are_those_of_the_results(page):
    said = MEASURED[page]
    counts = {
        row["contender"]: row for row in result("dense_h200")["rows"] if row["shape"] == [8192, 4096, 4096]
    }
    ours, theirs = counts["fp8flax"], counts["flax-direct"]
    assert [ours["fp8_gemms"], theirs["fp8_gemms"], ours["gemms"]] == [3, 0, 3]
    for row in (ours, theirs):
        assert re.search(rf"\b{row['kernels']}\D+{mebibytes_of(row)} MiB", said)
    assert f"{ours['kernels']} | {mebibytes_of(ours)} |" in PAGES["docs/performance.md"]
    ratios = [
        row["step_ratio_to"][other]["median"]
        for row in result("step_cpu")["results"]
        if row["contender"] == "fp8flax"
        for other in ("flax-qdq", "flax-direct")
    ]
    assert re.search(rf"{min(ratios):.2f}\D+{max(ratios):.2f}", said)
    rows = {row["contender"]: row for row in fidelity.compared(result("fidelity")["runs"], "small")}
    shown = [rows[name] for name in ("delayed", "first-attention-wide", "bf16-chance")]
    for row in shown:
        assert f"{fidelity.mean_of(row)} %" in said
        assert len(row["seeds"]) == len(shown[0]["seeds"])
    assert fidelity.nats_of(shown[0]) in said
    assert re.search(rf"\b{len(shown[0]['seeds'])}\W+(seeds|个随机种子)", said)


def mebibytes_of(row):
    return round((row["gemm_bytes"] + row["other_bytes"]) / 2**20)


def test_losses_on_the_page_are_those_of_the_results():
    report = result("fidelity")
    assert report["method"] == fidelity.METHOD
    runs, page = report["runs"], PAGES["docs/accuracy.md"]
    for table in (
        fidelity.table(runs, "small", fidelity.CONTENDERS),
        fidelity.table(runs, "small", ("delayed", *fidelity.PARTS)),
        fidelity.sensitivity_table(runs),
    ):
        assert table in page
    assert report["machine"]["cpu"] in page


def test_the_chinese_readme_has_the_same_blocks_of_code():
    assert examples_of(README) == examples_of(PAGES[IN_CHINESE])
