"""docs/troubleshooting.md: each message of the sources has an entry there, and each entry a message here."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GAP = ".*"  # stands for the variable parts of a message
MARK = "jaxmagi: "  # comes before messages on stderr
# Calls that get a message (exceptions, warnings, two helpers), and functions that return one as a reason.
REPORTERS, REASONS = r"Error$|\b(warn|reject|_warn_once)$", r"_reason$|^no_kernel$"
NATIVE = re.compile(
    r"\b(?:throw [\w:]+|fail|check|check_all|check_xla|abort_kernel|std::fprintf|message)\((?:FATAL_ERROR)?"
)
TOKEN = re.compile(r'"((?:\\.|[^"\\])*)"|([()])|(\s+|//.*)|[^\s()"/]+|/')
# No user can meet these: only tests choose instruction sets, only jaxmagi.planning counts tiles by groups,
# and Python asks for a tile before it asks for a workspace. Context attention does not say why it is not one
# call, for its attention and its transfers may still be. The others end messages, and tell of a build.
INTERNAL = r"^instruction\\ set|^groups\\ must\\ have\\ 0|no\\ kernel\\ for.*and\\ \.\*$|:\\ q\\ |CUDA:"
INTERNAL += r"|^plain\\ JAX\\ is\\ asked\\ for$|^an\\ array\\ is\\ empty$"
INTERNAL += r"|^XLA's\\ partitioner\\ splits\\ the\\ program$"


def templates(node: ast.AST, names: dict[str, list[ast.expr]]) -> Iterator[str]:
    """Yields the messages that an expression can be, as regular expressions."""
    match node:
        case ast.Constant(value=str(text)):
            yield re.escape(text)
        case ast.JoinedStr(values=parts):
            yield "".join(re.escape(str(p.value)) if isinstance(p, ast.Constant) else GAP for p in parts)
        case ast.Name(id=name):
            yield from (text for value in names.get(name, []) for text in templates(value, {}))
        case ast.Lambda() | ast.BoolOp() | ast.IfExp():
            yield from (text for child in ast.iter_child_nodes(node) for text in templates(child, names))


def python_messages(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the template of what a module raises, warns of and returns as a reason."""
    nodes = list(ast.walk(ast.parse(source)))
    names: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, []).append(node.value)
    for node in nodes:
        found: list[ast.expr | None] = []
        if isinstance(node, ast.Call) and re.search(REPORTERS, ast.unparse(node.func)):
            found = [*node.args]
        elif isinstance(node, ast.FunctionDef) and re.search(REASONS, node.name):
            found = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        yield from ((each.lineno, text) for each in found if each for text in templates(each, names))


def native_messages(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and the template of what C++, CUDA and CMake report, from the literals of a call."""
    for call in NATIVE.finditer(source):
        depth, text = 1, ""
        for literal, parenthesis, space in TOKEN.findall(source, call.end()):
            depth += {"(": 1, ")": -1}.get(parenthesis, 0)
            if depth == 0 or ("%" in text and not (literal or space)):  # the arguments of printf are no text
                break
            has_words = re.search("[a-z]", literal)
            text += re.escape(literal.replace(r"\n", "")) if has_words else "" if space else GAP
        text = re.sub(r"%(?:ll)?[a-z]|\\\$\\\{\w+\\\}", GAP, text)
        yield source.count("\n", 0, call.start()) + 1, re.sub(r"(\.\*)+", GAP, text)


def all_messages() -> dict[str, str]:
    """Returns where each message is, by template. A message has two words at least."""
    native = [*ROOT.glob("csrc/**/*.*"), *ROOT.glob("xla_ffi/*.*"), *ROOT.glob("cmake/*.cmake")]
    places: dict[str, str] = {}
    for path in sorted([*ROOT.glob("jaxmagi/**/*.py"), *native]):
        read = native_messages if path in native else python_messages
        for line, text in read(path.read_text()):
            text = text.rpartition(re.escape(MARK))[2]
            if re.search(r"[a-z]\\ |\\ [a-z]", text) and not re.search(INTERNAL, text):
                places.setdefault(text, f"{path.relative_to(ROOT)}:{line}: {text}")
    return places


def entries(page: str) -> list[str]:
    """Returns the messages in the page's text blocks; a line that is indented goes on with the one before."""
    blocks = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"\n(?! )", block.strip())]
    return [" ".join(line.split()).removeprefix(MARK) for line in lines]


def best_fits(entry: str, templates: Iterable[str]) -> set[str]:
    """Returns the templates that an entry is an example of, and of these those with the most text."""
    sizes = {text: len(text.replace(GAP, "")) for text in templates if re.fullmatch(text, entry)}
    return {text for text, size in sizes.items() if size == max(sizes.values())}


@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the sources are not here")
def test_each_message_has_an_entry_and_each_entry_a_message() -> None:
    places = all_messages()
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    fits = {entry: best_fits(entry, places) for entry in entries(page)}
    assert [entry for entry, texts in fits.items() if not texts] == [], "no source has these messages"
    missing = places.keys() - set[str]().union(*fits.values())
    assert sorted(places[text] for text in missing) == [], "the page lacks these messages"
