"""Text is plain: short sentences, docstrings in one form, no words that a reader must decode.

This holds for pages, notebooks, error messages, and for all docstrings and comments of the source.
"""

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx

PACKAGE = Path(fp8.__file__).parent
ROOT = PACKAGE.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MOST_WORDS = 40
VERBS = re.compile(
    "Applies|Averages|Casts|Compiles|Computes|Contracts|Convolves|Draws|Fills|Lists|Multiplies|Passes|Quantizes"
    "|Raises|Reads|Repeats|Replaces|Rescales|Returns|Rounds|Sets|Swaps|Updates|Writes"
)
"""First words of the docstrings of public functions, methods and properties; a new verb is added here."""
REPLACED = re.compile(
    r"\b(twins?|told|tells|judge[sd]?|verdicts?|poison\w*|guises?|manners|nouns?|house|room|floors?"
    r"|likewise|of\s+which|the\s+former)\b",
    re.IGNORECASE,
)
"""Words that have a plainer one: recorded, validates, reference implementation, non-finite marker."""
OPENINGS = re.compile(r"(Of|Where|What|That|Tells|As)\b")
"""First words after which a sentence does not say who does what. A question may begin with them."""
SECTIONS = ["Attributes", "Args", "Returns", "Raises", "Warns", "Example", "Source"]


def prose(text):
    """Returns Markdown or a docstring without code, tables, comments and the addresses of links."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *>>> .*(\n *\S.*)*", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=::\n\n)(?: {4,}.*\n|\n)+", "\n", text)  # code after a double colon
    text = re.sub(r"^ *\|.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"(`+)[^`].*?\1", "CODE", text, flags=re.DOTALL)
    text = re.sub(r"(!?)\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", r"\2", text)
    return re.sub(r"<[^>]*>", " ", text)


def sentences(text):
    """Returns the sentences of prose; an empty line, a heading or a list item ends one."""
    starts = r"\n\s*\n|\n(?=\s*(?:[*+-] |\d+\. |#|!!! |=== )| {4}\S+: )|(?<=::)\n"
    blocks = re.split(starts, prose(text))
    return [s for block in blocks for s in re.split(r"(?<=[.!?])[)\"'*_]*\s+", block) if s.strip()]


def words(sentence):
    return re.findall(r"[^\s—–-]\S*", sentence)


def long_sentences(text):
    return [" ".join(s.split()) for s in sentences(text) if len(words(s)) > MOST_WORDS]


def replaced_words(text):
    return [" ".join(match[0].split()) for match in REPLACED.finditer(prose(text))]


def public_docstrings():
    """Yields the name, the object and the docstring of all that is public, each object once."""
    seen = set()
    for package in (fp8, fp8nnx):
        for name in package.__all__:
            for path, value in with_members(f"{package.__name__}.{name}", getattr(package, name)):
                if id(value) not in seen:
                    seen.add(id(value))
                    yield path, value, inspect.getdoc(value) if value.__doc__ else ""


def with_members(path, value):
    """Yields a class or function of this package, and the methods and properties that a class defines."""
    value = inspect.unwrap(value) if callable(value) else value
    if inspect.isclass(value) and value.__module__.startswith("fp8flax"):
        yield path, value
        for name, member in vars(value).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if (not name.startswith("_") or name == "__call__") and not isinstance(member, staticmethod):
                yield from with_members(f"{path}.{name}", function)
    elif inspect.isfunction(value) and Path(value.__code__.co_filename).is_relative_to(PACKAGE):
        yield path, value


DOCSTRINGS = list(public_docstrings())


def wrong_docstring(docstring, is_class):
    """Returns what is wrong with the form of a docstring."""
    first, *rest = docstring.split("\n")
    wrong = []
    if len(words(first)) < 4 or not first.endswith((".", "::")) or any(rest[:1]):
        wrong.append(f"the first line is not a sentence of four words or more: {first!r}")
    if not is_class and not VERBS.fullmatch(first.partition(" ")[0]):
        wrong.append(f"it does not begin with one of the verbs: {first!r}")
    headings = re.findall(r"^([A-Z][\w ]*):(?=\n {4}\S|(?<=^Source:) \S)", docstring, re.MULTILINE)
    if headings != [name for name in SECTIONS if name in headings]:
        wrong.append(f"its sections are {headings}; they must be among {SECTIONS}, in this order")
    return wrong + [f"it has more than {MOST_WORDS} words: {s}" for s in long_sentences(docstring)]


def messages(source):
    """Yields the line and the text of each string in a raise statement or a call of ``warn``."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        is_warn = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn")
        if not is_warn and not isinstance(node, ast.Raise):
            continue
        inside = list(ast.walk(node))
        names = [n.id for n in inside if isinstance(n, ast.Name) and n.id in constants]
        for part in (*inside, *(part for name in names for part in ast.walk(constants[name]))):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, re.sub(r"'\w+'", "CODE", part.value)


