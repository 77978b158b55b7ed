"""Coordinate checks as results: how each statistic of a network scales with width or depth in the first updates.

A statistic s of a network at size m (relative to the base shape) is taken to follow s = c m^k. The exponent k is fitted by
ordinary least squares to log2 s against log2 m, per seed; its mean over seeds has a t interval. `Limit` says which exponents
pass. The limits are data that travel with the result, so that nobody can move them after the numbers are known.

Sources: the procedure is that of Yang et al. 2022 (arXiv:2203.03466, appendix D.1) and Dey et al. 2025 (CompleteP,
arXiv:2505.01618); published checks are judged by eye, so the limits are ours. What is measured: `scalinglab.train.coordcheck`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.tables import write_atomically
from scalinglab.uncertainty import t_quantile

SCHEMA = "scalinglab/coords-1"
Array: TypeAlias = NDArray[np.float64]
Axis: TypeAlias = Literal["width", "depth"]
Trainable: TypeAlias = Literal["branch", "trunk", "all"]
Verdict: TypeAlias = Literal["pass", "fail", "more seeds"]
_EXACT = 1e-12  # a slope this close to a bound is the bound: identical seeds have an interval of width zero


@dataclass(frozen=True)
class Limit:
    """What the exponent of a statistic must be.

    Attributes
    ----------
    statistic : str
        A name, or a pattern with `*`.
    steps : {"initial", "updates"}
        Step 0, or each one after it.
    low, high : float
        Passed: the whole interval of the exponent lies between them.
    fail_below, fail_above : float
        Failed: beyond these. Between pass and fail more seeds (or a wider range of sizes) must decide.
    fail_by : {"estimate", "interval"}
        What must lie beyond: the mean over seeds, or the whole interval.
    why : str
    """

    statistic: str
    steps: Literal["initial", "updates"]
    low: float = -math.inf
    high: float = math.inf
    fail_below: float = -math.inf
    fail_above: float = math.inf
    fail_by: Literal["estimate", "interval"] = "estimate"
    why: str = ""

    def covers(self, statistic: str, step: int) -> bool:
        """Whether this limit is about a row."""
        return (step == 0) == (self.steps == "initial") and fnmatchcase(statistic, self.statistic)

    def judge(self, slope: float, low: float, high: float) -> Verdict:
        """The verdict on an exponent and its interval.

        An exponent that can't be computed (a network diverged) has failed. Without an interval, which takes two seeds,
        there is nothing to judge by.
        """
        if not math.isfinite(slope):
            return "fail"
        if not (math.isfinite(low) and math.isfinite(high)):
            return "more seeds"
        least, most = (slope, slope) if self.fail_by == "estimate" else (low, high)
        if most < self.fail_below or least > self.fail_above:
            return "fail"
        return "pass" if low >= self.low - _EXACT and high <= self.high + _EXACT else "more seeds"

    def __str__(self) -> str:
        return f"[{_told(self.low)}, {_told(self.high)}]"


@dataclass(frozen=True)
class CoordinateCheck:
    """Statistics of one architecture and parametrization over sizes, seeds and steps, judged by limits.

    Attributes
    ----------
    architecture, parametrization : str
        The latter with what was changed in it.
    axis : {"width", "depth"}
    sizes : tuple of int
        Residual widths or numbers of blocks; the first is the base size.
    seeds : tuple of int
    lr : float
        Base learning rate of the probe.
    trainable : {"branch", "trunk", "all"}
        Which tensors moved, by their location.
    values : mapping
        (statistic, step) -> array [seeds, sizes]; NaN where the network diverged. See `to_frame` for the long form.
    limits : tuple of Limit
        Rows that no limit covers are measured and not judged.
    base_identical : bool or None
        Whether initial statistics and first update at the base size are bit for bit those of `sp`; None if not compared.
    eps_share : float
        Largest share of Adam entries with sqrt(v) < 10 eps over all networks; NaN if not measured.
    level : float
        Of the intervals.
    setting : mapping
        Everything else that fixes the networks and the data.
    """

    architecture: str
    parametrization: str
    axis: Axis
    sizes: tuple[int, ...]
    seeds: tuple[int, ...]
    lr: float
    trainable: Trainable
    values: Mapping[tuple[str, int], Array]
    limits: tuple[Limit, ...]
    base_identical: bool | None = None
    eps_share: float = math.nan
    level: float = 0.90
    setting: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1 or len(set(self.sizes)) < len(self.sizes):
            raise ConfigError(f"sizes={list(self.sizes)} of a coordinate check must be two or more different sizes")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(f"seeds={list(self.seeds)} of a coordinate check must be one or more different seeds")
        for (name, step), values in self.values.items():
            if np.shape(values) != (len(self.seeds), len(self.sizes)):
                raise ConfigError(
                    f"{name!r} at step {step} has shape {np.shape(values)}, not {len(self.seeds)} seeds x {len(self.sizes)} sizes"
                )
        if not any(limit.covers(*key) for key in self.values for limit in self.limits):
            raise ConfigError("no limit covers any statistic of this coordinate check: it could not fail")

    @property
    def name(self) -> str:
        """What was checked, in a line."""
        return f"{self.architecture}, {self.parametrization}, {self.axis}, {self.trainable} tensors"

    @property
    def ratios(self) -> Array:
        """Sizes relative to the base size."""
        return np.asarray(self.sizes, np.float64) / self.sizes[0]

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row per statistic and step: exponent (mean over seeds), its interval, limits and verdict ("" if not judged).

        Columns: statistic, step, slope, low, high, pass_low, pass_high, threshold (in words), verdict. Statistics that are
        zero everywhere (what nothing moves) have no row.
        """
        rows = []
        for (name, step), values in self.values.items():
            if not np.any(values):
                continue
            slope, low, high = interval(slopes(values, self.ratios), self.level)
            limit = next((limit for limit in self.limits if limit.covers(name, step)), None)
            rows.append(
                {
                    "statistic": name, "step": step, "slope": slope, "low": low, "high": high,
                    "pass_low": limit.low if limit else math.nan, "pass_high": limit.high if limit else math.nan,
                    "threshold": str(limit) if limit else "", "verdict": limit.judge(slope, low, high) if limit else "",
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    @property
    def verdict(self) -> Verdict:
        """ "fail" if any row failed or the base shape differs, "pass" if all judged rows passed, else "more seeds"."""
        found = set(self.table["verdict"]) - {""}
        if "fail" in found or self.base_identical is False:
            return "fail"
        return "pass" if found == {"pass"} else "more seeds"

    @property
    def passed(self) -> bool:
        """Whether all judged rows passed, and the base shape is that of `sp`."""
        return self.verdict == "pass"

    @property
    def is_control(self) -> bool:
        """Whether this is a standard parametrization without changes, which is expected to fail."""
        return self.parametrization in ("sp", "sp_gpt2")

    def slope(self, statistic: str, step: int) -> float:
        """Exponent of a statistic after `step` updates.

        Raises
        ------
        ConfigError
            It wasn't measured; lists what was.
        """
        row = self.table[(self.table["statistic"] == statistic) & (self.table["step"] == step)]
        if row.empty:
            raise ConfigError(
                f"no exponent of {statistic!r} at step {step}: measured were {', '.join(dict.fromkeys(self.table['statistic']))}"
            )
        return float(row["slope"].iloc[0])

    def to_frame(self) -> pd.DataFrame:
        """All measurements: statistic, step, seed, size, ratio, value."""
        rows = [
            (name, step, seed, size, ratio, values[i, j])
            for (name, step), values in self.values.items()
            for i, seed in enumerate(self.seeds)
            for j, (size, ratio) in enumerate(zip(self.sizes, self.ratios, strict=True))
        ]
        return pd.DataFrame(rows, columns=["statistic", "step", "seed", "size", "ratio", "value"])

    def summary(self) -> str:
        """The judged rows as text, and the verdict."""
        judged = self.table[self.table["verdict"] != ""]
        told = pd.DataFrame(
            {
                "statistic": judged["statistic"], "step": judged["step"], "slope": judged["slope"].map("{:+.2f}".format),
                f"{100 * self.level:g} %": [f"[{lo:+.2f}, {hi:+.2f}]" for lo, hi in zip(judged["low"], judged["high"], strict=True)],
                "pass": judged["threshold"], "verdict": judged["verdict"],
            }
        )  # fmt: skip
        lines = [
            f"Coordinate check: {self.name}: {self.verdict}",
            f"{self.axis}s {', '.join(map(str, self.sizes))}; {len(self.seeds)} seed{'s' if len(self.seeds) > 1 else ''}; learning rate {self.lr:g}",
            told.to_string(index=False),
        ]
        if self.base_identical is not None:
            same = "bit for bit" if self.base_identical else "NOT"
            lines.append(f"at the base shape initial state and first update are {same} those of sp")
        if self.eps_share > 0:
            lines.append(f"share of Adam entries with sqrt(v) < 10 eps: up to {self.eps_share:.2g}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<CoordinateCheck {self.name}: {self.verdict}>"

    def save(self, path: str | Path) -> Path:
        """Write as JSON, whole or not at all. Exponents and verdict are written for readers; `load` computes them anew."""
        table = self.table.astype(object).where(self.table.notna(), None)
        fields = {
            "schema": SCHEMA, "architecture": self.architecture, "parametrization": self.parametrization, "axis": self.axis,
            "sizes": self.sizes, "seeds": self.seeds, "lr": self.lr, "trainable": self.trainable, "level": self.level,
            "base_identical": self.base_identical, "eps_share": self.eps_share, "verdict": self.verdict,
            "setting": dict(self.setting),
        }  # fmt: skip
        lists = {
            "limits": [asdict(limit) for limit in self.limits],
            "table": table.to_dict("records"),
            "values": [
                {"statistic": n, "step": s, "values": np.asarray(v).tolist()} for (n, s), v in self.values.items()
            ],
        }
        lines = [f"{json.dumps(k)}: {_json(v)}" for k, v in fields.items()]
        lines += [
            f"{json.dumps(k)}: [\n  " + ",\n  ".join(_json(one) for one in many) + "\n ]" for k, many in lists.items()
        ]
        return write_atomically(Path(path), ("{\n " + ",\n ".join(lines) + "\n}\n").encode())

    @classmethod
    def load(cls, path: str | Path) -> CoordinateCheck:
        """Read a saved check.

        Raises
        ------
        SchemaError
            The file is missing, no JSON, or no coordinate check of this version.
        """
        path = Path(path)
        try:
            raw = json.loads(path.read_bytes())
        except OSError as error:
            raise SchemaError(f"{path}: can't be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"{path}: not JSON ({error}); write one with check.save(path)") from None
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            raise SchemaError(f"{path}: schema is {found!r}, this version reads {SCHEMA!r}")
        try:
            return cls(
                architecture=raw["architecture"], parametrization=raw["parametrization"], axis=raw["axis"],
                sizes=tuple(raw["sizes"]), seeds=tuple(raw["seeds"]), lr=float(raw["lr"]), trainable=raw["trainable"],
                values={(v["statistic"], v["step"]): np.array(v["values"], dtype=np.float64) for v in raw["values"]},
                limits=tuple(_limit(one) for one in raw["limits"]), base_identical=raw["base_identical"],
                eps_share=math.nan if raw["eps_share"] is None else raw["eps_share"], level=raw["level"],
                setting=raw["setting"],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"{path}: the coordinate check is damaged ({type(error).__name__}: {error})") from None


def slopes(values: Array, ratios: Array) -> Array:
    """Exponent of each seed by ordinary least squares of log2(values) [seeds, sizes] on log2(ratios) [sizes].

    NaN for a seed with a value that is not finite and positive.
    """
    x = np.log2(ratios)
    x = x - x.mean()
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log2(values)
        found: Array = (y - y.mean(1, keepdims=True)) @ x / (x @ x)
    return np.where(np.isfinite(y).all(1), found, np.nan)


def interval(found: Array, level: float = 0.90) -> tuple[float, float, float]:
    """Mean over seeds and its t interval; without limits for one seed."""
    if not np.isfinite(found).all():
        return math.nan, math.nan, math.nan
    mean, n = float(found.mean()), len(found)
    if n < 2:
        return mean, -math.inf, math.inf
    half = t_quantile(0.5 + level / 2, n - 1) * float(found.std(ddof=1)) / math.sqrt(n)
    return mean, mean - half, mean + half


def limits_for(
    axis: Axis, trainable: Trainable, *, contribution: float | None = None, readout: float | None = -0.5
) -> tuple[Limit, ...]:
    """The limits of a check.

    Parameters
    ----------
    axis, trainable
        What was varied and what moved.
    contribution : float, optional
        Expected depth exponent of what all branches add at init, 1/2 - alpha for a plain sum of independent branches; not
        judged unless given.
    readout : float, optional
        Expected width exponent of the initial logits; None for a readout that starts at zero.

    Raises
    ------
    ConfigError
        Another axis or another set of tensors.
    """
    if axis not in ("width", "depth") or trainable not in ("branch", "trunk", "all"):
        raise ConfigError(f"axis={axis!r} is width or depth, trainable={trainable!r} is branch, trunk or all")
    if axis == "width":
        flat: dict[str, Any] = {"low": -0.15, "high": 0.15, "fail_below": -0.30, "fail_above": 0.30}
        why = "an update changes every coordinate as much at any width"
        changes = tuple(
            Limit(n, "updates", why=why, **flat) for n in ("h.change", "attention.*.change", "ffn.*.change")
        )
        logits = Limit(
            "logits.change", "updates", -0.25, 0.15, fail_above=0.30, why="as h, with 1/sqrt(m) of noise early on"
        )
        if readout is None:
            return *changes, logits
        initial = Limit("logits", "initial", readout - 0.15, readout + 0.15, fail_above=readout + 0.30,
                        why="a random readout with multiplier 1/m averages out")  # fmt: skip
        return *changes, logits, initial
    if trainable == "trunk":
        return (
            Limit(
                "z.change", "updates", high=0.20, fail_above=0.50, why="the branch multiplier doesn't reach the trunk"
            ),
        )
    change = Limit(
        "z.change", "updates", -0.20, 0.20, -0.35, 0.35, why="an update changes the stream as much at any depth"
    )
    if contribution is None:
        return (change,)
    added = Limit("branches", "initial", contribution - 0.15, contribution + 0.15, contribution - 0.30, contribution + 0.30,
                  why="independent branches add as their number to the 1/2")  # fmt: skip
    return change, added


def _told(bound: float) -> str:
    return f"{bound:+.2f}" if math.isfinite(bound) else ("-inf" if bound < 0 else "inf")


def _json(value: Any) -> str:
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    """Plain data; null for what JSON can't write."""
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _limit(raw: dict[str, Any]) -> Limit:
    """A limit; null is an open end."""
    ends = {"low": -math.inf, "fail_below": -math.inf, "high": math.inf, "fail_above": math.inf}
    values: dict[str, Any] = {**raw, **{k: end for k, end in ends.items() if raw[k] is None}}
    return Limit(**values)
