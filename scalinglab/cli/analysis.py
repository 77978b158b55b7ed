"""Verbs that read runs or a saved fit: fit, compare, frontier, audit, figure, table, laws, import, cite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from scalinglab.cli.options import (
    TABLES,
    Convention,
    Pairs,
    Runs,
    check_folder,
    check_level,
    check_out,
    draw_all,
    need_matplotlib,
    numbers,
    pairs,
    read,
    say,
    write_csv,
)
from scalinglab.errors import ConfigError


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
    encoding: str = "utf-8",
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
        encoding: Of text files, e.g. latin-1.
        seed: Seed of the search.
        level: Level of the intervals.
        out: Where the JSON record goes (default for question.toml: beside it).
        figures: Folder for the figures that suit the law, as PNG; `scalinglab figure` draws them as PDF or SVG too.
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
        source, held, mapping = list(runs), numbers(fixed, "--fixed"), pairs(columns, "--columns")
        shared = share[0] if len(share) == 1 and share[0] in ("H0", "H1", "H2", "H3", "H4") else share
    if not runs:
        raise ConfigError("no run log is given: scalinglab fit runs.csv --law chinchilla")
    if figures is not None:
        need_matplotlib()
    if law is None:
        raise ConfigError(
            "--law is missing: name one of `scalinglab laws`, e.g. --law chinchilla, or give a question.toml"
        )
    check_level(level)
    check_out(out, (".json",), source)
    if figures is not None:
        check_folder(figures)
    table = read(source, mapping, where, params, key, encoding=encoding)
    from scalinglab.fitting import fit as fit_law

    made = fit_law(law, table, objective=objective, by=by, share=shared, fixed=held, weights=weights, rng=seed)
    print(made.to_frame(level).to_string() if quiet else made.summary(level))
    if out is not None:
        made.save(out)
        say(f"wrote {out}")
    if figures is not None:
        draw_all(made, figures, formats=("png",))
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

    check_out(out, TABLES, runs)
    if runs and all(r.endswith(".json") for r in runs):
        fits = {Path(r).stem: Fit.load(r) for r in runs}
    else:
        table = read(list(runs), pairs(columns, "--columns"), where, params, key)
        fits = {}
        for name in laws:
            say(f"fitting {name}")
            fits[name] = fit_law(name, table, objective=objective, rng=seed)
    made = compare_fits(fits, rng=seed)
    print(made.summary())
    if out is not None:
        write_csv(made.to_frame(), out)
    return 0


def frontier(
    record: Annotated[Path, tyro.conf.Positional],
    /,
    flops: tuple[float, ...] = (1e19, 1e20, 1e21, 1e22),
    group: str | None = None,
    level: float = 0.95,
    out: Path | None = None,
) -> int:
    """Compute-optimal params, tokens and shape of a saved fit, with intervals.

    scalinglab frontier fits/shape.json --flops 1e20 1e21

    Args:
        record: A fit written by `scalinglab fit --out`.
        flops: Training budgets in FLOPs (forward and backward).
        group: One level of the column that the fit is by; all levels otherwise.
        level: Level of the intervals.
        out: Write the table as CSV.
    """
    from scalinglab.fitting import Fit
    from scalinglab.frontier import optimal

    check_out(out, TABLES, [str(record)])
    fit = Fit.load(record)
    groups: Sequence[str | None] = fit.law.levels if fit.law.levels and group is None else (group,)
    tables = []
    for name in groups:
        made = optimal(fit, flops=flops, level=level, group=name)
        print(made.summary() if name is None else f"{name}: {made.summary()}")
        tables.append(made.to_frame() if name is None else made.to_frame().assign(group=name))
    if out is not None:
        import pandas as pd

        write_csv(pd.concat(tables, ignore_index=True), out)
    return 0 if fit.status in ("converged", "at_bound") else 1


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

    made = audit_runs(read(list(runs), pairs(columns, "--columns"), where, params, key), law=law, sigma=sigma)
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
    check_folder(out)
    from scalinglab.fitting import Fit

    drawn = draw_all(Fit.load(record), out, names, formats)
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
    encoding: str = "utf-8",
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
        encoding: Of text files, e.g. latin-1.
    """
    check_out(out, TABLES, runs)
    table = read(list(runs), pairs(columns, "--columns"), where, params, key, torn, encoding)
    from scalinglab.tables import write_table

    write_table(table, out)
    say(f"wrote {len(table):,} rows to {out}")
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
