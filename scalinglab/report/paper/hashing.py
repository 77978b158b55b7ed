"""What an artefact rests on, as sha256: files, entries, and the code that makes it.

Code is the recipe's module and every module of this package that it reaches by imports, without comments, blank lines and
docstrings: a change in the trainer, or of a comment, makes no figure of a fit stale.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from scalinglab.errors import ConfigError

_PACKAGE = "scalinglab"
_ROOT = Path(__file__).resolve().parents[2]  # the package's folder


def file_digest(path: Path) -> str:
    """sha256 of a file, or of the names and contents of a folder; "" where there is neither."""
    if path.is_dir():
        parts = [
            (str(p.relative_to(path)), file_digest(p))
            for p in sorted(path.rglob("*"))
            if p.is_file() and not _hidden(p, path)
        ]
        return value_digest(parts)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def value_digest(value: Any) -> str:
    """sha256 of plain data; the order of keys doesn't matter."""
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()


def code_digest(modules: tuple[str, ...], own: dict[str, Path]) -> str:
    """sha256 of the code of some modules and all of this package that they import. own: modules of users' recipe files."""
    found: dict[str, str] = {}
    left = list(modules)
    while left:
        name = left.pop()
        if name in found:
            continue
        path = own.get(name) or module_file(name)
        if path is None:
            continue
        text, imports = _code(path, path.stat().st_mtime_ns)
        found["own:" + path.name if name in own else name] = hashlib.sha256(text.encode()).hexdigest()
        left += imports
    return value_digest(found)


@cache
def module_file(name: str) -> Path | None:
    """Source of a module of this package; None for others."""
    if name.split(".")[0] != _PACKAGE:
        return None
    place = _ROOT.joinpath(*name.split(".")[1:])
    for path in (place.with_suffix(".py"), place / "__init__.py") if name != _PACKAGE else (_ROOT / "__init__.py",):
        if path.is_file():
            return path
    return None


@cache
def _code(path: Path, changed: int) -> tuple[str, list[str]]:
    """Code without comments and docstrings, and the modules of this package that it imports. changed: part of the key."""
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not Python ({error.msg})") from None
    return _bare(text, tree), sorted(_imports(tree))


def _bare(text: str, tree: ast.Module) -> str:
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docs |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = (line.rstrip() for i, line in enumerate(text.splitlines(), 1) if i not in docs)
    return "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))


def _imports(tree: ast.AST) -> set[str]:
    """Modules of this package that the code imports, anywhere but for type checking."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == _PACKAGE}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == _PACKAGE:
            for a in (
                node.names
            ):  # a package's __init__ counts where a name is taken from it, not where it is passed through
                home = f"{node.module}.{a.name}"
                if not module_file(home):
                    home = (
                        f"{_PACKAGE}.{_homes()[a.name]}"
                        if node.module == _PACKAGE and a.name in _homes()
                        else node.module
                    )
                found.add(home)
        else:
            found |= _imports(node)
    return found


@cache
def _homes() -> dict[str, str]:
    """Modules behind the names that the package loads on first use."""
    return dict(vars(importlib.import_module(_PACKAGE)).get("_MODULE_OF", {}))
