"""A file imports only from files above it in the list, and says which internals of JAX and Flax it uses."""

import ast
import inspect
import re
import runpy
from pathlib import Path

import flax.core
import flax.linen as nn
import pytest

import fp8flax
from tests import ROOT

PACKAGE = Path(fp8flax.__file__).parent
ORDER = [
    "_host/interrupt",
    "_host/versions",
    "_host/files",
    "_host/shared_text",
    "_host/public",
    "_compat/stablehlo_version",
    "_compat/plugin_compiler",
    "_compat/replacing",
    "_compat/max_dtype",
    "_compat/jaxprs",
    "_compat/name_scopes",
    "_compat/interpreter",
    "_compat/report_primitive",
    "_compat/traces",
    "_compat/flax_pack",
    "_compat/flax_modules",
    "_compat/flax_context",
    "_compat/varying",
    "_compat/choice_at_lowering",
    "_compat/xla_metadata",
    "_compat/reverse_mode",
    "_compat/hoisting",
    "_core/formats",
    "_core/axes",
    "_core/tracing",
    "_core/observe",
    "_core/names",
    "_core/options",
    "_core/grouping",
    "_core/scaling",
    "_core/amax",
    "_core/quantize",
    "_core/qtensor",
    "_core/quantizers",
    "_core/recipes",
    "_core/autocast",
    "_core/state/state",
    "_core/state/batching",
    "_core/state/tree",
    "_core/qdq",
    "_core/no_derivative",
    "_core/gemm/gpus",
    "_core/gemm/request",
    "_core/gemm/kernels/block_gemm",
    "_core/gemm/kernels/block_quantize",
    "_core/gemm/kernels/cast_transpose",
    "_core/gemm/kernels/transpose",
    "_core/gemm/kernels/groups",
    "_core/gemm/kernels/tiled_gemm_hopper",
    "_core/gemm/kernels/block_gemm_hopper",
    "_core/gemm/kernels/on_shards",
    "_core/gemm/cuda",
    "_core/gemm/cuda_casts",
    "_core/gemm/cuda_ragged",
    "_core/gemm/units",
    "_core/gemm/lowering",
    "_core/mode",
    "_core/measuring",
    "_core/plans/plan",
    "_core/plans/engine",
    "_core/plans/contraction",
    "_core/plans/modes",
    "_core/plans/dot_general",
    "_core/plans/einsum",
    "_core/plans/mlp",
    "_core/plans/routing",
    "_core/plans/conv",
    "_core/plans/ragged_dot",
    "_core/plans/calls",
    "_core/plans/row",
    "_core/plans/ops",
    "_core/op_base",
    "_core/blocks",
    "_linen/conversion",
    "_linen/op",
    "_linen/ops",
    "_linen/mlp",
    "_linen/moe",
    "_train/check",
    "_train/gradients",
    "_train/train_state",
    "_train/schedule",
    "_train/bridge",
    "_train/calibrate",
    "_train/statistics",
    "_train/plots",
    "_audit/compiling",
    "_audit/hlo",
    "_audit/traffic",
    "_audit/collectives",
    "_audit/dots",
    "_audit/kernels",
    "_audit/op_names",
    "_audit/instructions",
    "_audit/gemms",
    "_audit/time_model",
    "_audit/report",
    "_audit/auditing",
    "_audit/command",
    "_model/beside_params",
    "_model/program_reads",
    "_model/param_origin",
    "_model/interception",
    "_model/rules",
    "_model/model_report",
    "_model/contraction_site",
    "_model/decisions",
    "_model/converted_call",
    "_model/wrapped_module",
    "_model/quantize_model",
    "_model/report",
    "_serve/trees",
    "_serve/scales",
    "_serve/stored_op",
    "_serve/headers",
    "_serve/hidden_state",
    "_serve/server_layout",
    "_serve/renaming",
    "_serve/safetensors",
    "_serve/checkpoints",
    "_serve/parts",
    "_serve/load_into",
    "_serve/kernels",
    "_serve/coverage",
    "_serve/serving",
    "_serve/freeze",
    "_serve/saving",
    "_serve/weights",
    "nnx/ops",
    "nnx/variables",
    "nnx/blocks",
    "nnx/training",
    "nnx/models",
    "nnx/freezing",
    "nnx/safetensors",
    "extend",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Yields the dotted name of everything that a file imports, at any depth of the code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


INTERNAL_MODULES = ("jax._src.", "jax.interpreters.", "jax.extend.", "flax.core.lift.", "flax.core.scope.")
PRIVATE_OF_FLAX = {
    name
    for thing in (nn.Module, nn.module, flax.core.Scope({}))
    for name in dir(thing)
    if name.startswith("_") and not name.startswith("__")
}


def internals(path):
    """Yields the dotted name of each internal of JAX that a file uses, and the name of each of Flax's."""
    attributes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    names = [*imports(path), *map(ast.unparse, attributes)]
    yield from (name for name in names if f"{name}.".startswith(INTERNAL_MODULES))
    yield from (node.attr for node in attributes if node.attr in PRIVATE_OF_FLAX)


def test_private_parts_are_used_in_compat_alone():
    """Only ``_compat`` must change if a version of JAX or Flax does not have a private part any more."""
    users = {str(path.relative_to(PACKAGE)): set(internals(path)) for path in FILES}
    assert {name: used for name, used in users.items() if used and not name.startswith("_compat/")} == {}


def said_internals(path):
    """Returns the names in the paragraph of a file's docstring that begins with "Internals:"."""
    paragraphs = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
    names = (name for p in paragraphs if p.startswith("Internals:") for name in re.findall("``(.+?)``", p))
    return {name for name in names if f"{name}.".startswith((*INTERNAL_MODULES, "_"))}


def place(name):
    """Returns the entry of the list that a dotted name belongs to, or None."""
    return next((e for e in ORDER if f"{name}.".startswith(f"fp8flax.{e.replace('/', '.')}.")), None)


def files_of(entry):
    path = PACKAGE / entry
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def test_every_file_is_in_the_list():
    listed = [path for entry in ORDER for path in files_of(entry)]
    files = [p for p in FILES if p.parent.name != "demo" and p.name not in ("__main__.py", "audit.py")]
    assert sorted(listed) == [p for p in files if p.name != "__init__.py" or p in listed]


@pytest.mark.parametrize("entry", ORDER)
def test_imports_go_up_the_list(entry):
    above = ORDER[: ORDER.index(entry)]
    for imported in (i for path in files_of(entry) for i in imports(path)):
        if imported.startswith("fp8flax") and not imported.startswith("fp8flax.demo."):  # lent to the audit
            assert place(imported) in above, f"{entry} imports {imported}"


def test_each_file_of_the_core_has_a_file_of_tests():
    """At the same place: ``_core/gemm/cuda.py`` has ``tests/core/gemm/test_cuda.py``."""
    core = PACKAGE / "_core"
    files = [path.relative_to(core) for path in core.rglob("*.py") if path.name != "__init__.py"]
    tests = [ROOT / "tests" / "core" / path.with_name(f"test_{path.name}") for path in files]
    assert [str(path) for path in tests if not path.exists()] == []


def test_the_picture_shows_the_imports():
    """The picture of docs/architecture.md; docs/theme/architecture.py draws it again."""
    drawing = runpy.run_path(str(ROOT / "docs" / "theme" / "architecture.py"))
    assert set(drawing["CONTENTS"]) == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert drawing["PICTURE"].read_text() == drawing["drawn"]()


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_says_which_internals_it_uses(path):
    used, said = set(internals(path)), said_internals(path)
    covered = {name: [part for part in said if f"{name}.".startswith(f"{part}.")] for name in used}
    assert all(covered.values()), f"the docstring does not say {[n for n, c in covered.items() if not c]}"
    assert said == {part for parts in covered.values() for part in parts}, "said, and not used"


def test_internals_are_found(tmp_path):
    path = tmp_path / "file.py"
    path.write_text(
        "import jax\nimport jax.extend.core\nfrom jax._src import core\nfrom jax.interpreters import ad\n"
        "from flax.core import lift\njax._src.api.jit\nx._call_wrapped_method\njax.core.Tracer\nx._a\n"
    )
    assert set(internals(path)) == {
        *("jax._src.core", "jax.interpreters.ad", "flax.core.lift", "jax.extend.core"),
        *("jax._src", "jax._src.api", "jax._src.api.jit", "_call_wrapped_method"),
    }


@pytest.mark.parametrize("path", sorted((PACKAGE / "demo").glob("*.py")), ids=lambda p: p.name)
def test_demo_uses_the_public_api(path):
    """And what a command needs: how the package writes a file, and meets Ctrl-C."""
    allowed = ("fp8flax._host.files.", "fp8flax._host.interrupt.")
    for imported in imports(path):
        if imported.startswith("fp8flax") and not imported.startswith(allowed):
            assert not any(part.startswith("_") for part in imported.split(".")), imported


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_star_imports(path):
    assert not any(i.endswith(".*") for i in imports(path))


def test_the_root_lists_each_public_name_once():
    names = [
        alias
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    public = [alias.name for alias in names if alias.asname == alias.name]
    assert sorted(public) == sorted(set(public))
    assert {alias.asname for alias in names} - set(public) == {"_interrupt", "_public", "_versions"}
    here = {n for n, v in vars(fp8flax).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert here == set(public)


@pytest.mark.parametrize("name", ["qtensor", "quantizers", "recipes", "autocast"])
def test_descriptions_do_not_know_how_they_run(name):
    """The folder ``gemm`` alone knows which GPU kernel runs for a quantizer."""
    assert [i for i in imports(PACKAGE / f"_core/{name}.py") if "_core.gemm" in i] == []


def test_one_file_chooses_how_a_request_runs():
    """The other files choose for the arithmetic of scaling states, or say what a choice is."""
    choice = re.compile(r"\b(platform_dependent|unless_partitioned)\b")
    names = {name for name, text in sources().items() if choice.search(text)}
    of_state = {"_core/amax.py", "_train/check.py"}
    assert {n for n in names - of_state if not n.startswith("_compat/")} == {"_core/gemm/lowering.py"}


def sources():
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in FILES}


def test_kinds_of_quantizers_are_told_apart_by_their_own_methods():
    kinds = re.compile(r"isinstance\([^()]*(?:Delayed|Current|Block)Quantizer")
    assert [name for name, text in sources().items() if kinds.search(text)] == []


def test_contractions_have_one_derivative():
    """Other rules are those of one tensor, of scaling state and of casts; a block is made of its parts."""
    have = [
        name
        for name, text in sources().items()
        if re.search(r"custom_vjp, nondiff|(@|= )jax\.custom_vjp", text)
    ]
    assert have == [
        "_core/observe.py",
        "_core/plans/engine.py",
        "_core/state/state.py",
        "_core/state/tree.py",
        "nnx/ops.py",
    ]
    bases = ("(Contraction):", "(Plan):")
    plans = {name: text for name, text in sources().items() if any(base in text for base in bases)}
    stems = {Path(name).stem for name in plans}
    assert stems == {"contraction", "dot_general", "conv", "mlp", "ragged_dot"}
    assert not any("custom_vjp" in text for text in plans.values())


def test_what_follows_the_context():
    found = {
        (name, variable)
        for name, text in sources().items()
        for variable in re.findall(r"^ *(\w+).* = (?:jax\.make_user_context|ContextVar)\(", text, re.M)
    }
    assert found == {
        ("_core/autocast.py", "_jit_key"),
        ("_core/gemm/gpus.py", "compile_target"),
        ("_core/mode.py", "mode"),
        ("_core/axes.py", "axes_around_gradient"),
        ("_linen/conversion.py", "_running"),
    }
