"""Every notebook runs from a clean kernel, and is committed with the outputs of such a run."""

import base64
import importlib.util
import re
import struct

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests import FEW_OPTIMIZATIONS, FEW_OPTIMIZATIONS_OF_MACHINE_CODE, ROOT, xla_flags

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
ABSOLUTE_PATH = re.compile(r"(?<![\w.])(?<!:/)/(work|tmp|home|root|usr|opt|var|Users)\b")


def _load_execute_script():
    spec = importlib.util.spec_from_file_location("notebooks_execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute_script = _load_execute_script()


@pytest.fixture(scope="module")
def fresh_run():
    """Returns a function that maps a notebook's name to its fresh run; each notebook runs once."""
    runs = {}

    def run(name):
        if name not in runs:
            few = xla_flags({**FEW_OPTIMIZATIONS, **FEW_OPTIMIZATIONS_OF_MACHINE_CODE})
            try:
                with pytest.MonkeyPatch.context() as patch:
                    for variable, value in few.items():
                        patch.setenv(variable, value)
                    runs[name] = execute_script.execute(FOLDER / name)
            except CellExecutionError as error:
                runs[name] = error
        if isinstance(runs[name], CellExecutionError):
            pytest.fail(f"{name}: {runs[name]}", pytrace=False)
        return runs[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        yield run


def _code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _printed(cell):
    return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")


def _printed_lines(notebook):
    return "".join(_printed(cell) for cell in _code_cells(notebook)).splitlines()


def test_there_are_notebooks():
    assert "01_fp8_basics.ipynb" in NAMES


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_runs_from_a_clean_kernel(name, fresh_run):
    cells = _code_cells(fresh_run(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_running_leaves_the_file_alone(name, fresh_run):
    before = nbformat.read(FOLDER / name, as_version=4)
    fresh_run(name)
    assert nbformat.read(FOLDER / name, as_version=4) == before


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_those_of_a_clean_run(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    cells = _code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        if re.search(r"\bprint\(|plt\.show\(", cell.source):
            assert cell.outputs, f"no outputs under:\n{cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", f"an error under:\n{cell.source}"
            assert output.get("name") != "stderr", f"stderr under:\n{cell.source}\n{output.text}"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "01_fp8_basics.ipynb"])
def test_each_picture_is_described(name):
    """Every picture has a description for readers who do not see it."""
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    shown = [i for i, cell in enumerate(cells) if "image/png" in str(cell.get("outputs", ""))]
    assert all(cells[i + 1].source.startswith("*The picture") for i in shown)


@pytest.mark.parametrize("name", NAMES)
def test_code_follows_a_text_and_is_not_wider_than_the_page(name):
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    for text, cell in zip([None, *cells], cells):
        if cell.cell_type == "code":
            assert text.cell_type == "markdown", cell.source
            assert [line for line in cell.source.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("name", NAMES)
def test_pictures_have_144_dots_per_inch(name):
    cells = _code_cells(nbformat.read(FOLDER / name, as_version=4))
    pictures = [output for cell in cells for output in cell.outputs]
    pictures = [base64.b64decode(o.data["image/png"]) for o in pictures if "image/png" in o.get("data", {})]
    for picture in pictures:
        # The chunk pHYs has dots per metre.
        place = picture.index(b"pHYs") + 4
        dots = struct.unpack(">II", picture[place : place + 8])
        assert [round(d * 0.0254) for d in dots] == [144, 144]
    assert bool(pictures) == ("plt.show()" in "".join(cell.source for cell in cells))


@pytest.mark.parametrize("name", NAMES)
def test_committed_file_holds_nothing_of_the_machine(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    assert "version" not in notebook.metadata.get("language_info", {})
    for cell in _code_cells(notebook):
        assert "execution" not in cell.metadata
        for output in cell.outputs:
            data = output.get("data", {})
            texts = [output.get("text", ""), *(data[mime] for mime in data if mime.startswith("text/"))]
            for text in texts:
                assert not ABSOLUTE_PATH.search(text), f"a path under:\n{cell.source}\n{text[:500]}"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_fresh_run_prints_in_the_same_cells_as_the_committed_one(name, fresh_run):
    committed = nbformat.read(FOLDER / name, as_version=4)
    prints = [bool(_printed(cell)) for cell in _code_cells(committed)]
    assert [bool(_printed(cell)) for cell in _code_cells(fresh_run(name))] == prints


@pytest.mark.long
class TestFp8Basics:
    """The output of notebook 01 supports the claims in its prose."""

    @pytest.fixture
    def lines(self, fresh_run):
        return _printed_lines(fresh_run("01_fp8_basics.ipynb"))

    def test_runs_on_the_cpu(self, lines):
        assert "JAX runs on: cpu" in lines

    def test_formats(self, lines):
        rows = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"float8_e\w+ +\d", line)}
        largest_and_count = {name: (row[0], row[-1]) for name, row in rows.items()}
        assert largest_and_count == {
            "float8_e4m3fn": ("448", "253"),
            "float8_e5m2": ("57344", "247"),
            "float8_e4m3fnuz": ("240", "255"),
            "float8_e5m2fnuz": ("57344", "255"),
            "float8_e8m0fnu": ("1.7014e+38", "255"),
        }

    def test_rounding(self, lines):
        assert "every value went to the nearest: True" in lines
        normals = next(line for line in lines if line.startswith("largest relative error, normals:"))
        assert 0.05 < float(normals.split()[4]) <= 1 / 16

    def test_a_scale_lowers_the_error_of_a_matmul(self, lines):
        errors = [
            float(line.split()[-1].rstrip("%"))
            for line in lines
            if "relative error against float32" in line
        ]
        unscaled, scaled = errors
        assert scaled < 5 < unscaled

    def test_the_matmul_is_of_float32_operands(self, lines):
        (dot,) = (line for line in lines if "dot_general" in line)
        assert "f8E4M3FN" not in dot
        assert sum("stablehlo.convert" in line and "f8E4M3FN" in line for line in lines) == 4

    def test_losses_fall_together(self, lines):
        rows = [line.split() for line in lines if re.match(r" *\d+ +\d\.\d{4} +\d\.\d{4}", line)]
        losses = {int(row[0]): (float(row[1]), float(row[2])) for row in rows}
        assert losses[39][0] < losses[0][0] / 5
        assert losses[39][1] == pytest.approx(losses[39][0], rel=0.05)
        assert losses[14][1] > 1.2 * losses[14][0]  # the first loud step saturates

    def test_delayed_scale_follows_one_step_later_and_comes_down(self, lines):
        pattern = r"step (\d+): input amax +([\d.]+)   scale used ([\d.]+)"
        found = [match.groups() for match in map(re.compile(pattern).match, lines) if match]
        amax = {int(step): float(a) for step, a, _ in found}
        used = {int(step): float(s) for step, _, s in found}
        assert amax[14] > 5 * amax[13]
        assert used[14] == used[13]
        assert used[15] == pytest.approx(amax[14] / 448, abs=1e-5)
        assert used[33] > 5 * used[34]

    def test_maximum_and_sum_of_a_state_that_is_used_twice(self, lines):
        i = lines.index("1.0 [3. 0. 0. ... 0. 0. 0.]")
        assert lines[i + 1] == "2.0 [5. 0. 0. ... 0. 0. 0.]"

    def test_a_layer_called_twice(self, lines):
        assert "jax.value_and_grad, twice  2.0 [5. 0. 0. ... 0. 0. 0.]" in lines
        assert "fp8.value_and_grad, twice  1.0 [3. 0. 0. ... 0. 0. 0.]" in lines
        assert "one call on both batches   1.0 [3. 0. 0. ... 0. 0. 0.]" in lines


@pytest.mark.long
class TestRecipes:
    """The output of notebook 03 supports the claims in its prose."""

    @pytest.fixture
    def notebook(self, fresh_run):
        return fresh_run("03_recipes.ipynb")

    def test_one_scale_turns_small_tokens_into_zeros(self, notebook):
        pattern = r"(\w[\w-]*) +([\d.]+)% +([\d.]+) dB +([\d.]+) dB"
        rows = [row.groups() for row in map(re.compile(pattern).match, _printed_lines(notebook)) if row]
        forward, wgrad = ({n: tuple(map(float, row)) for n, *row in part} for part in (rows[:5], rows[5:]))
        for name in ("delayed", "current"):
            zero, _, quiet = forward[name]
            assert zero > 30
            assert quiet < 15
        assert forward["delayed"][1] < forward["current"][1] - 15  # its largest value saturates
        for name in ("axiswise", "MXFP8", "128-blocks"):
            zero, _, quiet = forward[name]
            assert zero == 0
            assert quiet == pytest.approx(31.5, abs=0.5)
            assert wgrad[name][2] == pytest.approx(31.5, abs=0.5)
        assert min(wgrad["axiswise"][0], wgrad["128-blocks"][0]) > 1
        assert wgrad["MXFP8"][0] == 0

    def test_autocast(self, notebook):
        lines = _printed_lines(notebook)
        assert "recipes: 6  traces: 6" in lines
        assert "traces, after MXFP8 once more: 6" in lines
        assert "by hand wins: True" in lines

    def test_recipes_from_parts(self, notebook):
        rows = [
            re.match(r"(\w.*?) +output +([\d.]+)% .* input +([\d.]+)%, kernel +([\d.]+)%", line)
            for line in _printed_lines(notebook)
        ]
        errors = {row[1]: tuple(map(float, row.groups()[1:])) for row in rows if row}
        assert errors["wide wgrad"][:2] == errors["axiswise, e4m3"][:2]
        assert errors["wide wgrad"][2] == 0 < errors["axiswise, e4m3"][2] < errors["current"][2]


@pytest.mark.long
class TestWholeModel:
    """The output of notebook 04 supports the claims in its prose."""

    @pytest.fixture
    def lines(self, fresh_run):
        return _printed_lines(fresh_run("04_whole_model.ipynb"))

    def test_reports(self, lines):
        assert "6 of 9 contractions are converted (80.0 % of their FLOPs)." in lines
        assert "5 of 9 contractions are converted (73.3 % of their FLOPs)." in lines
        assert any("No contraction was the first to match rule 'donw'" in line for line in lines)

    def test_losses(self, lines):
        (row,) = (line for line in lines if line.startswith("mean loss"))
        wide, in_fp8 = (float(x) for x in re.findall(r"\d\.\d+", row))
        assert wide < 0.4
        assert in_fp8 == pytest.approx(wide, rel=0.1)

    def test_serving(self, lines):
        (same,) = (float(line.split()[-1].rstrip("%")) for line in lines if "the same greedy" in line)
        assert same > 98
        assert "kernel: float8_e4m3fn" in lines
        assert any(line.startswith("6 of 9 GEMMs run in FP8") for line in lines)
        before, after = map(float, re.findall(r"([\d.]+) kB", next(x for x in lines if "block_0  " in x)))
        assert after < 0.26 * before


@pytest.mark.long
class TestStateAndFaults:
    """The output of notebook 05 supports the claims in its prose."""

    @pytest.fixture
    def lines(self, fresh_run):
        return _printed_lines(fresh_run("05_state_and_faults.ipynb"))

    def test_maximum_and_sum(self, lines):
        pattern = r"(\w+).value_and_grad +last scale of the kernel (\S+), last loss (\S+)"
        rows = [row.groups() for row in map(re.compile(pattern).match, lines) if row]
        (_, scale, loss), (_, added, stuck) = ((name, float(s), float(x)) for name, s, x in rows)
        assert scale < 0.01
        assert added > 1e6
        assert loss < 0.5
        assert stuck > 10
        assert [line.split(":")[0] for line in lines].count("refused") == lines.count("accepted") == 1

    def test_batches_in_parts(self, lines):
        rows = [re.match(r"(\w.*?) +newest amax of the input: ([\d.]+)$", line) for line in lines]
        newest = {row[1]: float(row[2]) for row in rows if row}
        assert newest["accumulate_gradients"] == newest["whole batch"]
        assert newest["averaged"] < 0.6 * newest["whole batch"]
        assert [line.split()[-1] for line in lines if line.startswith("call")] == ["True"] * 3 + ["False"]

    def test_nan_and_resume(self, lines):
        steps = [line for line in lines if line.startswith("step")]
        assert [line.split()[-1] for line in steps] == ["False", "True", "False"]
        assert [re.search(r"loss +(\S+);", line)[1] == "nan" for line in steps] == [False, True, False]
        assert not any("nan" in line.split(";", 1)[1] for line in steps)
        assert "resumed, the same bits: True" in lines
        assert "without the state:      False" in lines


@pytest.mark.long
class TestDiagnosing:
    """The output of notebook 06 supports the claims in its prose."""

    @pytest.fixture
    def notebook(self, fresh_run):
        return fresh_run("06_diagnosing.ipynb")

    def test_the_gap_and_what_helps(self, notebook):
        found = re.findall(r"^([\w ,-]+?) +([+-]\d\.\d\d) %", "\n".join(_printed_lines(notebook)), re.M)
        gaps = {name: float(gap) for name, gap in found}
        assert gaps["delayed"] > 10 * abs(gaps["bf16-chance"])
        assert gaps["first-attention-wide"] < 0.6 * gaps["delayed"]

    def test_no_scale_is_wrong_and_the_logits_matter_first(self, notebook):
        printed = "\n".join(_printed_lines(notebook))
        assert 23 < float(re.search(r"lowest SQNR: (.*) dB", printed)[1]) < 28
        turned = dict(re.findall(r"^(.*?) +stays in bf16: 1 - cosine = (.*)$", printed, re.M))
        assert len(turned) == 4
        assert min(turned, key=lambda name: float(turned[name])) == "logits"


@pytest.mark.long
class TestFlaxNnx:
    """The output of notebook 07 supports the claims in its prose."""

    @pytest.fixture
    def lines(self, fresh_run):
        return _printed_lines(fresh_run("07_flax_nnx.ipynb"))

    def test_steps_are_the_same(self, lines):
        rows = [re.match(r"step +(\d+)   Linen ([\d.]+)   NNX ([\d.]+)", line) for line in lines]
        losses = {int(row[1]): (row[2], row[3]) for row in rows if row}
        assert len(losses) == 7
        assert all(linen == nnx for linen, nnx in losses.values())
        assert float(losses[59][1]) < float(losses[9][1]) / 5
        assert "parameters and state are the same bits: True" in lines

    def test_state_of_a_layer_that_is_called_twice(self, lines):
        assert "nnx.grad               2.0 [4. 0. 0. 0.]" in lines
        assert "fp8nnx.grad            1.0 [3. 0. 0. 0.]" in lines
        assert any("is not the next st" in line for line in lines)

    def test_models_are_converted_and_frozen(self, lines):
        assert "6 of 7 contractions are converted (98.0 % of their FLOPs)." in lines
        assert lines[-3:] == ["kernel: float8_e4m3fn", "the same bits: True", "state left: 0"]
