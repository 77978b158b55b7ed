"""Coordinate checks as results: exponents of known power laws, verdicts, files, and the figure."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from scalinglab.coordinates import CoordinateCheck, Limit, interval, limits_for, slopes
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.report import coords

SIZES, SEEDS = (2, 4, 8, 16), (0, 1, 2)


def power(exponent: float, spread: float = 0.0) -> np.ndarray:
    """[seeds, sizes] of 3 m^(exponent + spread * (seed - 1)): mean exponent and standard deviation are known."""
    ratios = np.asarray(SIZES) / SIZES[0]
    return np.array([3 * ratios ** (exponent + spread * (seed - 1)) for seed in SEEDS])


def made(z: np.ndarray | float = 0.0, branches: float = -0.5, **changes: object) -> CoordinateCheck:
    values = {
        ("branches", 0): power(branches),
        ("h", 0): power(-0.2),
        ("z.change", 1): power(z) if isinstance(z, float) else z,
        ("weights.query", 1): np.zeros((len(SEEDS), len(SIZES))),
    }
    fields = {
        "architecture": "pre_ln", "parametrization": "completep", "axis": "depth", "sizes": SIZES, "seeds": SEEDS, "lr": 1e-3,
        "trainable": "branch", "values": values, "limits": limits_for("depth", "branch", contribution=-0.5),
    }  # fmt: skip
    return CoordinateCheck(**{**fields, **changes})  # type: ignore[arg-type]


@given(st.floats(-3, 3), st.floats(1e-6, 1e6), st.lists(st.integers(1, 4096), min_size=2, max_size=6, unique=True))
def test_a_power_law_gives_back_its_exponent(exponent: float, factor: float, sizes: list[int]) -> None:
    ratios = np.asarray(sizes) / sizes[0]
    np.testing.assert_allclose(slopes(factor * ratios[None] ** exponent, ratios), exponent, atol=1e-9)


def test_exponents_are_those_of_a_second_least_squares() -> None:
    rng = np.random.default_rng(0)
    values, ratios = rng.lognormal(size=(5, 4)), np.array([1.0, 2.0, 8.0, 16.0])
    expected = [stats.linregress(np.log2(ratios), np.log2(v)).slope for v in values]
    np.testing.assert_allclose(slopes(values, ratios), expected, rtol=1e-12)


def test_interval_is_students_and_one_seed_has_none() -> None:
    found = np.array([0.1, -0.05, 0.12, 0.02])
    mean, low, high = interval(found, 0.9)
    expected = stats.t.interval(0.9, 3, found.mean(), stats.sem(found))
    np.testing.assert_allclose((mean, low, high), (found.mean(), *expected), rtol=1e-10)
    assert interval(found[:1]) == (0.1, -math.inf, math.inf)


def test_a_diverged_network_fails() -> None:
    values = power(0.0)
    values[1, 3] = np.nan
    assert made(values).verdict == "fail"


@pytest.mark.parametrize(
    ("exponent", "spread", "verdict"),
    [
        (0.0, 0.01, "pass"),
        (0.19, 0.05, "more seeds"),  # the interval reaches beyond 0.20
        (0.30, 0.001, "more seeds"),  # neither inside 0.20 nor beyond 0.35
        (0.36, 0.0, "fail"),
        (-0.36, 0.0, "fail"),
        (0.0, 0.4, "more seeds"),  # the estimate is flat, but the seeds don't agree
    ],
)
def test_verdicts_follow_the_limits(exponent: float, spread: float, verdict: str) -> None:
    check = made(power(exponent, spread))
    assert check.verdict == verdict
    assert check.passed == (verdict == "pass")


def test_verdict_by_the_whole_interval() -> None:
    lazy = Limit("x", "updates", -0.1, 0.1, fail_below=-0.3, fail_by="interval")
    assert lazy.judge(-0.5, -0.6, -0.4) == "fail"
    assert lazy.judge(-0.5, -0.9, -0.1) == "more seeds"


def test_one_seed_has_no_verdict_whatever_its_exponent() -> None:
    for exponent in (0.0, 2.0):
        values = {("z.change", 1): power(exponent)[:1], ("branches", 0): power(-0.5)[:1]}
        one = made(seeds=(0,), values=values)
        assert one.verdict == "more seeds"
        assert "1 seed;" in one.summary()
    values["z.change", 1] = np.full((1, len(SIZES)), np.nan)
    assert made(seeds=(0,), values=values).verdict == "fail", "it diverged"


def test_controls_are_the_standard_parametrizations_without_changes() -> None:
    assert [made(parametrization=p).is_control for p in ("sp", "sp_gpt2", "sp: branch_multiplier depth 0 -> -1", "mup")] == [
        True, True, False, False,
    ]  # fmt: skip


def test_a_difference_at_the_base_shape_fails_and_zeros_have_no_row() -> None:
    assert made(base_identical=True).passed
    assert made(base_identical=False).verdict == "fail"
    assert "weights.query" not in set(made().table["statistic"])
    with pytest.raises(ConfigError, match="no exponent of 'weights.query'"):
        made().slope("weights.query", 1)


def test_limits_are_those_that_were_set() -> None:
    by_name = {(limit.statistic, limit.steps): limit for limit in limits_for("width", "all")}
    assert (by_name["h.change", "updates"].low, by_name["h.change", "updates"].fail_above) == (-0.15, 0.30)
    assert (by_name["logits.change", "updates"].low, by_name["logits.change", "updates"].high) == (-0.25, 0.15)
    assert by_name["logits", "initial"].fail_above == pytest.approx(-0.2)
    assert ("logits", "initial") not in {(x.statistic, x.steps) for x in limits_for("width", "all", readout=None)}
    (trunk,) = limits_for("depth", "trunk")
    assert (trunk.low, trunk.high, trunk.fail_above) == (-math.inf, 0.20, 0.50)
    with pytest.raises(ConfigError, match="axis='heads'"):
        limits_for("heads", "all")  # type: ignore[arg-type]


def test_a_saved_check_comes_back(tmp_path: Path) -> None:
    values = power(0.1, 0.02)
    values[0, 0] = np.nan
    for check in (made(base_identical=True, eps_share=0.25, setting={"width": 64}), made(values)):
        back = CoordinateCheck.load(check.save(tmp_path / "check.json"))
        assert (back.verdict, back.limits, back.setting, back.name) == (
            check.verdict, check.limits, check.setting, check.name,
        )  # fmt: skip
        assert [*back.values] == [*check.values]
        for key in check.values:
            np.testing.assert_array_equal(back.values[key], check.values[key])
        assert back.table.equals(check.table)
    assert [p.name for p in tmp_path.iterdir()] == ["check.json"]


@pytest.mark.parametrize(
    ("text", "match"),
    [("{", "not JSON"), ("[]", "schema is 'list'"), ('{"schema": "scalinglab/coords-1"}', "damaged")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SchemaError, match=match):
        CoordinateCheck.load(path)
    with pytest.raises(SchemaError, match="can't be read"):
        CoordinateCheck.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sizes": (2,)}, "two or more"),
        ({"seeds": ()}, "one or more"),
        ({"seeds": (0, 1)}, "not 2 seeds x 4 sizes"),
        ({"limits": ()}, "could not fail"),
    ],
)
def test_checks_that_say_nothing_are_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        made(**changes)  # type: ignore[arg-type]


def test_measurements_as_a_table_and_as_text() -> None:
    check = made(base_identical=True, eps_share=0.5)
    frame = check.to_frame()
    assert len(frame) == len(check.values) * len(SEEDS) * len(SIZES)
    row = frame[(frame["statistic"] == "h") & (frame["seed"] == 1) & (frame["size"] == 8)].iloc[0]
    assert (row["ratio"], row["value"]) == (4.0, check.values["h", 0][1, 2])
    text = check.summary()
    assert "pre_ln, completep, depth, branch tensors: pass" in text
    assert "bit for bit" in text
    assert "sqrt(v) < 10 eps: up to 0.5" in text
    assert "NOT those of sp" in made(base_identical=False).summary()


def test_figure_draws_every_size_and_says_exponent_and_verdict() -> None:
    steep = made(power(0.7, 0.02), parametrization="sp")
    fig = coords([made(), steep])
    panels = [ax for ax in fig.axes if ax.lines]
    assert [ax.get_title("left").split(",")[0] for ax in panels] == ["Normalised stream", "All branches at init"]
    marked = next(line for line in panels[0].lines if str(line.get_label()).startswith("pre_ln, sp"))
    np.testing.assert_allclose(marked.get_xdata(), SIZES)
    np.testing.assert_allclose(marked.get_ydata(), 3 * (np.asarray(SIZES) / 2) ** 0.7, rtol=1e-12)
    said = " ".join(t.get_text() for t in fig.findobj(matplotlib.text.Text))
    assert "$+0.70$ ± 0.03 fails" in said
    assert "$+0.00$ ± 0.00 passes" in said
    assert "pre_ln, sp (fail)" in said


def test_figure_takes_single_statistics_and_refuses_the_rest() -> None:
    fig = coords(made(), statistics=["h"], width="column")
    assert fig.axes[0].get_title("left") == "Stream $h$ at init"
    with pytest.raises(ConfigError, match="draws coordinate checks"):
        coords("runs.csv")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no statistic 'x'"):
        coords(made(), statistics=["x"])
    wide = made(axis="width", limits=(Limit("h", "initial"),))
    with pytest.raises(ConfigError, match="along one axis"):
        coords([made(), wide])
    with pytest.raises(ConfigError, match="at steps 1 to 1, not at 3"):
        coords(made(), statistics=["z.change"], step=3)
