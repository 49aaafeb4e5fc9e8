"""Every notebook runs from a clean kernel, and prints what is committed."""

import importlib.util
import re

import nbformat
import pytest

from tests import FEW_OPTIMIZATIONS, FEW_OPTIMIZATIONS_OF_MACHINE_CODE, ROOT, xla_flags

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
PATH = re.compile(r"\S+/\S+")
EACH = pytest.mark.parametrize("name", NAMES)


def executed(name):
    """Returns the notebook after a run in a process of its own."""
    spec = importlib.util.spec_from_file_location("notebooks_execute", FOLDER / "execute.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.MonkeyPatch.context() as patch:
        few = xla_flags({**FEW_OPTIMIZATIONS, **FEW_OPTIMIZATIONS_OF_MACHINE_CODE})
        for variable, value in {"JAX_PLATFORMS": "cpu", **few}.items():
            patch.setenv(variable, value)
        return script.execute(FOLDER / name)


def cells_of(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell):
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


@EACH
def test_committed_outputs_are_those_of_a_clean_run(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = cells_of(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        if re.search(r"\bprint\(|plt\.show\(", cell.source):
            assert cell.outputs, f"no outputs under:\n{cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", f"an error under:\n{cell.source}"
            assert output.get("name") != "stderr", f"stderr under:\n{cell.source}\n{output.text}"


@pytest.mark.long
@EACH
def test_a_new_run_prints_the_committed_text(name):
    """Numbers may differ a little, as on another processor, and so may which tensors are the worst."""
    committed, new = (cells_of(n) for n in (nbformat.read(FOLDER / name, as_version=4), executed(name)))
    for old, cell in zip(committed, new, strict=True):
        was, text = printed(old), printed(cell)
        words, expected = (sorted(NUMBER.sub("#", PATH.sub("/", x)).split()) for x in (text, was))
        assert words == expected, cell.source
        numbers = [float(number) for number in NUMBER.findall(text)]
        assert numbers == pytest.approx(
            [float(number) for number in NUMBER.findall(was)], rel=0.15, abs=0.02
        )
