"""The verb misscaling: are deep models merely mis-scaled?"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scalinglab.cli.options import Convention, Pairs, Runs, check_folder, need_matplotlib, pairs, read, say, say_written
from scalinglab.errors import ConfigError


def misscaling(
    runs: Runs,
    /,
    out: Path | None = None,
    reference: str = "pre_ln",
    naive: str = "sp",
    scaled: tuple[str, ...] = ("native", "completep"),
    checks: tuple[Path, ...] = (),
    choose_on: tuple[int, ...] = (),
    diverged_above: float | None = None,
    model: str = "shared",
    window: float = 0.07,
    sides: int = 2,
    tau: float | None = None,
    margin: float = 0.012,
    drift_margin: float = 0.2,
    draws: int = 1999,
    where: str | None = None,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    seed: int = 0,
    formats: tuple[Literal["png", "svg", "pdf"], ...] = ("png", "svg"),
) -> int:
    """Is the depth gain of an architecture real, or was the reference mis-scaled? Learning-rate sweeps decide.

    scalinglab misscaling runs --out report

    Exit code 1: the runs can't answer (no learning rates, no contrast between arms, or arms that are not paired).

    Args:
        runs: Folder of the trainer, log files, or embedded:NAME: sweeps over the learning rate at several depths.
        out: Folder for report.html, result.json, summary.txt, tables and figures.
        reference: Architecture whose scaling is in question.
        naive: Parametrization that does not scale with depth.
        scaled: Parametrizations that do, in order of preference.
        checks: Coordinate checks (JSON of `scalinglab coords`); a scaled arm that failed is refused.
        choose_on: Seeds on which the reference's best scaled parametrization is chosen; they are then left out.
        diverged_above: Loss from which a run counts as diverged.
        model: Curve in ln learning rate: shared (one cubic term per arm), cubic, quadratic.
        window: Nats above the best within which it is fitted.
        sides: Learning rates needed on each side of the best.
        tau: Standard deviation of shapes about a line, nats; estimated by default.
        margin: Of depth gains, nats per e-fold of depth.
        drift_margin: Of the drift, ln learning rate per ln depth.
        draws: Of the bootstrap.
        where: Condition on rows.
        columns: Column mapping.
        params: Which N the column params is.
        key: Columns that tell rows apart.
        seed: Seed of the bootstrap.
        formats: Of the figure files.
    """
    from scalinglab.coordinates import CoordinateCheck
    from scalinglab.misscaling import Margins, Method
    from scalinglab.misscaling import misscaling as judge

    if out is not None:
        check_folder(out)
        need_matplotlib()
    if model not in ("shared", "cubic", "quadratic"):
        raise ConfigError(f"--model {model}: choose shared, cubic or quadratic")
    table = read(list(runs), pairs(columns, "--columns"), where, params, key)
    report = judge(
        table, reference=reference, naive=naive, scaled=scaled, checks=[CoordinateCheck.load(c) for c in checks],
        choose_on=choose_on, diverged_above=diverged_above, margins=Margins(gain=margin, drift=drift_margin),
        method=Method(model=model, window=window, sides=sides, draws=draws, tau=tau), rng=seed,  # type: ignore[arg-type]
    )  # fmt: skip
    print(report.summary())
    if out is not None:
        from scalinglab.report.html.misscaling import save_page

        say("drawing the report")
        written, skipped = save_page(report, out, formats=formats)
        say_written(out, written, skipped)
    answered = report.analysis is not None and bool(report.analysis.gains) and report.grids.paired is not False
    return 0 if answered else 1
