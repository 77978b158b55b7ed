"""The gap between two shapes: t tests of the depth benefit on the seeds of a shallow and a deep model."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.hypotheses.result import Alternative, HypothesisTest, numbers, t_test

Array = NDArray[np.float64]


def gap_test(
    shallow: Array,
    deep: Array,
    *,
    paired: bool = False,
    level: float = 0.95,
    alternative: Alternative = "two-sided",
) -> HypothesisTest:
    """t test of the depth benefit B = mean loss(shallow) - mean loss(deep); positive when deeper is better.

    paired : element i of both arms shares data order and seed index. Otherwise Welch's test. Seeds of two shapes only: it
    speaks about these two shapes, not about depth in general.

    Raises
    ------
    ConfigError
        Fewer than two runs in an arm, unequal lengths when paired, or no variation.
    """
    from scipy import stats

    a, b = numbers(shallow, "shallow", least=2), numbers(deep, "deep", least=2)
    extra: dict[str, object] = {}
    if paired:
        if len(a) != len(b):
            raise ConfigError(f"{len(a)} shallow and {len(b)} deep runs are no pairs; use paired=False")
        d = a - b
        se, df, how = float(d.std(ddof=1) / math.sqrt(len(d))), float(len(d) - 1), "paired t"
        if len(d) > 3 and a.std() > 0 and b.std() > 0:
            r = float(np.corrcoef(a, b)[0, 1])
            z, wide = math.atanh(min(max(r, -0.999999), 0.999999)), 1.6449 / math.sqrt(len(d) - 3)
            extra["pair correlation"] = r
            extra["pair correlation, 90 % interval"] = (math.tanh(z - wide), math.tanh(z + wide))
    else:
        va, vb = float(a.var(ddof=1)) / len(a), float(b.var(ddof=1)) / len(b)
        se, how = math.sqrt(va + vb), "Welch t"
        df = float(stats.ttest_ind(a, b, equal_var=False).df) if se > 0 else 0.0
    estimate = float(a.mean() - b.mean())
    if not se > 1e-12 * max(abs(a.mean()), 1e-300):
        raise ConfigError(
            "the runs of an arm do not differ: there is no error to test against; are these copies of one run?"
        )
    return t_test(
        "depth gap", estimate, se, df, null="both shapes have the same expected loss",
        found=f"the {'deeper' if estimate > 0 else 'shallower'} shape has the lower loss", level=level, alternative=alternative,
        method=how, n_runs=len(a) + len(b),
        assumptions=("independent normal seeds" if not paired else "independent normal pair differences",
                     "speaks about these two shapes: misfit of a shape is not in the error"),
        diagnostics=extra,
    )  # fmt: skip
