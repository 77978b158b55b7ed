"""What a test returns: one frozen record that says in words what was decided, by which method, and what it cannot decide."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.uncertainty import t_quantile

Array = NDArray[np.float64]
Alternative = Literal["two-sided", "less", "greater"]

UNTESTABLE = "UNTESTABLE_N"


@dataclass(frozen=True)
class HypothesisTest:
    """Outcome of one test.

    Attributes
    ----------
    name, null
        What was tested, and the hypothesis that a small p speaks against.
    p_value, alpha
        The p-value and the size that it is held against.
    decision
        The outcome in words. A p above `alpha` is "unresolved", never the absence of an effect.
    statistic, df
        Test statistic and its degrees of freedom (none for permutations).
    estimate, interval, level, unit
        Effect with its confidence interval of `level`; NaN where the test has no single effect.
    method
        How the p-value was made, for tables.
    n_runs
        Independent runs behind it.
    p_min
        Smallest p that the design can give. Above `alpha` the test is no test: `rejected` is None and `codes` says
        UNTESTABLE_N.
    codes
        Stable strings for tables and programs.
    assumptions
        What the p-value stands on.
    diagnostics
        Numbers that speak for or against the assumptions.
    """

    name: str
    null: str
    p_value: float
    decision: str
    alpha: float = 0.05
    statistic: float = math.nan
    df: tuple[float, ...] = ()
    estimate: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    level: float = 0.95
    unit: str = ""
    method: str = ""
    n_runs: int = 0
    p_min: float = 0.0
    codes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    diagnostics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def testable(self) -> bool:
        """Whether the design can reach `alpha` at all."""
        return self.p_min <= self.alpha

    @property
    def rejected(self) -> bool | None:
        """Whether p is at most `alpha`; None where that could not happen or no p-value exists."""
        return bool(self.p_value <= self.alpha) if self.testable and math.isfinite(self.p_value) else None

    def summary(self) -> str:
        """The test as text: decision, effect, statistic, assumptions, diagnostics."""
        lines = [self.name, f"  null: {self.null}", f"  {self.decision}"]
        if math.isfinite(self.estimate):
            low, high = self.interval
            unit = f" {self.unit}" if self.unit else ""
            lines.append(
                f"  estimate {self.estimate:.4g}{unit}, {100 * self.level:g} % interval [{low:.4g}, {high:.4g}]"
            )
        df = f"({', '.join(f'{v:.4g}' for v in self.df)})" if self.df else ""
        told = f"statistic{df} = {self.statistic:.4g}, " if math.isfinite(self.statistic) else ""
        lines.append(f"  {told}p = {self.p_value:.3g} ({self.method}; {self.n_runs} runs)")
        lines += [f"  assumes: {text}" for text in self.assumptions]
        lines += [f"  {key}: {_told(value)}" for key, value in self.diagnostics.items()]
        if self.codes:
            lines.append(f"  codes: {', '.join(self.codes)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON. Numbers that JSON lacks become null and are named, with their value, under `warnings`."""
        warnings: list[dict[str, str]] = []
        names = list(self.__dataclass_fields__)
        out = {name: _plain(getattr(self, name), name, warnings) for name in names}
        return {**out, "rejected": self.rejected, "warnings": warnings}

    def to_json(self) -> str:
        """The test as one JSON document."""
        return json.dumps(self.to_dict(), allow_nan=False, ensure_ascii=False)

    def __repr__(self) -> str:
        return f"<HypothesisTest {self.name}: p = {self.p_value:.3g}; {self.decision}>"


def decide(p: float, alpha: float, *, found: str, unresolved: str, p_min: float = 0.0) -> str:
    """Decision in words: `found` when p <= alpha; else "unresolved" with what `unresolved` adds, or that no p could do."""
    if p_min > alpha:
        return f"untestable: the smallest p that this design can give is {p_min:.3g}, above {alpha:g}; add runs"
    if not math.isfinite(p):
        return f"unresolved: no p-value ({unresolved})"
    return found if p <= alpha else f"unresolved at {alpha:g}: {unresolved}"


def t_test(
    name: str,
    estimate: float,
    se: float,
    df: float,
    *,
    null: str,
    found: str,
    level: float = 0.95,
    alternative: Alternative = "two-sided",
    unit: str = "nats",
    method: str = "t",
    n_runs: int = 0,
    assumptions: tuple[str, ...] = (),
    diagnostics: Mapping[str, Any] | None = None,
    codes: tuple[str, ...] = (),
) -> HypothesisTest:
    """Test that an estimate with standard error `se` on `df` degrees of freedom is 0.

    The interval is two-sided at `level` whatever the alternative; an unresolved outcome names the smallest effect that the
    test would find with power .8.

    Raises
    ------
    ConfigError
        se not positive, df below 1, or an estimate that is not finite.
    """
    from scipy.special import stdtr

    from scalinglab.detection import detectable

    check_level(level)
    if not (math.isfinite(estimate) and math.isfinite(se) and se > 0 and df >= 1):
        raise ConfigError(
            f"{name}: estimate {estimate:g}, standard error {se:g}, df {df:g} make no t test; more runs are needed"
        )
    t = estimate / se
    tail = {"two-sided": 2 * stdtr(df, -abs(t)), "less": stdtr(df, t), "greater": stdtr(df, -t)}
    if alternative not in tail:
        raise ConfigError(f"alternative {alternative!r} is not known: use two-sided, less or greater")
    p = float(tail[alternative])
    alpha = 1 - level
    half = t_quantile(0.5 + level / 2, df) * se
    mde = detectable(se, df, level=alpha if alternative == "two-sided" else min(2 * alpha, 0.999))
    return HypothesisTest(
        name, null, p, decide(p, alpha, found=found, unresolved=f"effects below {mde:.3g} {unit} (power .8) can be missed"),
        alpha, t, (float(df),), estimate, (estimate - half, estimate + half), level, unit, f"{method}, {alternative}", n_runs,
        0.0, codes, assumptions, {"se": se, "mde80": mde, **(diagnostics or {})},
    )  # fmt: skip


def check_level(level: float) -> None:
    """Raise ConfigError unless a confidence level lies between 0 and 1."""
    if not 0 < level < 1:
        raise ConfigError(f"level is {level!r}: give a confidence level between 0 and 1, e.g. 0.95")


def numbers(values: Any, name: str, *, least: int = 1) -> Array:
    """A one-dimensional array of at least `least` finite numbers.

    Raises
    ------
    ConfigError
        Another shape, too few, or values that are not finite.
    """
    out = np.asarray(values, dtype=np.float64)
    if out.ndim != 1 or not np.isfinite(out).all():
        raise ConfigError(
            f"{name} must be a one-dimensional array of finite numbers; diverged runs need their own analysis"
        )
    if len(out) < least:
        raise ConfigError(f"{name} has {len(out)} values; at least {least} are needed")
    return out


def _told(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_told(v)}" for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(map(_told, value))
    return str(value)


def _plain(value: Any, where: str, warnings: list[dict[str, str]]) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}", warnings) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v, f"{where}[{i}]", warnings) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        warnings.append({"code": "NOT_FINITE", "field": where, "value": str(value)})
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
