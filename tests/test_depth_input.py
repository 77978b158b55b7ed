"""What the depth report does with bad input, through Python and the command line, and with copies of rows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scalinglab import cli
from scalinglab.depth_benefit import depth_benefit, validate
from scalinglab.errors import SchemaError
from scalinglab.simulation import gemstones_design, grid_design, shape_study, simulate

TRUTH = {"E": 1.69, "A": 406.4, "alpha": 0.34, "gamma1": 0.03, "gamma2": 0.016, "B": 410.7, "beta": 0.28}
COLUMNS = ["run_id", "match_group", "architecture", "seed", "depth", "width", "params", "tokens", "loss", "status"]


def table(aspects=(8, 16, 32, 64, 128), seeds=2):
    design = grid_design((1e8,), (2e9,), aspects=aspects, architectures=("pre_ln", "hc"))
    return simulate("shape", TRUTH, design, sigma=0.0015, seeds=seeds, rng=0)[COLUMNS]


def deep(t):
    return t["depth"] > 20


def hc(t):
    return t["architecture"] == "hc"


# what is done to a good table; what the command line says: an exit code with a word of its error, or the labels
REFUSED = {
    "empty": (lambda t: t.iloc[:0], "header and no rows"),
    "NaN loss": (lambda t: t.assign(loss=t["loss"].where(t.index != 3)), "row 5, column 'loss': loss is missing"),
    "perplexity": (lambda t: t.assign(loss=np.exp(t["loss"])), "looks like a perplexity"),
    "infinite": (lambda t: t.assign(loss=t["loss"].where(t.index != 2, np.inf)), "infinite"),
    "negative": (lambda t: t.assign(loss=-t["loss"]), "negative"),
    "copied rows": (lambda t: pd.concat([t, t.iloc[:3]]), "repeats the key"),
    "shared names": (lambda t: t.assign(run_id=[f"r{i % 5}" for i in range(len(t))]), "repeats the key"),
    "no depth": (lambda t: t.drop(columns="depth"), "needs the column 'depth'"),
    "no tokens": (lambda t: t.drop(columns="tokens"), "needs the column 'tokens'"),
    "no sizes": (lambda t: t.drop(columns="params"), "params_backbone"),
    "text": (lambda t: t.assign(depth="deep"), "is not a number"),
}
LABELLED = {
    "one architecture": (lambda t: t[hc(t)], None, "ONE_ARCHITECTURE"),
    "no reference": (lambda t: t.assign(architecture=t["architecture"].replace("pre_ln", "x")), None, "reference='x' (--reference x)"),
    "no architecture": (lambda t: t.drop(columns="architecture"), None, "all:"),
    "no seeds": (lambda t: t.drop(columns="seed"), None, "LR_UNKNOWN"),
    "one depth": (lambda t: t[t["depth"] == t["depth"].min()], "NOT_IDENTIFIED", "all runs have depth 8"),
    "one run": (lambda t: t.iloc[:1], "NOT_IDENTIFIED", "all runs have depth"),
    "two rows": (lambda t: t.groupby("depth").head(1).iloc[[0, 4]], "NOT_IDENTIFIED", "without an error"),
    "two shapes": (lambda t: t[t["depth"] < 15], "NOT_IDENTIFIED", "degrees of freedom"),
    "all diverged": (lambda t: t.assign(status="diverged"), "NOT_IDENTIFIED", "no run has a final loss"),
    "evaluation by arm": (lambda t: t.assign(eval_dataset=np.where(deep(t), "a", "b")), "INVALID_DATA", "--where \"eval_dataset == 'a'\""),
    "evaluation by architecture": (lambda t: t.assign(eval_dataset=np.where(hc(t), "a", "b")), "INVALID_DATA", "eval_dataset"),
    "evaluation tokens": (lambda t: t.assign(eval_tokens=np.where(deep(t), 1e6, 2e6)), "INVALID_DATA", "eval_tokens"),
    "bits of one arm": (lambda t: t.assign(loss=t["loss"] / np.where(hc(t), np.log(2), 1)), "INVALID_DATA", "as bits would be"),
    "perplexity of one arm": (lambda t: t.assign(loss=np.where(hc(t), np.exp(t["loss"]), t["loss"])), "INVALID_DATA", "as a perplexity would be"),
    "budgets by arm": (lambda t: t.assign(tokens=np.where(deep(t), 2e9, 4e9)), "CONFOUNDED_N", "--rates published"),
}  # fmt: skip


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        cli.main(["depth", *map(str, args), "--draws", "99"])
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_one_sentence(name, tmp_path, capsys):
    make, words = REFUSED[name]
    make(table()).to_csv(tmp_path / "runs.csv", index=False)
    code, out, err = run(capsys, tmp_path / "runs.csv", "--out", tmp_path / "report")
    assert code == 2
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("name", LABELLED)
def test_what_can_be_read_is_labelled(name, tmp_path, capsys):
    make, label, words = LABELLED[name]
    make(table()).to_csv(tmp_path / "runs.csv", index=False)
    code, out, err = run(capsys, tmp_path / "runs.csv", "--no-reanalyse")
    assert "Traceback" not in err
    assert words in out
    if label is not None:
        assert code == 1
        assert f": {label}" in out
    if label == "INVALID_DATA":
        assert "study: INVALID_DATA" in out  # nor are architectures compared


@pytest.mark.parametrize("name", ["one depth", "two rows", "all diverged", "evaluation tokens", "one architecture"])
def test_poor_tables_have_a_whole_report(name, tmp_path, capsys):
    LABELLED[name][0](table()).to_csv(tmp_path / "runs.csv", index=False)
    run(capsys, tmp_path / "runs.csv", "--out", tmp_path / "report", "--formats", "svg")
    assert {"report.html", "result.json", "summary.txt"} <= {p.name for p in (tmp_path / "report").iterdir()}


def test_unknown_names_list_what_there_is(tmp_path, capsys):
    table().to_csv(tmp_path / "runs.csv", index=False)
    code, _, err = run(capsys, tmp_path / "runs.csv", "--reference", "prenorm")
    assert code == 2
    assert "the architectures are pre_ln, hc" in err
    code, _, err = run(capsys, tmp_path / "runs.csv", "--recipe", "mup")
    assert code == 2
    assert "they name no parametrization" in err


def test_python_refuses_one_name_for_several_runs():
    with pytest.raises(
        SchemaError, match=r"run_id 'r0' stands for runs that differ in architecture \(pre_ln, hc; 5 such"
    ):
        depth_benefit(table().assign(run_id=[f"r{i % 5}" for i in range(20)]))


def test_lost_runs_without_losses_are_a_report():
    made = depth_benefit(table().assign(status="diverged", loss=np.nan), draws=99)
    assert set(made.label.values()) == {"NOT_IDENTIFIED"}
    validate(made.result)


# ---- negative control: copies are no evidence ---------------------------------------------------------------------------
def copies(runs, step=False):
    parts = [runs.assign(step=k) if step else runs for k in range(10)]
    return pd.concat(parts, ignore_index=True)


def same(one, ten):
    assert one.label == ten.label
    assert {a: v.modifiers for a, v in one.verdicts.items()} == {a: v.modifiers for a, v in ten.verdicts.items()}
    assert len(one.outcome.effects) == len(ten.outcome.effects)
    a, b = (r.effects[["p", "p_adj", "estimate", "low", "high"]].to_numpy(float) for r in (one, ten))
    assert b == pytest.approx(a, rel=1e-6, abs=1e-12, nan_ok=True)
    if one.gate is not None:
        assert ten.gate.p == pytest.approx(one.gate.p, rel=1e-6)
        assert ten.gate.p_bootstrap == pytest.approx(one.gate.p_bootstrap, abs=0.011)


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("method", ["cells", "pairs"])
def test_rows_copied_ten_times_change_nothing(method, step):
    runs = table() if method == "cells" else table(aspects=(16, 64), seeds=5)
    one, ten = (depth_benefit(t, method=method, draws=99, reanalyse=False) for t in (runs, copies(runs, step)))
    same(one, ten)
    assert ("DUPLICATES_DROPPED" in {w.code for w in ten.warnings}) == (not step)


@pytest.mark.parametrize("step", [False, True])
def test_rows_copied_ten_times_change_nothing_by_a_law(step):
    runs = shape_study()
    one, ten = (depth_benefit(t, method="law", draws=99, reanalyse=False) for t in (runs, copies(runs, step)))
    same(one, ten)


@pytest.mark.parametrize("step", [False, True])
def test_checkpoints_copied_ten_times_change_nothing(step):
    """Ten copies of every checkpoint enter the law as rows of their shape: neither its point nor its jackknife moves."""
    runs = simulate("shape", TRUTH, gemstones_design(), sigma=0.004, rng=1)
    runs = runs[runs.groupby("run_id").cumcount() % 3 == 0].reset_index(drop=True)
    many = copies(runs.drop(columns="step", errors="ignore"), step)
    one = depth_benefit(
        runs.drop(columns="step", errors="ignore"), method="law", checkpoints="wsd", draws=99, reanalyse=False
    )
    ten = depth_benefit(many, method="law", checkpoints="wsd", draws=99, reanalyse=False)
    same(one, ten)
