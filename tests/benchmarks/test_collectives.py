"""The bytes between GPUs: the committed result, the page that shows it, and programs that are compiled."""

import json

import pytest

from benchmarks import collectives, common
from tests import ROOT


@pytest.fixture(scope="module")
def report():
    return json.loads((common.RESULTS / "collectives.json").read_text())


def test_committed_result_is_that_of_the_script(report):
    assert (report["question"], report["method"]) == common.question_and_method(collectives.__doc__)
    assert report["arguments"] == json.loads(json.dumps(collectives.OPTIONS))
    found = [(row["layout"], row["recipe"]) for row in report["rows"]]
    assert found == [(layout, recipe) for layout in collectives.LAYOUTS for recipe in collectives.RECIPES]


def test_the_page_shows_the_committed_result(report):
    table = common.markdown(collectives.COLUMNS, collectives.beside_bf16(report, "step"))
    assert table in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("layout", "recipe", "is_backward", "target"),
    [
        ("FSDP", "axiswise", True, "h200"),
        ("FSDP", "MXFP8", True, "h200"),
        ("FSDP", "128-blocks", False, "b200"),
        ("sequence, columns", "delayed", False, "h200"),
        ("sequence, columns", "128-blocks", True, "h200"),
        ("sequence, columns", "128-blocks", True, "b200"),
        ("experts", "delayed", False, "h200"),
        ("experts", "MXFP8", True, "h200"),
        *(
            pytest.param(layout, recipe, True, "h200", marks=pytest.mark.all_cells)
            for layout in ("FSDP", "sequence, columns", "experts")
            for recipe in ("delayed", "current", "axiswise", "128-blocks", "MXFP8")
        ),
    ],
)
def test_codes_are_gathered_and_rounded_sums_are_added_up(layout, recipe, is_backward, target):
    """Half the bytes of the gathered tensor in bf16 and 1/32 for scales; sums as in bf16."""
    shape = collectives.OPTIONS["shape"]
    rows, depth, columns = shape
    elements = {
        "FSDP": depth * columns,
        "sequence, columns": rows * depth,
        "experts": collectives.EXPERTS * depth * columns,
    }
    gathered = added = elements[layout]
    sent = collectives.bytes_sent(recipe, layout, shape, is_backward, target)
    devices = collectives.GPUS
    of_codes = gathered * (devices - 1) // devices
    assert of_codes <= sent["all-gather"] <= of_codes * 33 / 32 + 1000
    of_sums = 2 * added * (devices - 1) // devices
    assert of_sums <= sent["reduce-scatter"] <= of_sums * 1.01
    small = sum(n for kind, n in sent.items() if kind not in ("all-gather", "reduce-scatter"))
    assert small <= 0.01 * of_sums
