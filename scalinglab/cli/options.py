"""What several verbs share: the reading options, checks of what was asked, and how the command line talks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from scalinglab.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

    from scalinglab.fitting import Fit

Runs = Annotated[tuple[str, ...], tyro.conf.Positional]
Pairs = tuple[str, ...]
Convention = Literal["backbone", "total", "as given"]
TABLES = (".csv", ".csv.gz", ".parquet")


def read(
    source: Any,
    columns: dict[str, str],
    where: str | None,
    params: Any,
    key: tuple[str, ...] = (),
    torn: Literal["error", "drop"] = "error",
    encoding: str = "utf-8",
) -> pd.DataFrame:
    """A run table from what the user named; what was mapped is shown."""
    from scalinglab.readers import describe_mapping, read_runs

    if not source or (not isinstance(source, str) and not all(s.strip() for s in source)):
        raise ConfigError("no run log is given (or its name is empty): write a file, a folder or embedded:NAME")
    table = read_runs(source, columns=columns, where=where, params=params, key=key, torn=torn, encoding=encoding)
    say(describe_mapping(table))
    return table


def check_out(out: Path | None, suffixes: tuple[str, ...], inputs: Sequence[str] | str) -> None:
    """Refuse an output that can't be written or would overwrite an input, before any work is done."""
    if out is None:
        return
    if not out.name.endswith(suffixes):
        raise ConfigError(f"--out {out}: the name must end in {' or '.join(suffixes)}")
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder; name a file in it")
    for given in [inputs] if isinstance(inputs, str) else inputs:
        if out.exists() and Path(given).exists() and out.samefile(given):
            raise ConfigError(f"--out {out} is also the input; give another name")
    check_folder(out.parent, "--out")


def say_written(out: Path, written: Sequence[Path], skipped: Mapping[str, str]) -> None:
    """Name the files of a report in its folder, and the figures that it can't have."""
    for path in written:
        say(f"wrote {path}")
    for name, why in skipped.items():
        say(f"no figure {name}: {why}")
    say(f"wrote {out / 'result.json'}")


def check_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder below a file, before any work is done."""
    for place in (folder, *folder.parents):
        if place.exists():
            if not place.is_dir():
                raise ConfigError(f"{option}: {place} is a file, so nothing can be written below it")
            return


def check_level(level: float) -> None:
    """Refuse a level outside (0, 1)."""
    if not 0 < level < 1:
        raise ConfigError(f"--level {level:g}: give a number between 0 and 1, such as 0.95")


def pairs(given: Pairs, option: str) -> dict[str, str]:
    """name=value texts of an option as a dict."""
    out = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (sign and name.strip() and value.strip()):
            raise ConfigError(f"{option} {text!r}: write name=value, e.g. {option} params=size_M*1e6")
        out[name.strip()] = value.strip()
    return out


def numbers(given: Pairs, option: str) -> dict[str, float]:
    """name=number texts of an option as a dict."""
    out = {}
    for name, value in pairs(given, option).items():
        try:
            out[name] = float(value)
        except ValueError:
            raise ConfigError(f"{option} {name}={value!r} is not a number") from None
    return out


def draw_all(made: Fit, folder: Path, names: Sequence[str] = (), formats: Sequence[str] = ("png", "pdf")) -> list[Path]:
    """Draw a fit's figures into a folder; says what was written and which don't suit, and returns the files."""
    need_matplotlib()
    from scalinglab.report.drawing import draw

    say("drawing figures")
    drawn, skipped = draw(made, folder, names=names, formats=formats)
    for path in drawn:
        say(f"wrote {path}")
    for name, why in skipped.items():
        say(f"no figure {name}: {why}")
    return drawn


def draw_named(name: str, result: Any, folder: Path) -> None:
    """Draw one figure of a result that isn't a fit, as PNG."""
    need_matplotlib()
    from scalinglab.report.figures import FIGURES, save_figure

    folder.mkdir(parents=True, exist_ok=True)
    say(f"wrote {save_figure(FIGURES[name](result), folder / f'{name}.png')}")


def need_matplotlib() -> None:
    """Say how to get matplotlib where it is missing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ConfigError("figures need matplotlib: pip install 'scalinglab[plot]'")


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table, its index as columns where it has a name."""
    from scalinglab.tables import write_table

    write_table(table if table.index.name is None else table.reset_index(), path)
    say(f"wrote {path}")


def say(text: str) -> None:
    """A line on stderr: stdout is for results."""
    print(text, file=sys.stderr)
