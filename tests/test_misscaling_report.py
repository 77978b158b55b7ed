"""What a user of the mis-scaling report gets: advice in numbers, a schema, one page of HTML, and exit codes."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from learning_rate_runs import study

from scalinglab.cli import main
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.misscaling import Method, MisscalingReport, json_schema, misscaling, validate
from scalinglab.misscaling.advice import rates_to_add
from scalinglab.misscaling.rules import _DRIFTS, _GAINS, _SUBJECTS, MEANING, READINGS, TABLE, State
from scalinglab.misscaling.saving import document
from scalinglab.misscaling.schema import shipped_schema
from scalinglab.report.html.misscaling import html_page, save_page

QUICK = Method(draws=99)
GRID = np.log(0.001) + np.log(2) * np.arange(6)


@pytest.fixture(scope="module")
def report() -> MisscalingReport:
    return misscaling(study("both"), method=QUICK)


def exit_code(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["misscaling", *words])
    return int(stopped.value.code or 0)


# ---- advice --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("best", "status", "expected"),
    [
        (5, "boundary", [0.064, 0.128, 0.256]),  # two beyond an optimum that may lie one step on
        (0, "boundary", [0.000125, 0.00025, 0.0005]),
        (4, "one-sided", [0.064]),
        (2, "interior", []),
    ],
)
def test_rates_to_add_go_on_by_the_step_of_the_grid(best: int, status: str, expected: list[float]) -> None:
    made = rates_to_add(GRID, 3 + 0.02 * (GRID - GRID[best]) ** 2, status)
    np.testing.assert_allclose(made, expected, rtol=1e-5)


def test_rates_to_add_lie_between_those_tried_or_below_what_diverged() -> None:
    steep = np.array([9.0, 5.0, 3.0, 5.0, 9.0, np.nan])
    made = rates_to_add(GRID, steep, "too few")
    np.testing.assert_allclose(made, 0.001 * 2 ** np.array([0.5, 1.5, 2.5, 3.5]), rtol=1e-5)
    np.testing.assert_allclose(
        rates_to_add(GRID, np.full(6, np.inf), "diverged"), [0.000125, 0.00025, 0.0005], rtol=1e-5
    )


def test_following_the_advice_brings_the_optimum_inside() -> None:
    """A study cut off above the third rate of the deepest scaled shape; the rates it names are then taken from the whole."""
    runs = study("architecture")
    deep = (runs["depth"] == 32) & (runs["parametrization"] == "completep") & (runs["architecture"] == "pre_ln")
    rates = np.sort(runs.loc[deep, "lr"].unique())
    cut = runs[~(deep & (runs["lr"] > rates[2]))]
    table = misscaling(cut, method=QUICK, hierarchical=False).envelopes
    row = table[table["advice"] != ""]
    assert list(row["status"]) == ["boundary"]
    named = [float(v) for v in re.findall(r"\d\.\d+(?=[, ])", row["advice"].iloc[0])[1:]]
    np.testing.assert_allclose(named, rates[3:6], rtol=1e-2)
    again = runs[~(deep & (runs["lr"] > rates[5] * 1.01))]
    assert set(misscaling(again, method=QUICK, hierarchical=False).envelopes["status"]) == {"interior"}


# ---- schema --------------------------------------------------------------------------------------------------------------
def test_the_schema_is_made_from_the_types_and_reports_keep_to_it(report: MisscalingReport, tmp_path: Path) -> None:
    assert shipped_schema() == json_schema()
    for one in (report, misscaling(study("both").drop(columns="lr"), method=QUICK)):
        saved = json.loads((one.save(tmp_path / one.verdict) / "result.json").read_text())
        assert validate(saved).verdict == one.verdict
    broken = {**document(report), "verdict": "surely"}
    with pytest.raises(SchemaError, match=r"verdict"):
        validate(broken)


def test_the_decision_is_told_as_data(report: MisscalingReport) -> None:
    assert set(MEANING) == {r.verdict for r in TABLE} | {"inconclusive"}
    assert report.summary().startswith(f"Mis-scaling: both: {MEANING['both']}")
    assert "224 runs, which scatter about their curves by 0.005" in report.summary()


def test_states_are_told_in_words(report: MisscalingReport) -> None:
    (told,) = (r for r in report.reasons if "(U)" in r)
    assert told.startswith("A0: ")
    assert "both together, mis-scaling (M), adds more than the margin to the depth gain" in told
    assert "the naive reference's optimal learning rate moves with depth by more than the margin" in told
    assert not any(
        re.search(r"\b(M|U|V|W|W_same|drift \w+) (superior|equivalent|beyond|open)\b", r) for r in report.reasons
    )
    for names, words in ((_SUBJECTS, {n for r in (*TABLE, *READINGS) for n in r.pattern}),
                         ({*_GAINS, *_DRIFTS, "absent"}, set(get_args(State)))):  # fmt: skip
        assert words <= set(names)


def test_two_deviations_are_two_deviations(report: MisscalingReport) -> None:
    assert re.search(
        r"; SD of shapes about their arm's line \S+ nats; SD of what arms do not have in common \S+ nats; ",
        report.basis,
    )
    assert "of it" not in report.basis


def test_every_contrast_is_explained(report: MisscalingReport) -> None:
    meaning = report.decomposition.set_index("name")["meaning"]
    assert "as M, with A0 for the reference" in meaning["M_own:A0"]
    assert "M_own less M" in meaning["three_way:A0"]
    assert "scaled reference's optimal learning rates" in meaning["W_same:A0"]


def test_names_keep_their_letters(report: MisscalingReport) -> None:
    """A reason that starts with the name of an architecture is not written as if the name were a word."""
    from dataclasses import replace

    words = Reader(html_page(replace(report, reasons=("pre_ln: one", "no envelope")))).words
    assert "pre_ln: one." in words
    assert "Pre_ln" not in words
    assert "No envelope." in words


def test_an_open_contrast_says_what_its_error_would_have_to_be() -> None:
    """sigma .02 and two seeds: the standard error of W is .013, equivalence within .012 takes .0041."""
    from scalinglab.misscaling import Plan

    noisy = misscaling(study("neither", Plan(sigma=0.02)), method=QUICK, hierarchical=False)
    assert noisy.verdict == "inconclusive"
    assert any(r.startswith("W:A0 is open: its standard error") and "above 0.0041" in r for r in noisy.reasons)


# ---- the page ------------------------------------------------------------------------------------------------------------
class Reader(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_holds_the_answer_its_reasons_figures_and_rules(report: MisscalingReport) -> None:
    text = html_page(report)
    read = Reader(text)
    assert f"both: {MEANING['both']}" in read.words
    for reason in report.reasons:
        assert reason[1:] in read.words
    for rule in TABLE:
        assert rule.meaning in read.words
    assert sum(tag == "svg" for tag, _ in read.tags) == 6  # three figures, for wide and for narrow pages
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert not any(tag in ("script", "iframe", "img") for tag, _ in read.tags)
    links = [a.get("href") or "" for _, a in read.tags if "href" in a]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert {link[1:] for link in links if link.startswith("#") and len(link) > 1} <= set(ids)
    assert "M +0." in next(w for w in re.findall(r"Differences of depth gains[^<]*", text))


def test_names_from_logs_stay_text() -> None:
    runs = study("both")
    hostile = "<script>alert(1)</script>"
    text = html_page(misscaling(runs.assign(architecture=runs["architecture"].replace("A0", hostile)), method=QUICK))
    assert hostile not in text
    assert "&lt;script&gt;" in text


def test_a_report_without_rates_has_a_page_too(tmp_path: Path) -> None:
    table = study("both").groupby(["depth", "architecture"], as_index=False)["loss"].min().assign(width=64)
    written, skipped = save_page(misscaling(table), tmp_path)
    assert set(skipped) == {"lr_envelope", "lr_drift", "decomposition"}
    assert [p.name for p in written] == ["report.html"]
    assert "no learning rates in these 8 runs" in Reader((tmp_path / "report.html").read_text()).words.lower()
    with pytest.raises(ConfigError, match="mis-scaling report"):
        html_page("report")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="png, svg or pdf"):
        save_page(misscaling(table), tmp_path, formats=["gif"])


# ---- the command ---------------------------------------------------------------------------------------------------------
def test_a_table_without_rates_is_answered_in_a_sentence_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = study("both").groupby(["depth", "architecture"], as_index=False)["loss"].min().assign(width=64)
    table.to_csv(tmp_path / "kaplan.csv", index=False)
    assert exit_code(str(tmp_path / "kaplan.csv"), "--out", str(tmp_path / "report")) == 1
    assert "whether depth is mis-scaled cannot be answered" in capsys.readouterr().out
    assert validate(json.loads((tmp_path / "report" / "result.json").read_text())).verdict == "inconclusive"


def test_arms_that_are_not_paired_or_not_there_give_exit_code_1(tmp_path: Path) -> None:
    runs = study("both")
    runs.assign(corpus_fingerprint=np.where(runs["architecture"] == "A0", "ff", "0f")).to_csv(
        tmp_path / "a.csv", index=False
    )
    runs[runs["parametrization"] == "completep"][lambda t: t["architecture"] == "A0"].to_csv(
        tmp_path / "b.csv", index=False
    )
    runs[runs["architecture"] == "pre_ln"].to_csv(tmp_path / "c.csv", index=False)
    assert exit_code(str(tmp_path / "a.csv"), "--draws", "99") == 1
    assert exit_code(str(tmp_path / "b.csv"), "--draws", "99") == 1
    assert exit_code(str(tmp_path / "c.csv"), "--draws", "99") == 0  # the reference's own arms: U, V and M


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "told"), [("steplaw_dense", "no naive arm"), ("gemstones_lr_preflight", "no naive arm")]
)
def test_logs_of_others_get_a_report(shared: Path, tmp_path: Path, name: str, told: str) -> None:
    assert exit_code(str(shared / f"{name}.csv"), "--draws", "99", "--out", str(tmp_path), "--formats", "png") == 1
    assert told in (tmp_path / "summary.txt").read_text()
    assert len(pd.read_csv(tmp_path / "tables" / "envelopes.csv")) >= 4


def test_the_package_is_its_function() -> None:
    import scalinglab.misscaling as package

    assert callable(package)
    table = study("both").drop(columns="lr")
    assert package(table).verdict == "inconclusive"  # type: ignore[operator]


# ---- whether the curves fit ----------------------------------------------------------------------------------------------
def test_noise_that_grows_away_from_the_best_is_told_and_even_noise_is_not() -> None:
    runs = study("both")
    assert not any(
        "the noisiest runs shape the curves" in r for r in misscaling(runs, method=QUICK, hierarchical=False).reasons
    )
    cell = runs.groupby(["architecture", "parametrization", "depth"])["loss"].transform("min")
    far = (runs["loss"] - cell > 0.03) * np.random.default_rng(0).normal(0, 0.02, len(runs))
    report = misscaling(runs.assign(loss=runs["loss"] + far), method=QUICK, hierarchical=False)
    (said,) = (r for r in report.reasons if "the noisiest runs shape the curves" in r)
    assert "narrow the window, e.g. to 0.035" in said


def test_a_minimum_below_the_floor_is_told() -> None:
    runs = study("both")
    low = misscaling(runs.assign(floor=2.9), method=QUICK, hierarchical=False)
    (said,) = (r for r in low.reasons if "below the floor" in r)
    below = low.envelopes["minimum"] < 2.9
    assert said.startswith(f"{below.sum()} fitted minima (depth ")
    assert not any("floor" in r for r in misscaling(runs.assign(floor=1.0), method=QUICK, hierarchical=False).reasons)


def test_the_verdict_is_told_under_other_curves(report: MisscalingReport) -> None:
    table = report.by_curve
    assert list(zip(table["model"], table["window"].round(3), strict=True)) == [
        ("quadratic", 0.07), ("cubic", 0.07), ("shared", 0.035), ("shared", 0.105),
    ]  # fmt: skip
    m = report.decomposition.set_index("name").loc["M"]
    assert (abs(table["M"] - m["estimate"]) < 4 * m["se"]).all()
    assert (table["verdict"] == "both").sum() >= 2
    differing = table[table["verdict"] != "both"]
    assert any("depends on the curve" in r for r in report.reasons) == bool(len(differing))


def test_long_names_of_arms_stay_inside_the_figure() -> None:
    from scalinglab.report.figures import lr_drift, lr_envelope

    moved = study("mis-scaling")
    moved = moved[moved["architecture"] == "pre_ln"]
    long = moved["parametrization"].replace("completep", "completep; matrix.branch.init_std depth 0 -> 0.5")
    report = misscaling(
        pd.concat([moved, moved.assign(parametrization=long, run_id=moved["run_id"] + "m")]), method=QUICK
    )
    for draw, width in ((lr_drift, "column"), (lr_envelope, "page"), (lr_envelope, "column")):
        made = draw(report, arms=report.grids.arms, width=width)
        made.draw_without_rendering()
        right = made.legends[0].get_window_extent().x1
        assert right <= made.bbox.x1, draw.__name__


def test_one_depth_is_no_drift_to_draw() -> None:
    from scalinglab.report.figures import lr_drift

    runs = study("mis-scaling")
    with pytest.raises(ConfigError, match="one depth alone"):
        lr_drift(misscaling(runs[runs["depth"] == 4], method=QUICK, hierarchical=False))


def test_unfinished_runs_are_told_before_grids_are_extended(tmp_path: Path) -> None:
    from run_folders import config, write_run

    from scalinglab.readers import read_runs

    for k, lr in enumerate((0.001, 0.002, 0.004, 0.008, 0.016)):
        write_run(tmp_path, config(lr=lr), 2.0 - 0.1 * k, summary=k < 4)
    report = misscaling(read_runs(tmp_path), method=QUICK, hierarchical=False)
    assert any(r.startswith("1 unfinished runs are left out") for r in report.reasons)
    assert list(report.envelopes["status"]) == ["boundary"]
