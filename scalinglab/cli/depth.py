"""The verb `depth`: does depth help? From run logs to labels, tables, figures and one page of HTML."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from scalinglab.cli.options import Convention, Pairs, Runs, check_folder, need_matplotlib, pairs, read, say, say_written
from scalinglab.errors import ConfigError


def depth(
    runs: Runs,
    /,
    out: Path | None = None,
    prereg: Path | None = None,
    reference: str | None = None,
    group: str | None = None,
    where: str | None = None,
    estimand: Literal["E1", "E1s", "E2"] | None = None,
    shallow: float | None = None,
    deep: float | None = None,
    hold: Literal["backbone", "total"] | None = None,
    method: Literal["auto", "cells", "pairs", "law"] = "auto",
    rates: Literal["own", "published"] = "own",
    margin: float | None = None,
    alpha: float | None = None,
    flops: Literal["6n", "causal", "full"] | None = None,
    test: Literal["t", "sign_flip"] = "t",
    law: str = "shape",
    checkpoints: Literal["final", "wsd"] = "final",
    charge_extras: bool = False,
    recipe: str | None = None,
    diverged_above: float | None = None,
    reanalyse: bool = True,
    draws: int = 1999,
    seed: int = 0,
    columns: Pairs = (),
    params: Convention = "backbone",
    key: tuple[str, ...] = (),
    encoding: str = "utf-8",
    formats: tuple[Literal["png", "svg", "pdf"], ...] = ("png", "svg"),
) -> int:
    """Does depth help at equal size and data, for which architecture, and what can the runs bear?

    scalinglab depth embedded:depthbench --out report
    scalinglab depth runs.csv --prereg prereg.toml --out report

    Exit code 1: some architecture's label says that the design bears no claim (its code is in the summary).

    Args:
        runs: Log files or folders (CSV, JSONL, Parquet, W&B, ...), or embedded:NAME.
        out: Folder for report.html, result.json, tables and figures.
        prereg: Preregistration (TOML): its keys become options that aren't given; departures are listed.
        reference: Architecture that others are compared with; pre_ln where it is there.
        group: Value of match_group to analyse.
        where: Condition on rows: "eval_dataset == 'c4'".
        estimand: What the labels are about: E1 gap at equal N and D, E1s slope, E2 gap at equal FLOPs.
        shallow: Depth of the shallow shape; by default the shallowest that all have.
        deep: Depth of the deep shape.
        hold: Which N is held equal, backbone (default) or total.
        method: cells, pairs, law, or auto by the design.
        rates: Exchange rates for corrections: of the law on these runs (own), or published.
        margin: Of equivalence, as relative compute; 0.05 is 5 %.
        alpha: Size of the tests, 0.05.
        flops: Convention of FLOPs for E2: 6n, causal (default), full.
        test: t, or sign_flip for pairs.
        law: The law for rates and effects.
        checkpoints: final rows, or wsd: all rows, declared to be annealed.
        charge_extras: Charge architectures with the parameters they add.
        recipe: Value of parametrization that labels rest on; by default each architecture's better one.
        diverged_above: Loss from which a run counts as diverged.
        reanalyse: Repeat the analysis under other choices.
        draws: Of the parametric bootstrap.
        seed: Of the random numbers.
        columns: Column mapping: loss=val_bits*log(2) params=size_M*1e6.
        params: Which N the column params is.
        key: Columns that tell rows of one run and step apart.
        encoding: Of text files, e.g. latin-1.
        formats: Of the figure files.
    """
    if prereg is not None and not prereg.exists():
        raise ConfigError(f"--prereg {prereg}: there is no such file")
    if out is not None:
        need_matplotlib()
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out {out} is a file; name a folder")
        check_folder(out)
    table = read(list(runs), pairs(columns, "--columns"), None, params, key, encoding=encoding)
    from scalinglab.depth_benefit import depth_benefit

    report = depth_benefit(
        table, reference=reference, group=group, where=where, estimand=estimand, shallow=shallow, deep=deep, params=hold,
        method=method, rates=rates, margin=margin, alpha=alpha, flops=flops, test=test, law=law, checkpoints=checkpoints,
        charge_extras=charge_extras, recipe=recipe, diverged_above=diverged_above, reanalyse=reanalyse, draws=draws, rng=seed, prereg=prereg,
    )  # fmt: skip
    print(report.summary())
    if out is not None:
        from scalinglab.report.html import save_report

        say("drawing the report")
        with _uncollected():
            written, skipped = save_report(report, out, formats=formats)
        say_written(out, written, skipped)
    return 0 if all(v.label == v.reading for v in report.verdicts.values()) else 1


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic collector: figures are many small objects that live to the end, and looking through them again and
    again costs a tenth of the drawing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
