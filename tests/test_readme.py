"""What the README shows runs as it stands there."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples_and_no_gaps():
    assert len(EXAMPLES) >= 2
    assert "@@" not in README


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_run_in_order(number):
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for example in EXAMPLES[: number + 1]:
            exec(compile(example, "README.md", "exec"), namespace)


def test_the_training_example_is_short():
    lines = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(lines) <= 15


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_linked_files_exist():
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