def docstrings(node):
    """Yields the line and the text of each docstring, and whether it is that of an attribute."""
    for block in ("body", "orelse", "handlers", "finalbody"):
        for i, part in enumerate(getattr(node, block, ())):
            text = getattr(part.value, "value", None) if isinstance(part, ast.Expr) else None
            if isinstance(text, str):
                yield part.lineno, inspect.cleandoc(text), i > 0
            yield from docstrings(part)


STRING_OR_COMMENT = re.compile(
    r'"""(?:\\[\s\S]|[^\\])*?"""|"(?:\\[\s\S]|[^"\\\n])*"'
    r"|'''(?:\\[\s\S]|[^\\])*?'''|'(?:\\[\s\S]|[^'\\\n])*'|(?P<comment>#.*)"
)


def comments(source):
    """Yields the line and the text of each comment; lines that only hold comments form one block."""
    block, line, row, start, end = [], 0, 1, 0, None
    for found in STRING_OR_COMMENT.finditer(source):
        row, start = row + source.count("\n", start, found.start()), found.start()
        if not (text := found["comment"]):
            continue
        column = start - source.rfind("\n", 0, start) - 1
        is_alone = not source[start - column : start].strip()
        if not is_alone or end != (row - 1, column):
            yield line, "\n".join(block)
            block, line = [], row
        block.append(text.strip("# "))
        end = (row, column) if is_alone else None
    yield line, "\n".join(block)


def wrong_text(source):
    """Yields the line and the faults of each docstring and comment of a Python file."""
    for line, text, is_of_attribute in docstrings(ast.parse(source)):
        first, *rest = text.split("\n")
        if not is_of_attribute and (not first.endswith((".", "::", "?")) or any(rest[:1])):
            yield line, f"the first line is not a sentence: {first!r}"
        yield from ((line, fault) for fault in faults(text))
    for line, text in comments(source):
        yield from ((line, fault) for fault in faults(text))


def faults(text):
    """Yields what is wrong with the sentences of a docstring or a comment."""
    if OPENINGS.match(text) and not text.partition("\n")[0].endswith("?"):
        yield f"it begins with {text.split()[0]!r}: {text.partition(chr(10))[0]!r}"
    if REPLACED.search(text):
        yield from (f"it has the word {word!r}" for word in replaced_words(text))
    if len(text.split()) > MOST_WORDS:
        yield from (f"it has more than {MOST_WORDS} words: {s}" for s in long_sentences(text))


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_pages(path):
    text = path.read_text()
    assert long_sentences(text) == []
    assert replaced_words(text) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_notebooks(path):
    cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "markdown"]
    assert cells
    assert [word for cell in cells for word in replaced_words("".join(cell["source"]))] == []


def test_public_docstrings():
    assert len(DOCSTRINGS) > 150
    wrong = {name: wrong_docstring(doc, inspect.isclass(value)) for name, value, doc in DOCSTRINGS}
    assert {name: found for name, found in wrong.items() if found} == {}
    found = {name: replaced_words(doc) for name, _, doc in DOCSTRINGS}
    assert {name: some for name, some in found.items() if some} == {}


def test_messages():
    found = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in PACKAGE.rglob("*.py")
        for line, text in messages(path.read_text())
    ]
    assert len(found) > 500
    assert [(place, text) for place, text in found if REPLACED.search(text)] == []


SOURCES = [path for part in ("fp8flax", "benchmarks", "tests") for path in (ROOT / part).rglob("*.py")]


def test_docstrings_and_comments():
    assert len(SOURCES) > 200
    found = {
        name_of(path): wrong
        for path in SOURCES
        if (wrong := [f"line {line}: {fault}" for line, fault in wrong_text(path.read_text())])
    }
    assert found == {}


