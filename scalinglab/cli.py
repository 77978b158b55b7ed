"""The command line: each verb is a few lines over a function of the package.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 done; 1 done, but the result is not to be used as it is
(no certified optimum, not identified, or an audit that blocks); 2 the input or the request can't be used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from scalinglab.errors import ConfigError, ScalinglabError, ScalinglabWarning

if TYPE_CHECKING:
    import pandas as pd

    from scalinglab.fitting import Fit

Runs = Annotated[tuple[str, ...], tyro.conf.Positional]
Pairs = tuple[str, ...]
Convention = Literal["backbone", "total", "as given"]


def fit(
    runs: Runs,
    /,
    law: str | None = None,
    objective: str = "gaussian",
    by: str | None = None,
    share: tuple[str, ...] = (),
    fixed: Pairs = (),
    weights: str | None = None,
    where: str | None = None,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    seed: int = 0,
    level: float = 0.95,
    out: Path | None = None,
    figures: Path | None = None,
    quiet: bool = False,
) -> int:
    """Fit a scaling law to run logs and print it with error bars.

    scalinglab fit runs.csv --law shape --out fits/shape.json
    scalinglab fit fits/question.toml

    Args:
        runs: Log files or folders (CSV, JSONL, Parquet, W&B, ...), embedded:NAME, or one question.toml.
        law: A law of `scalinglab laws`, or a formula such as "E + A*params**-alpha + B*tokens**-beta".
        objective: gaussian, robust, huber:1e-3, student; add ':loss' for raw loss.
        by: Column whose values get their own parameters, e.g. architecture.
        share: With --by, parameters that stay common, or one level H0..H4.
        fixed: Parameters held at a value: alpha=0.34.
        weights: Column of weights; loss_se weighs by inverse variance.
        where: Condition on rows: "phase == 'hot' and depth > 3".
        columns: Column mapping: loss=val_bits*log(2) params=size_M*1e6.
        params: Which N the column params is.
        key: Columns that tell rows of one run and step apart.
        seed: Seed of the search.
        level: Level of the intervals.
        out: Where the JSON record goes (default for question.toml: beside it).
        figures: Folder for the figures that suit the law (PNG and PDF).
        quiet: Print only the parameters.
    """
    if len(runs) == 1 and runs[0].endswith(".toml"):
        from scalinglab.questions import read_question

        asked = read_question(runs[0])
        source: Any = asked.runs
        law, objective, by, where, weights = asked.law, asked.objective, asked.by, asked.where, asked.weights
        shared: Any = asked.share
        held, mapping, params = dict(asked.fixed), dict(asked.columns), asked.params  # type: ignore[assignment]
        seed, level, key = asked.seed, asked.level, tuple(asked.key)
        out = out or Path(str(asked.out))
    else:
        source, held, mapping = list(runs), _numbers(fixed, "--fixed"), _pairs(columns, "--columns")
        shared = share[0] if len(share) == 1 and share[0] in ("H0", "H1", "H2", "H3", "H4") else share
    if not runs:
        raise ConfigError("no run log is given: scalinglab fit runs.csv --law chinchilla")
    if law is None:
        raise ConfigError(
            "--law is missing: name one of `scalinglab laws`, e.g. --law chinchilla, or give a question.toml"
        )
    table = _read(source, mapping, where, params, key)
    from scalinglab.fitting import fit as fit_law

    made = fit_law(law, table, objective=objective, by=by, share=shared, fixed=held, weights=weights, rng=seed)
    print(made.to_frame(level).to_string() if quiet else made.summary(level))
    if out is not None:
        made.save(out)
        _say(f"wrote {out}")
    if figures is not None:
        _draw_all(made, figures)
    return 0 if made.status in ("converged", "at_bound") else 1


def compare(
    runs: Runs,
    /,
    laws: tuple[str, ...] = ("chinchilla", "shape"),
    objective: str = "gaussian",
    where: str | None = None,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    seed: int = 0,
    out: Path | None = None,
) -> int:
    """Compare laws on the same runs: held-out runs, extrapolation, paired differences.

    scalinglab compare runs.csv --laws chinchilla shape width_depth

    Args:
        runs: Log files, folders or embedded:NAME; or saved fits (*.json) of the same runs.
        laws: Laws to compare.
        objective: gaussian, robust, huber:1e-3, student.
        where: Condition on rows.
        columns: Column mapping.
        params: Which N the column params is.
        key: Columns that tell rows apart.
        seed: Seed of the search and of the sign flips.
        out: Write the table as CSV.
    """
    from scalinglab.comparison import compare as compare_fits
    from scalinglab.fitting import Fit
    from scalinglab.fitting import fit as fit_law

    if all(r.endswith(".json") for r in runs):
        fits = {Path(r).stem: Fit.load(r) for r in runs}
    else:
        table = _read(list(runs), _pairs(columns, "--columns"), where, params, key)
        fits = {}
        for name in laws:
            _say(f"fitting {name}")
            fits[name] = fit_law(name, table, objective=objective, rng=seed)
    made = compare_fits(fits, rng=seed)
    print(made.summary())
    if out is not None:
        _write_csv(made.to_frame(), out)
    return 0


def frontier(
    record: Annotated[Path, tyro.conf.Positional],
    /,
    flops: tuple[float, ...] = (1e19, 1e20, 1e21, 1e22),
    level: float = 0.95,
    out: Path | None = None,
) -> int:
    """Compute-optimal params, tokens and shape of a saved fit, with intervals.

    scalinglab frontier fits/shape.json --flops 1e20 1e21

    Args:
        record: A fit written by `scalinglab fit --out`.
        flops: Training budgets in FLOPs (forward and backward).
        level: Level of the intervals.
        out: Write the table as CSV.
    """
    from scalinglab.fitting import Fit
    from scalinglab.frontier import optimal

    made = optimal(Fit.load(record), flops=flops, level=level)
    print(made.summary() if hasattr(made, "summary") else made.to_frame().to_string(index=False))
    if out is not None:
        _write_csv(made.to_frame(), out)
    return 0


def audit(
    runs: Runs,
    /,
    law: str | None = None,
    where: str | None = None,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    sigma: float | None = None,
) -> int:
    """What these runs can and can't answer, before any fit.

    scalinglab audit runs.csv

    Args:
        runs: Log files, folders or embedded:NAME.
        law: Judge the design for one law; all are tried otherwise.
        where: Condition on rows.
        columns: Column mapping.
        params: Which N the column params is.
        key: Columns that tell rows apart.
        sigma: Seed standard deviation of log loss, if you know it.
    """
    from scalinglab.design import audit as audit_runs

    made = audit_runs(_read(list(runs), _pairs(columns, "--columns"), where, params, key), law=law, sigma=sigma)
    print(made.summary())
    return 0


def figure(
    record: Annotated[Path, tyro.conf.Positional],
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    out: Path = Path("figures"),
    formats: tuple[Literal["png", "pdf", "svg"], ...] = ("png", "pdf"),
) -> int:
    """Draw figures of a saved fit: all that suit its law, or the named ones.

    scalinglab figure fits/shape.json shape_valley residuals --out figures

    Args:
        record: A fit written by `scalinglab fit --out`.
        names: Figures to draw; none means all.
        out: Folder.
        formats: File formats.
    """
    from scalinglab.fitting import Fit

    drawn = _draw_all(Fit.load(record), out, names, formats)
    return 0 if drawn else 1


def table(
    record: Annotated[Path, tyro.conf.Positional],
    /,
    form: Literal["markdown", "latex", "csv"] = "markdown",
    level: float = 0.95,
) -> int:
    """Parameter table of a saved fit, rounded by its standard errors, as Markdown, LaTeX or CSV.

    scalinglab table fits/shape.json --form latex

    Args:
        record: A fit written by `scalinglab fit --out`.
        form: Markup of the table.
        level: Level of the intervals.
    """
    from scalinglab.fitting import Fit
    from scalinglab.report import tables

    made = tables.parameter_table(Fit.load(record), level=level)
    write = {"markdown": tables.to_markdown, "latex": tables.to_latex, "csv": tables.to_csv}[form]
    print(write(made))
    return 0


def laws() -> int:
    """List the laws: formula, parameters, source.

    scalinglab laws
    """
    from scalinglab.laws import LAWS

    for law in LAWS.values():
        how = "" if law.in_algebra else " [lmfit]"
        print(f"{law.key} ({law.alias}){how}\n    loss = {law.formula}\n    parameters: {', '.join(law.names)}")
        if law.derived:
            print(f"    derived: {', '.join(f'{k} = {v}' for k, v in law.derived.items())}")
        if law.note:
            print(f"    note: {law.note}")
        print(f"    source: {law.source}")
    return 0


def import_(
    runs: Runs,
    /,
    out: Path,
    where: str | None = None,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    torn: Literal["error", "drop"] = "error",
) -> int:
    """Turn any supported log into a run table (CSV or Parquet), and show what was mapped.

    scalinglab import wandb_export.csv --out data/tables/mine.csv

    Args:
        runs: Log files or folders.
        out: The table to write: .csv, .csv.gz or .parquet.
        where: Condition on rows.
        columns: Column mapping.
        params: Which N the column params is.
        key: Columns that tell rows apart.
        torn: What to do with a last JSON line that was cut off.
    """
    table = _read(list(runs), _pairs(columns, "--columns"), where, params, key, torn)
    from scalinglab.tables import write_table

    write_table(table, out)
    _say(f"wrote {len(table):,} rows to {out}")
    return 0


def cite() -> int:
    """Print how to cite scalinglab and the sources of its laws.

    scalinglab cite
    """
    from scalinglab import __version__
    from scalinglab.laws import LAWS

    print(f"scalinglab {__version__}: shape-aware scaling laws with honest error bars. MIT licence.")
    print("@software{scalinglab, title={scalinglab}, version={" + __version__ + "}, year={2026}}\n")
    for law in LAWS.values():
        print(f"{law.key}: {law.source}")
    return 0


VERBS: dict[str, Callable[..., Any]] = {
    "fit": fit,
    "compare": compare,
    "frontier": frontier,
    "audit": audit,
    "figure": figure,
    "table": table,
    "laws": laws,
    "import": import_,
    "cite": cite,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command `scalinglab`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        from scalinglab import __version__

        print(f"scalinglab {__version__}")
        sys.exit(0)
    verb = args[0] if args and args[0] in VERBS else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = _show_warning
            if verb is not None:  # only the parser of the verb that is asked for is built
                code = tyro.cli(VERBS[verb], prog=f"scalinglab {verb}", args=args[1:])
            else:
                code = tyro.extras.subcommand_cli_from_dict(VERBS, prog="scalinglab", description=_ABOUT, args=args)
    except ScalinglabError as error:
        _say(f"error: {error}")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except KeyboardInterrupt:
        _say("stopped; nothing was written")
        sys.exit(130)
    sys.exit(code or 0)


_ABOUT = (
    "Shape-aware scaling laws with honest error bars. Exit codes: 0 done, 1 done but not to be used as it is "
    "(not certified or not identified), 2 the input can't be used."
)


def _read(
    source: Any,
    columns: dict[str, str],
    where: str | None,
    params: Any,
    key: tuple[str, ...] = (),
    torn: Literal["error", "drop"] = "error",
) -> pd.DataFrame:
    from scalinglab.readers import describe_mapping, read_runs

    table = read_runs(source, columns=columns, where=where, params=params, key=key, torn=torn)
    _say(describe_mapping(table))
    return table


def _pairs(given: Pairs, option: str) -> dict[str, str]:
    out = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not (sign and name.strip() and value.strip()):
            raise ConfigError(f"{option} {text!r}: write name=value, e.g. {option} params=size_M*1e6")
        out[name.strip()] = value.strip()
    return out


def _numbers(given: Pairs, option: str) -> dict[str, float]:
    out = {}
    for name, value in _pairs(given, option).items():
        try:
            out[name] = float(value)
        except ValueError:
            raise ConfigError(f"{option} {name}={value!r} is not a number") from None
    return out


def _draw_all(
    made: Fit, folder: Path, names: Sequence[str] = (), formats: Sequence[str] = ("png", "pdf")
) -> list[Path]:
    try:
        from scalinglab.report.drawing import draw
    except ModuleNotFoundError as error:
        raise ConfigError(f"figures need matplotlib ({error}): pip install 'scalinglab[plot]'") from None
    drawn, skipped = draw(made, folder, names=names, formats=formats)
    for path in drawn:
        _say(f"wrote {path}")
    for name, why in skipped.items():
        _say(f"no figure {name}: {why}")
    return drawn


def _write_csv(table: pd.DataFrame, path: Path) -> None:
    from scalinglab.tables import write_table

    write_table(table if table.index.name is None else table.reset_index(), path)
    _say(f"wrote {path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    name = "warning" if issubclass(category, ScalinglabWarning) else category.__name__
    _say(f"{name}: {message}")
