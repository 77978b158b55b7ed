"""Recipes by name: how a figure, a table or a set of numbers comes from inputs; and the analyses that recipes share.

    @recipe("mine", "table")
    def mine(inputs: Inputs, options: Options) -> Table: ...

A recipe with an analysis gets its result in place of the inputs. Recipes that ask one analysis of the same inputs with the same
options share one result, which is kept for the life of the process.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec
import pandas as pd

from scalinglab import expressions
from scalinglab.errors import ConfigError
from scalinglab.readers import read_runs
from scalinglab.tables import table_meta, table_names, table_path

Kind = Literal["figure", "table", "numbers"]
T = TypeVar("T")
EMBEDDED = "embedded:"
_OWN = "scalinglab_paper_recipes_"  # modules of users' recipe files


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a recipe: subclass it; a key that isn't a field is refused."""


@dataclass(frozen=True)
class Inputs:
    """What an artefact is made from: names as `read_runs` takes them, and the sha256 of every file behind them."""

    names: tuple[str, ...]
    digests: tuple[tuple[str, str], ...] = ()

    def runs(
        self, *, where: str | None = None, columns: dict[str, str] | None = None, params: Any = "backbone"
    ) -> pd.DataFrame:
        """All inputs as one run table."""
        return read_runs(list(self.names), where=where, columns=columns, params=params)

    def table(self, index: int = 0, *, where: str | None = None) -> pd.DataFrame:
        """One input as a plain table, rows that meet the condition.

        Raises
        ------
        ConfigError
            Not a CSV or Parquet file, or a condition that isn't one.
        """
        path = _file(self.names[index])
        try:
            frame = pd.read_parquet(path) if path.name.endswith(".parquet") else pd.read_csv(path)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{self.names[index]}: can't be read as a table ({error})") from None
        if where is None:
            return frame
        values = {str(c): frame[c].to_numpy() for c in frame.columns}
        missing = sorted(expressions.names(where) - set(values))
        if missing:
            raise ConfigError(
                f"{self.names[index]}: where = {where!r} needs a column {missing[0]!r}; there are {', '.join(values)}"
            )
        return frame[expressions.evaluate(where, values, what="condition")].reset_index(drop=True)

    def meta(self, index: int = 0) -> dict[str, Any]:
        """What NAME.meta.json says about an input; empty where there is none."""
        name = self.names[index]
        if name.startswith(EMBEDDED):
            return table_meta(name.removeprefix(EMBEDDED))
        beside = meta_file(Path(name))
        return dict(msgspec.json.decode(beside.read_bytes())) if beside.is_file() else {}


def meta_file(table: Path) -> Path:
    """Where the meta file of a table stands."""
    return table.with_name(f"{table.name.partition('.')[0]}.meta.json")


def in_tree(name: str, place: Path) -> str:
    """An embedded table's name as the file in data/tables of the tree around `place`, where that is another than the package's.

    In a copy or a worktree of a repository, with the package installed from elsewhere, the copy's own tables count. Any other name is
    left as it is.
    """
    if not name.startswith(EMBEDDED):
        return name
    table = name.removeprefix(EMBEDDED)
    for folder in place.resolve().parents:
        for ending in (".csv", ".csv.gz", ".parquet"):
            path = folder / "data" / "tables" / f"{table}{ending}"
            if path.is_file():
                same = table in table_names() and path.samefile(table_path(table))
                return name if same else str(path)
    return name


def _file(name: str) -> Path:
    return table_path(name.removeprefix(EMBEDDED)) if name.startswith(EMBEDDED) else Path(name)


@dataclass(frozen=True)
class Analysis(Generic[T]):
    """A costly result that several recipes show. `options` are those of its recipes' options that it reads."""

    name: str
    function: Callable[[Inputs, Any], T]
    options: type[Options]

    def asked(self, options: Options) -> Options:
        """The analysis's own options within those of a recipe."""
        return self.options(**{name: getattr(options, name) for name in self.options.__struct_fields__})

    def key(self, inputs: Inputs, options: Options) -> str:
        """Equal for artefacts that share one result."""
        asked = msgspec.json.encode(self.asked(options), order="sorted")
        return hashlib.sha256(repr((self.name, inputs)).encode() + asked).hexdigest()

    def of(self, inputs: Inputs, options: Options) -> T:
        """The result, made once."""
        key = self.key(inputs, options)
        if key not in _RESULTS:
            while len(_RESULTS) >= _KEPT:
                del _RESULTS[next(iter(_RESULTS))]
            _RESULTS[key] = self.function(inputs, self.asked(options))
        found: T = _RESULTS[key]
        return found


_RESULTS: dict[str, Any] = {}
_KEPT = 8


@dataclass(frozen=True)
class Recipe:
    """How one kind of artefact is made. `most` inputs at most; None is any number."""

    name: str
    kind: Kind
    function: Callable[..., Any]
    options: type[Options]
    analysis: Analysis[Any] | None
    most: int | None

    @property
    def summary(self) -> str:
        """First line of its docstring."""
        return (self.function.__doc__ or "").strip().partition("\n")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules whose code it is made by."""
        functions = [self.function, *([self.analysis.function] if self.analysis else [])]
        return tuple(dict.fromkeys(f.__module__ for f in functions))

    def make(self, inputs: Inputs, options: Options) -> Any:
        """A Figure, a Table or a list of Numbers."""
        return self.function(self.analysis.of(inputs, options) if self.analysis else inputs, options)


RECIPES: dict[str, Recipe] = {}


def recipe(
    name: str,
    kind: Kind,
    *,
    options: type[Options] = Options,
    analysis: Analysis[Any] | None = None,
    most: int | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function (inputs or the analysis's result, options) as the recipe `name`.

    Raises
    ------
    ConfigError
        Another function has this name.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        known = RECIPES.get(name)
        if known is not None and (known.function.__module__, known.function.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ConfigError(
                f"recipe {name!r} is registered twice ({known.function.__module__}, {function.__module__}); rename one"
            )
        RECIPES[name] = Recipe(name, kind, function, options, analysis, most)
        return function

    return register


def load_recipes(files: tuple[Path, ...]) -> None:
    """Register the package's recipes and those of a user's own Python files.

    Raises
    ------
    ConfigError
        A file is missing or fails when it is run.
    """
    importlib.import_module(
        "scalinglab.report.paper.recipes"
    )  # registers; by name, as no recipe's code rests on the others

    for file in files:
        name = own_module(file)
        if not file.is_file():
            raise ConfigError(f"recipes: {file} does not exist")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"recipes: {file} fails when it is run ({type(error).__name__}: {error})") from error


def own_module(file: Path) -> str:
    """Module name of a user's recipe file: one file, one module."""
    return _OWN + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]


def find(name: str) -> Recipe:
    """The recipe of this name.

    Raises
    ------
    ConfigError
        There is none; lists those there are.
    """
    if name not in RECIPES:
        import difflib

        close = difflib.get_close_matches(name, RECIPES, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ConfigError(f"there is no recipe {name!r}{hint}; known: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]
