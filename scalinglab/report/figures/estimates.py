"""Forest of the estimates: do another estimator or another error unit tell another story?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.report import style
from scalinglab.report.registry import figure

if TYPE_CHECKING:
    from scalinglab.fitting import Fit
    from scalinglab.uncertainty import Resampling

_MOST_ROWS = 2500  # the row-wise jackknife refits once per row


@figure("forest")
def forest(fit: Fit, *, level: float = 0.95, width: style.Width = "column") -> Figure:
    """Parameters by estimator, as differences from the fit in its own standard errors, with intervals.

    Rows of a parameter: the fit with its jackknife by run; the robust (or, for a robust fit, the Gaussian) estimator with
    its jackknife by run; and the fit with a jackknife by row, which takes checkpoints for independent runs and is there
    to show what that would claim.

    Raises
    ------
    ConfigError
        The law is outside the algebra, so that it can't be refitted in a batch.
    """
    from scalinglab import uncertainty
    from scalinglab.objectives import Gaussian, Robust

    if not fit.law.in_algebra:
        raise ConfigError(
            f"forest: law {fit.law.key!r} is outside the algebra and can't be refitted under another estimator"
        )
    base = fit.jackknife
    names = [n for n in fit.params.index if fit.encoding.slots[n].position is not None and base.se[n] > 0]
    other = Gaussian() if isinstance(fit.estimator, Robust) else Robust()
    again = fit.refit(estimator=other)
    swapped = replace(
        fit, estimator=other, params=again.params.iloc[0], objective=float(again.objective[0]),
        theta=fit.encoding.internal(dict(again.params.iloc[0])),
    )  # fmt: skip
    series: list[tuple[str, pd.Series, Resampling]] = [
        (f"{fit.estimator.label}, by run", fit.params, base),
        (f"{other.label}, by run", swapped.params, uncertainty.jackknife(swapped)),
    ]
    rowwise = ""
    if len(fit.runs) > fit.n_runs:
        if len(fit.runs) <= _MOST_ROWS:
            rowwise = " By row takes checkpoints for independent runs, which they are not."
            series.append((f"{fit.estimator.label}, by row", fit.params, uncertainty.jackknife(fit, unit="row")))
        else:
            rowwise = f" No row-wise intervals: more than {_MOST_ROWS} rows."
    made = style.new_figure(width, 0.75 + 0.115 * len(names) * (len(series) + 0.8))
    ax = made.add_subplot()
    clipped = False
    for s, (label, estimates, resampling) in enumerate(series):
        limits = resampling.conf_int(level)
        height = np.arange(len(names)) + (s - (len(series) - 1) / 2) * 0.24
        unit = base.se[names].to_numpy()
        x = (estimates[names].to_numpy() - fit.params[names].to_numpy()) / unit
        low, high = ((limits.loc[names, c].to_numpy() - fit.params[names].to_numpy()) / unit for c in ("low", "high"))
        colour = style.colour_of(s)
        ax.hlines(height, np.clip(low, -8, 8), np.clip(high, -8, 8), color=colour, lw=1.1)
        ax.plot(np.clip(x, -8, 8), height, ls="", marker=style.MARKERS[s], ms=3.4, color=colour, label=label)
        clipped |= bool((np.abs(np.concatenate([low, high, x])) > 8).any())
    ax.axvline(0, color=style.GREY, lw=0.5, zorder=0)
    ax.set_yticks(np.arange(len(names)), [f"{style.symbol(n)} = {style.number(float(fit.params[n]))}" for n in names])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel("Difference from the fit (its standard errors)")
    made.legend(loc="outside upper left", ncols=1 if style.inches(width) < 5 else 3, handlelength=1.0)
    note = " Cut at 8 standard errors." if clipped else ""
    style.footnote(made, f"{100 * level:g}\u00a0% delete-one jackknife; amplitudes on the log scale.{note}{rowwise}")
    return made
