"""Learning rates for the next sweep: vertices of known parabolas, edges, lost runs, and the round trip into a sweep file."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import config, write_run

from scalinglab import cli
from scalinglab.errors import SchemaError
from scalinglab.misscaling.tuning import best_rates, tuned_toml
from scalinglab.planning import expand
from scalinglab.sweeps import load_sweep

RATES = 1e-3 * 2.0 ** np.arange(6)
AT = math.log(4e-3)


def grid(optimum=AT, curvature=0.015, *, seeds=2, noise=0.0, **fixed):
    rng = np.random.default_rng(0)
    rows = [
        {"run_id": f"{fixed}-{lr:g}-{s}", "lr": lr, "seed": s, "status": "finished",
         "loss": 2.0 + curvature * (math.log(lr) - optimum) ** 2 + noise * rng.standard_normal()}
        for lr in RATES for s in range(seeds)
    ]  # fmt: skip
    return pd.DataFrame(rows).assign(**{"architecture": "pre_ln", "depth": 4, "width": 32, **fixed})


@settings(max_examples=60, deadline=None)
@given(st.floats(math.log(2.1e-3), math.log(1.5e-2)), st.floats(0.005, 0.05))
def test_the_vertex_is_found_exactly(optimum, curvature):
    made = best_rates(grid(optimum, curvature)).iloc[0]
    assert made["status"] == "interior"
    assert math.log(made["lr"]) == pytest.approx(optimum, abs=1e-6)
    assert made["best"] in RATES
    assert (made["tried"], made["seeds"]) == (6, 2)


def test_arms_and_shapes_are_apart():
    table = pd.concat([
        grid(math.log(3e-3), depth=4), grid(math.log(6e-3), depth=8), grid(math.log(9e-3), architecture="hc"),
        grid(math.log(2.5e-3), parametrization="completep"),
    ])  # fmt: skip
    made = best_rates(table).set_index(["architecture", "parametrization", "depth"])["lr"]
    assert made["pre_ln", "sp", 4] == pytest.approx(3e-3)
    assert made["pre_ln", "sp", 8] == pytest.approx(6e-3)
    assert made["hc", "sp", 4] == pytest.approx(9e-3)
    assert made["pre_ln", "completep", 4] == pytest.approx(2.5e-3)


def test_without_parametrizations_two_arms_are_not_pooled():
    one, other = grid(math.log(3e-3)), grid(math.log(6e-3)).assign(run_id=lambda t: "other " + t["run_id"])
    assert best_rates(one).iloc[0]["parametrization"] == "sp"
    for table in (pd.concat([one, other]), pd.concat([one, other]).drop(columns="run_id")):
        with pytest.raises(
            SchemaError, match=r"has 2 runs of lr 0.001 and seed 0, and the table has no column parametrization"
        ):
            best_rates(table)
    both = pd.concat([one.assign(parametrization="sp"), other.assign(parametrization="completep")])
    assert best_rates(both)["lr"].to_numpy() == pytest.approx([6e-3, 3e-3])


def test_an_optimum_on_the_edge_is_the_best_tried_and_said():
    made = best_rates(grid(math.log(1e-4))).iloc[0]
    assert (made["status"], made["lr"]) == ("boundary", RATES[0])
    assert "# boundary: the best of 6 tried" in tuned_toml(best_rates(grid(math.log(1e-4))))


def test_lost_runs_bracket_from_above():
    table = grid(math.log(2.0e-2))
    hit = (table["lr"] > 1e-2) & (table["seed"] == 0)
    table["status"] = table["status"].where(~hit, "diverged")
    table["loss"] = table["loss"].where(~hit)
    made = best_rates(table).iloc[0]
    assert made["best"] == 8e-3  # one lost seed is enough to refuse a learning rate
    assert made["lr"] <= 1.6e-2


@pytest.mark.parametrize(
    ("change", "told"),
    [({"lr": np.nan}, "no run has a learning rate"), ({"drop": "loss"}, "lacks loss"), ({"tokens": [1.0, 2.0]}, "several tokens")],
)  # fmt: skip
def test_unusable_tables_are_refused(change, told):
    table = grid()
    if "drop" in change:
        table = table.drop(columns=change["drop"])
    else:
        for name, value in change.items():
            table[name] = np.resize(value, len(table))
    with pytest.raises(SchemaError, match=told):
        best_rates(table)


SWEEP = """
name = "stage2"
seeds = [1, 2]
[run]
corpus = "automaton"
corpus_options = { width = 4 }
tokens = 512
batch = 2
[[shapes]]
depth = 1
width = 8
heads = 1
ffn_dim = 16
vocab = 8
context = 32
"""


def test_the_entries_go_into_a_sweep_file(tmp_path, capsys):
    for lr in RATES:
        write_run(tmp_path / "runs", config(lr=float(lr), seed=0), 1.0 + 0.02 * math.log(lr / 5e-3) ** 2)
    entries = tmp_path / "tuned.toml"
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", str(tmp_path / "runs"), "--out", str(entries)])
    assert stopped.value.code == 0
    assert "1 of 1 optima" in capsys.readouterr().err
    path = tmp_path / "stage2.toml"
    path.write_text(SWEEP + entries.read_text())
    runs = expand(load_sweep(path)).runs
    assert [r.lr for r in runs] == [pytest.approx(5e-3, rel=1e-3)] * 2


def test_an_open_optimum_makes_exit_code_1(tmp_path, capsys):
    for lr in RATES:
        write_run(tmp_path / "runs", config(lr=float(lr), seed=0), 1.0 + lr)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["tune", str(tmp_path / "runs")])
    assert stopped.value.code == 1
    told = capsys.readouterr()
    assert "lr = 0.001  # boundary" in told.out
    assert "0.001 is the best of 6 learning rates tried" in told.err