LONG = "word " * (MOST_WORDS + 1)


@pytest.mark.parametrize(
    "text",
    [
        f"Fine. {LONG}. Fine.",
        f"* Fine.\n* {LONG}\n",
        f"{LONG[:100]}\n{LONG[100:]}",
        f"[{LONG}](https://example.com)",
        f"{LONG[:150]} `some code` {LONG[150:]}",
    ],
)
def test_long_sentences_are_found(text):
    assert len(long_sentences(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "word " * (MOST_WORDS - 1) + "word.",
        f"{LONG[:100]}.\n{LONG[100:]}",
        f"{LONG[:100]}\n* {LONG[100:]}",
        f"{LONG[:100]}\n\n{LONG[100:]}",
        f"| {LONG} |",
        f"```python\n{LONG}\n```",
        f"`{LONG}`",
        f">>> {LONG}",
        f"A [link](https://example.com/{LONG.replace(' ', '/')}).",
    ],
)
def test_other_text_is_not_long(text):
    assert long_sentences(text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("XLA is told the shape.", ["told"]),
        ("Two arrays, of\nwhich one is likewise FP8", ["of which", "likewise"]),
        ("Verdict: the twins judged", ["Verdict", "twins", "judged"]),
        ("Call `floor`, or ``told``, with `scale_rounding='floor'`. Mushrooms.", []),
        ("```\ntold\n```", []),
    ],
)
def test_replaced_words_are_found(text, found):
    assert replaced_words(text) == found


@pytest.mark.parametrize(
    ("docstring", "is_class", "wrong"),
    [
        ("Returns the scale in use.", False, ""),
        ("Returns the scale in use.\n\nArgs:\n    x: an array.\n\nReturns:\n    A scale.", False, ""),
        ("Scale of one tensor.", True, ""),
        ("", True, "four words"),
        ("Returns the scale.", False, "four words"),
        ("Returns the scale in use", False, "four words"),
        ("Returns the scale\nin use of a tensor.", False, "four words"),
        ("The scale that is in use.", False, "verbs"),
        ("Return the scale in use.", False, "verbs"),
        ("Returns the scale in use.\n\nReturns:\n    A scale.\n\nArgs:\n    x: one.", False, "order"),
        ("Returns the scale in use.\n\nParameters:\n    x: an array.", False, "sections"),
        ("Returns the scale in use.\n\nSource: a paper.\n\nExample:\n    >>> 1", False, "order"),
        (f"Returns the scale in use.\n\nArgs:\n    x: {LONG}", False, "40 words"),
    ],
)
def test_wrong_docstrings_are_found(docstring, is_class, wrong):
    found = wrong_docstring(docstring, is_class)
    assert [wrong in message for message in found] == ([True] if wrong else [])


def test_messages_are_found():
    source = (
        '_WHY = "the judge"\n'
        "def f(x):\n"
        '    """Told in a docstring."""\n'
        '    warnings.warn(f"{x} was told")\n'
        '    raise ValueError("one, " "of which" + _WHY + "\'floor\'") from error\n'
    )
    assert {text for _, text in messages(source) if REPLACED.search(text)} == {
        *(" was told", "one, of which", "the judge")
    }


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""A module."""\n\n# A comment.\nx = 1  # of a line\n', []),
        ('"""A module of\n\ntwo lines."""', [1]),
        ('"""A module\nof two lines."""', [1]),
        ('"""How much?"""\n"""What\nis x?"""', [2]),
        ('class _A:\n    """Of one."""\n    x: int\n    """Where x\n    is."""', [2, 4]),
        ('def _f():\n    """Tells something."""\n', [2, 2]),
        ("x = 1\n# Fine, and\n# What is told.\n", [2]),
        ("x = 1  # Fine, and\n# What is told.\n", [2, 2]),
        (f"# {LONG[:150]}\n# {LONG[150:]}\n", [1]),
        (f"# {LONG[:150]}\n\n# {LONG[150:]}\n", []),
        ('x = "# told"\ny = """Of a string."""\n', []),
    ],
)
def test_wrong_docstrings_and_comments_are_found(source, lines):
    assert [line for line, _ in wrong_text(source)] == lines
