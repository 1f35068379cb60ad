"""What docstrings, comments and pages call by name exists: members, modules, files, arguments."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.test_house import ROOT, git_files

_ROOMS = "engine|server|kernels|tools|loadtest|demo"
_MEMBER = re.compile(r"`(?:[a-z_]\w*\.)*([A-Z]\w+)\.([A-Za-z_]\w*)(?:\(\))?`")
_DOTTED = re.compile(rf"`((?:{_ROOMS})(?:\.(?!pem`)[A-Za-z_]\w*)+)(?:\(\))?`")
_FILE = re.compile(rf"`((?:{_ROOMS}|tests|configs)/[\w/.-]+\.[a-z]+)`")
_ARGS = re.compile(r"^Args:\n((?: {4}.*\n|\n)+)", re.MULTILINE)
_ARG = re.compile(r"^ {4}((?:\*{0,2}[a-z_]\w*(?:, )?)+):", re.MULTILINE)
_RUN = re.compile(rf"python -m ((?:{_ROOMS})(?:\.\w+)*)")


class Names:
    """The names that the given sources define, by class and by module."""

    def __init__(self, sources: Iterable[tuple[str, str]]) -> None:
        """Read the sources: their paths relative to the root, and their texts."""
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._modules: dict[str, set[str]] = {}
        for path, text in sources:
            name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self._modules[name] = set()
            self._read(ast.parse(text), (self._modules[name],))

    def _read(self, tree: ast.AST, owners: tuple[set[str], ...]) -> None:
        """Add what is below a node to its module and all classes around it."""
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.expr) and not isinstance(getattr(node, "ctx", None), ast.Store):
                continue  # most of a file, and defines nothing that is called by name
            within = owners
            if isinstance(node, ast.ClassDef):
                within = (*owners, self._members[node.name])
                bases = {re.split(r"[\[.]", ast.unparse(base))[-1] for base in node.bases}
                self._bases[node.name] |= bases
            if name := _defined(node):
                for owner in within:
                    owner.add(name)
            self._read(node, within)

    def missing(self, text: str) -> Iterator[str]:
        """References in ``text`` to what does not exist."""
        for owner, name in _MEMBER.findall(text):
            if owner in self._members and name not in self._all_members(owner):
                yield f"{owner}.{name}"
        for dotted in _DOTTED.findall(text):
            if not self._exists(dotted):
                yield dotted
        for name in _RUN.findall(text):
            if not ({name, f"{name}.__main__"} & self._modules.keys()):
                yield f"python -m {name}"
        yield from (path for path in _FILE.findall(text) if not (ROOT / path).exists())

    def _all_members(self, owner: str, seen: frozenset[str] = frozenset()) -> set[str]:
        bases = self._bases[owner] - seen
        return self._members[owner].union(
            *(self._all_members(base, seen | {owner}) for base in bases)
        )

    def _exists(self, dotted: str) -> bool:
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            defined = self._modules.get(".".join(parts[:end]))
            if defined is not None:
                rest = parts[end:]
                return not rest or rest[0] in defined
        return (ROOT / "/".join(parts)).is_dir()


def _defined(node: ast.AST) -> str | None:
    """The name or attribute that a node assigns, defines or imports."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name
        case ast.Name(ctx=ast.Store()):
            return node.id
        case ast.Attribute(ctx=ast.Store()):
            return node.attr
        case ast.alias():
            return node.asname or node.name
    return None


@pytest.fixture(scope="module")
def known() -> Names:
    paths = (path for path in git_files("*.py") if path.relative_to(ROOT).parts[0] != "tests")
    return Names((_relative(path), path.read_text()) for path in paths)


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_what_is_called_by_name_exists(known: Names) -> None:
    wrong = {
        f"{_relative(path)}: {reference}"
        for path in git_files("*.py", "*.md")
        if path != Path(__file__)
        for reference in known.missing(path.read_text())
    }
    assert not wrong


def test_what_does_not_exist_is_found(known: Names) -> None:
    text = "See ``{}.no_such``, `engine.core.NoSuch`, `engine/no_such.py` and python -m demo.none."
    missing = list(known.missing(text.format("EngineCore")))
    assert missing == [
        "EngineCore.no_such",
        "engine.core.NoSuch",
        "python -m demo.none",
        "engine/no_such.py",
    ]
    fine = "``EngineCore.step``, `engine.core.EngineCore`, `engine/core.py`, python -m loadtest.cpu"
    assert not list(known.missing(fine))


def unknown_arguments(source: str) -> Iterator[str]:
    """Arguments that docstrings describe and the function, or the class's ``__init__``, lacks."""
    if "Args:" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        section = _ARGS.search(f"{ast.get_docstring(node) or ''}\n")
        known = _parameters(node)
        if section is None or known is None:
            continue
        for names in _ARG.findall(section[1]):
            described = {name.lstrip("*") for name in names.split(", ")}
            yield from (f"{node.name}({name})" for name in sorted(described - known))


def _parameters(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str] | None:
    """The parameters of a function or class; None: a class inherits them."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == "__init__":
                return _parameters(each)
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return None if node.bases else {each.id for each in fields if isinstance(each, ast.Name)}
    arguments = node.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg for each in (*listed, arguments.vararg, arguments.kwarg) if each is not None}


def test_described_arguments_exist() -> None:
    wrong = {
        f"{_relative(path)}: {name}"
        for path in git_files("*.py")
        for name in unknown_arguments(path.read_text())
    }
    assert not wrong
    text = 'def f(a, *, b):\n    """Do.\n\n    Args:\n        a, c: two.\n        b: one.\n    """'
    assert list(unknown_arguments(text)) == ["f(c)"]
