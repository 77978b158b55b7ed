"""The verb replicate: published numbers computed again, and the pooled cost of shape."""

from __future__ import annotations

from pathlib import Path

from scalinglab.cli.options import check_folder, need_matplotlib, read, say
from scalinglab.errors import ConfigError


def replicate(
    *, out: Path, data: Path | None = None, own: str | None = None, reference: str = "pre_ln", figures: bool = True
) -> int:
    """Published numbers beside ours, and what a wrong shape costs, pooled over public studies.

    scalinglab replicate --data logs --out report

    Args:
        out: Folder for replications.csv and .md, pooled.csv and .md, effects.csv and .md, result.json and figures.
        data: Folder of public run logs; what needs a file that is not there is listed as skipped.
        own: Runs of your own (folder of the trainer, log file, or embedded:NAME): one more study in the pooled estimate.
        reference: Architecture of your runs that enters the primary analysis.
        figures: Draw the forests too.
    """
    from scalinglab.replications import counted, pooled_shape, replications, save

    check_folder(out)
    if figures:
        need_matplotlib()
    runs = None if own is None else read([own], {}, None, "backbone")
    table = replications(data)
    for line in counted(table):
        say(line)
    skipped = table.loc[table["status"] != "done", "status"].value_counts()
    for why, count in skipped.items():
        say(f"{count:4d} {why}")
    pooled = pooled_shape(data, own=runs, reference=reference)
    print(pooled.summary())
    say(f"wrote {save(table, pooled, out) / 'result.json'}")
    if figures:
        from scalinglab.report.figures.replications import pooled_forest
        from scalinglab.report.registry import save_figure

        (out / "figures").mkdir(exist_ok=True)
        for quantity in ("penalty", "contrast", "optimum"):
            for width in ("column", "page"):
                try:
                    drawn = pooled_forest(pooled, quantity=quantity, width=width)
                except ConfigError as error:
                    say(f"no figure: {error}")
                    break
                say(f"wrote {save_figure(drawn, out / 'figures' / f'{quantity}_{width}.png')}")
    return 0
