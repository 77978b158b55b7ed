"""The audit of a design: against published shapes, Monte-Carlo refits, and designs whose trouble is known."""

from __future__ import annotations

import itertools
import os
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.depth_benefit.intake import take_in
from scalinglab.design import Audit, audit, predicted_se
from scalinglab.detection import detectable
from scalinglab.errors import ConfigError, FitError, SchemaError
from scalinglab.fitting import fit
from scalinglab.information import information, plausible
from scalinglab.laws import LAWS, Law
from scalinglab.objectives import Gaussian
from scalinglab.readers import read_runs

SHARED = Path(os.environ.get("SCALINGLAB_SHARED", Path(__file__).resolve().parents[2] / "shared"))
BESIROGLU_POINTS = SHARED / "data" / "chinchilla_besiroglu.csv"
BESIROGLU = {"E": 1.8172, "A": 477.84, "alpha": 0.34731, "B": 2143.86, "beta": 0.36718}  # arXiv:2404.10102
SHAPE = {**BESIROGLU, "gamma1": 0.05, "gamma2": 0.03}

# DepthBench (arXiv:2609.32534), published shapes: depth, width, ffn, tokens; about 20 tokens per total parameter
LADDER = [
    (24, 672, 1792, 4e9), (18, 768, 2048, 4e9), (12, 896, 2400, 4e9), (28, 800, 2144, 6e9), (21, 896, 2400, 6e9),
    (14, 1056, 2816, 6e9), (32, 896, 2400, 8e9), (24, 1024, 2736, 8e9), (16, 1216, 3248, 8e9), (34, 992, 2656, 10e9),
    (26, 1120, 2992, 10e9), (17, 1344, 3584, 10e9),
]  # fmt: skip
LARGE = [
    (28, 2048, 6144, 128),
    (40, 1728, 5184, 108),
    (54, 1504, 4512, 94),
]  # 1.6B: head size; 16 heads, 8 key/value heads


def ladder(*, backbone: bool = False, seeds: int = 3, extra: tuple[float, ...] = ()) -> pd.DataFrame:
    """The ladder with `seeds` runs a shape, and single runs of the nine smallest shapes at `extra` times their tokens."""
    rows = [(L, d, L * (4 * d * d + 3 * d * f + 2 * d) + d, D) for L, d, f, D in LADDER]
    rows += [(L, d, L * (2 * d * 16 * h + 2 * d * 8 * h + 3 * d * f + 2 * d) + d, 32e9) for L, d, f, h in LARGE]
    rows = [(L, d, n if backbone else n + 2 * 50280 * d, D) for L, d, n, D in rows]
    many = rows * seeds + [(L, d, n, D * k) for k in extra for L, d, n, D in rows[:9]]
    table = pd.DataFrame(many, columns=["depth", "width", "params", "tokens"])
    return table.assign(run_id=[f"r{i}" for i in range(len(table))], seed=np.arange(len(table)))


def factorial(*, seeds: int = 1, architectures: int = 1) -> pd.DataFrame:
    """4 sizes x 4 depths x 3 budgets x seeds x architectures, matched exactly in N."""
    cells = itertools.product((5e7, 2e8, 8e8, 2e9), (8, 16, 32, 64), (5, 20, 80), range(seeds), range(architectures))
    rows = [(n, L, np.sqrt(n / (12 * L)), n * k, s, f"arch{a}") for n, L, k, s, a in cells]
    table = pd.DataFrame(rows, columns=["params", "depth", "width", "tokens", "seed", "architecture"])
    table["run_id"] = [f"r{i}" for i in range(len(table))]
    table["status"] = "finished"
    return table


# ---- Fisher information ------------------------------------------------------------------------------------------------------
def test_fixed_tokens_per_parameter_ladder_is_not_identified():
    """Predicted for 45 runs, sigma .003 nats, published parameters: kappa 7.2e3 centred, 7.1e4 raw, SE .104, .76, .73.

    The head counts of the three 1.6B shapes are not published with the table; eight key/value heads reproduce it.
    """
    made = information("chinchilla", BESIROGLU, ladder(), sigma=0.003)
    assert made.condition == pytest.approx(7.2e3, rel=0.01)
    assert made.condition_raw == pytest.approx(7.1e4, rel=0.01)
    assert made.se["E"] == pytest.approx(0.104, rel=0.03)
    assert made.se["alpha"] == pytest.approx(0.76, rel=0.03)
    assert made.se["beta"] == pytest.approx(0.73, rel=0.03)
    assert {"alpha", "beta"} <= set(made.weak)
    backbone = information("chinchilla", BESIROGLU, ladder(backbone=True), sigma=0.003)
    assert backbone.condition_raw == pytest.approx(1.3e4, rel=0.03)
    assert backbone.se["alpha"] == pytest.approx(0.106, rel=0.05)
    assert backbone.se["beta"] == pytest.approx(0.146, rel=0.05)


def test_quarter_and_fourfold_budgets_identify_it():
    made = information("chinchilla", BESIROGLU, ladder(extra=(0.25, 4.0)), sigma=0.003)
    assert made.condition == pytest.approx(99.5, rel=0.02)
    assert made.condition_raw == pytest.approx(9.1e2, rel=0.01)
    assert made.se["E"] == pytest.approx(0.014, rel=0.03)
    assert made.se["alpha"] == pytest.approx(0.012, rel=0.03)
    assert made.se["beta"] == pytest.approx(0.004, rel=0.05)
    assert not made.weak


@pytest.mark.shared
@pytest.mark.skipif(not BESIROGLU_POINTS.is_file(), reason="the public run logs (../shared/data) are not here")
def test_chinchilla_points_are_well_conditioned():
    """Condition 30 and 206 at the least-squares fit of the 240 points (33 and 220 at the published Huber parameters)."""
    d = pd.read_csv(BESIROGLU_POINTS)
    d = d[d["in_fit_240"] == 1]
    least_squares = {"E": 1.8646, "A": 593.0, "alpha": 0.3603, "B": 4876.0, "beta": 0.4059}
    made = information("chinchilla", least_squares, d, sigma=0.02)
    assert made.condition == pytest.approx(30, rel=0.02)
    assert made.condition_raw == pytest.approx(206, rel=0.005)
    published = information("chinchilla", BESIROGLU, d, sigma=0.02)
    assert published.condition == pytest.approx(33.0, rel=0.01)
    assert published.condition_raw == pytest.approx(219.6, rel=0.01)


def test_predicted_errors_are_those_of_simulated_fits():
    """400 refits to losses drawn at the truth: SDs within Monte-Carlo error (3.5 %) and curvature of the prediction."""
    runs = factorial(seeds=2)
    sigma, tau = 0.004, 0.003
    clean = LAWS["shape"].loss(SHAPE, runs)
    rng = np.random.default_rng(0)
    cell = np.asarray(runs.groupby(["params", "tokens", "depth"]).ngroup())
    effect = tau * rng.standard_normal((400, cell.max() + 1))[:, cell]
    draws = np.log(clean + effect + sigma * rng.standard_normal((400, len(runs))))
    start = fit("shape", runs.assign(loss=np.exp(draws[0])), objective=Gaussian(variance="constant"))
    seen = start.refit(log_loss=draws).params.std(ddof=1)
    said = predicted_se("shape", SHAPE, runs, sigma=sigma, tau=tau)
    names = ["E", "alpha", "beta", "gamma1", "gamma2"]
    np.testing.assert_allclose(seen[names], said[names], rtol=0.14)
    # without tau the errors would be called too small
    assert (predicted_se("shape", SHAPE, runs, sigma=sigma)[names] < 0.85 * seen[names]).all()


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-3, 0.1), st.floats(1.1, 10), st.integers(2, 4), st.integers(0, 99))
def test_predicted_errors_scale_as_they_must(sigma, factor, copies, seed):
    runs = factorial().sample(frac=0.8, random_state=seed)
    base = predicted_se("chinchilla", BESIROGLU, runs, sigma=sigma)
    np.testing.assert_allclose(
        predicted_se("chinchilla", BESIROGLU, runs, sigma=factor * sigma), factor * base, rtol=1e-6
    )
    shuffled = predicted_se("chinchilla", BESIROGLU, runs.sample(frac=1.0, random_state=seed + 1), sigma=sigma)
    np.testing.assert_allclose(shuffled, base, rtol=1e-6)
    more = pd.concat([runs.assign(run_id=runs["run_id"] + f"/{i}") for i in range(copies)])
    np.testing.assert_allclose(
        predicted_se("chinchilla", BESIROGLU, more, sigma=sigma), base / np.sqrt(copies), rtol=1e-6
    )
    # more checkpoints of the same runs are not more runs, and seeds do not average the misfit of a cell away
    same = pd.concat([runs] * copies)
    np.testing.assert_allclose(predicted_se("chinchilla", BESIROGLU, same, sigma=sigma), base, rtol=1e-6)
    shapes = predicted_se("chinchilla", BESIROGLU, more, sigma=1e-4 * sigma, tau=sigma)
    np.testing.assert_allclose(shapes, base, rtol=1e-5)


def test_what_a_single_budget_leaves_open():
    runs = factorial().assign(tokens=1e10)
    made = information("chinchilla", BESIROGLU, runs, sigma=0.003)
    assert set(made.open) == {"E", "B", "beta"}
    assert np.isinf(made.se["beta"])
    assert np.isfinite(made.se["alpha"])
    assert made.condition == np.inf


def test_predicted_se_refuses():
    runs = factorial()
    with pytest.raises(ConfigError, match="sigma is 0"):
        predicted_se("chinchilla", BESIROGLU, runs, sigma=0.0)
    with pytest.raises(ConfigError, match="tau is -1"):
        predicted_se("chinchilla", BESIROGLU, runs, sigma=0.1, tau=-1.0)
    with pytest.raises(ConfigError, match="needs a value of 'gamma1'"):
        predicted_se("shape", BESIROGLU, runs, sigma=0.1)
    with pytest.raises(SchemaError, match="'tokens'"):
        predicted_se("chinchilla", BESIROGLU, runs.drop(columns="tokens"), sigma=0.1)
    with pytest.raises(FitError, match="no finite loss"):
        predicted_se("chinchilla", BESIROGLU, runs.assign(tokens=0.0), sigma=0.1)
    with pytest.raises(ConfigError, match="outside the algebra"):
        predicted_se("critical_depth", {}, runs, sigma=0.1)
    with pytest.raises(ConfigError, match="no literature values"):
        plausible(LAWS["critical_depth"], runs)


@pytest.mark.parametrize("key", [k for k, law in LAWS.items() if law.in_algebra])
def test_plausible_truths_give_plausible_losses(key):
    runs = factorial()
    loss = LAWS[key].loss(plausible(LAWS[key], runs), runs)
    assert 1.8 < np.median(loss) < 4.5


# ---- smallest visible effects ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("sigma", "seeds", "published"),
    [
        (0.003, 2, 0.0170),
        (0.003, 3, 0.0092),
        (0.003, 5, 0.0061),
        (0.002, 3, 0.0061),
        (0.005, 5, 0.0101),
        (0.01, 10, 0.0133),
    ],
)
def test_two_arm_effects_match_the_planning_table(sigma, seeds, published):
    assert detectable(sigma * np.sqrt(2 / seeds), 2 * (seeds - 1)) == pytest.approx(published, abs=6e-5)


@pytest.mark.parametrize(
    ("depths", "tau", "published"),
    [
        ((16, 24, 32), 0.0, 0.057), ((16, 24, 32), 0.002, 0.088), ((16, 24, 32, 42, 70), 0.0, 0.0066),
        ((16, 24, 32, 42, 70), 0.002, 0.0101), ((16, 24, 32, 42, 70, 84), 0.0, 0.0046),
    ],
)  # fmt: skip
def test_slope_effects_match_the_planning_table(depths, tau, published):
    rows = [(3e8, L, np.sqrt(3e8 / (12 * L)), 8e9, s) for L in depths for s in range(3)]
    runs = pd.DataFrame(rows, columns=["params", "depth", "width", "tokens", "seed"])
    made = audit(runs, sigma=0.003, tau=tau).mde.loc["slope of loss per ln depth at fixed size"]
    assert made["mde"] == pytest.approx(published, rel=0.02)
    assert made["df"] == len(depths) - 2


# ---- audit ---------------------------------------------------------------------------------------------------------------------
def test_a_full_design_has_no_trouble_and_gets_the_shape_law():
    runs = factorial(seeds=2, architectures=2)
    before = runs.copy(deep=True)
    made = audit(runs, sigma=0.003)
    pd.testing.assert_frame_equal(runs, before)
    assert made.codes == []
    assert made.recommended == "shape"
    assert made.laws.loc["shape", "estimable"] == "yes"
    assert made.counts["shapes"] == 16
    assert made.counts["replicate df"] == 96
    assert len(made.tiers) == 4
    assert (made.tiers["seeds_low"] == 2).all()
    assert set(made.matching["level"]) == {"ok"}
    assert made.sigma_source == "given"
    assert made.se["shape"]["gamma1"] < 0.01
    assert made.add == ()
    text = made.summary()
    for part in ("Recommended law: shape", "Smallest visible effects", "Trouble: none found", "Can't be said"):
        assert part in text
    assert list(made.to_frame()) == ["check", "value", "level", "code", "action"]
    assert "no trouble" in repr(made)


def test_the_ladder_falls_back_to_the_ray_law():
    made = audit(ladder())
    assert "RAY_DESIGN" in made.codes
    assert "FEW_REPLICATES" not in made.codes
    assert made.laws.loc["chinchilla", "estimable"] == "no"
    assert {"alpha", "beta"} <= set(made.laws.loc["chinchilla", "not_estimable"].split(", "))
    assert made.recommended == "ray"
    assert made.laws.loc["ray", "condition_raw"] == pytest.approx(6.1e2, rel=0.05)
    assert any("0.25x and 4x token budgets" in a for a in made.add)


def test_the_iso_total_grid_is_mismatched_in_backbone_size():
    """DepthBench's 400M grid: 284 to 345 M backbone parameters (+19 %), 399 to 414 M in all."""
    from scalinglab.tables import table_path

    runs = pd.read_csv(table_path("depthbench"))
    made = audit(runs)
    assert "MISMATCH_N" in made.codes
    line = made.matching.set_index("group").loc["400M"]
    assert line["dln_params_backbone"] == pytest.approx(np.log(344.87 / 284.25), abs=1e-3)
    assert line["dln_params_total"] == pytest.approx(np.log(414.09 / 399.36), abs=1e-3)
    assert made.recommended is None
    assert "NARROW_SIZES" in made.codes
    assert any("resized" in a for a in made.add)


def test_alike_shapes_and_one_size_are_named():
    runs = factorial()
    alike = runs[runs["depth"] == 16]
    made = audit(alike)
    assert "LOW_SHAPE_DIVERSITY" in made.codes
    assert made.laws.loc["shape", "estimable"] == "no"
    assert made.recommended == "chinchilla"
    assert any("wider and deeper runs at size tier 1" in a and "32 x " in a for a in made.add)
    assert audit(runs[runs["tokens"] == runs["params"] * 20]).recommended == "ray"


def test_seed_noise_is_estimated_where_seeds_are():
    runs = factorial(seeds=3)
    rng = np.random.default_rng(0)
    runs["loss"] = LAWS["shape"].loss(SHAPE, runs) + 0.005 * rng.standard_normal(len(runs))
    made = audit(runs)
    assert made.sigma == pytest.approx(0.005, rel=0.25)
    assert "96 degrees of freedom" in made.sigma_source
    assert "assumed" in audit(runs.drop(columns="loss")).sigma_source


def test_a_fit_brings_its_own_truth():
    runs = factorial()
    runs["loss"] = LAWS["shape"].loss(SHAPE, runs) + 0.003 * np.random.default_rng(1).standard_normal(len(runs))
    made_fit = fit("shape", runs)
    made = audit(runs, law=made_fit, sigma=0.003)
    assert dict(made.information["shape"].params) == pytest.approx(dict(made_fit.params))
    formula = audit(runs, law="E + A*params**-alpha", params={"E": 2.0, "A": 400.0, "alpha": 0.3}, sigma=0.003)
    assert "formula" in formula.laws.index
    with pytest.raises(ConfigError, match="no literature values"):
        audit(runs, law="E + A*params**-alpha")


def test_rows_that_should_not_be_there():
    runs = factorial(seeds=2).drop(columns="seed")
    runs["loss"] = LAWS["shape"].loss(SHAPE, runs) + 0.003 * np.random.default_rng(1).standard_normal(len(runs))
    copied = pd.concat([runs, runs.iloc[[3]].assign(run_id="copy")], ignore_index=True)
    made = audit(copied)
    assert "DUPLICATE_RUNS" in made.codes
    assert "copy" in made.to_frame().set_index("code").loc["DUPLICATE_RUNS", "action"]
    late = runs.assign(status=["running", *["finished"] * (len(runs) - 1)])
    assert "UNFINISHED_SCHEDULE" in audit(late).codes
    late = runs.drop(columns="status").assign(step=90, max_steps=[100, *[90] * (len(runs) - 1)])
    assert "UNFINISHED_SCHEDULE" in audit(late).codes
    lost = runs.assign(status=["diverged", *["finished"] * (len(runs) - 1)])
    assert "STOPPED_RUNS" in audit(lost).codes
    assert audit(lost).counts["runs"] == len(runs) - 1
    twice = pd.concat([runs, runs.assign(tokens=runs["tokens"] / 2)], ignore_index=True)
    assert "CHECKPOINTS" in audit(twice).codes


def test_values_of_zero_are_read_as_empty_and_said():
    runs = factorial().assign(loss=3.0)
    for column in ("params", "tokens", "depth"):
        made = audit(runs.assign(**{column: runs[column].where(np.arange(len(runs)) > 2, 0)}))
        assert "NOT_POSITIVE" in made.codes
        assert column in made.to_frame().set_index("code").loc["NOT_POSITIVE", "action"]
    assert "NOT_POSITIVE" not in audit(runs).codes


def test_units_are_suspected():
    runs = factorial().drop(columns=["depth", "width"])
    assert "UNIT_SUSPICION" in audit(runs.assign(params=runs["params"] / 1e6)).codes
    mixed = runs.assign(params=np.where(np.arange(len(runs)) < 10, runs["params"] / 1e6, runs["params"]))
    made = audit(mixed).to_frame().set_index("code").loc["UNIT_SUSPICION"]
    assert made["level"] == "block"
    assert "params" in made["action"]


COLUMNS = ["params", "depth", "width", "tokens", "seed", "architecture", "run_id", "status", "loss", "match_group"]


@settings(max_examples=20, deadline=None)
@given(st.sets(st.sampled_from(COLUMNS), min_size=1), st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_columns_and_few_rows_are_audited(kept, count, random):
    """Tables without columns, with gaps, with one row: no crash, and what is missing is said."""
    runs = factorial().assign(loss=3.0, match_group="g").sample(count, random_state=random.randint(0, 999))
    runs = runs[[c for c in COLUMNS if c in kept]]
    if random.random() < 0.3 and "tokens" in runs:
        runs = runs.assign(tokens=runs["tokens"].where(np.arange(len(runs)) > 0))
    made = audit(runs)
    assert isinstance(made, Audit)
    assert made.summary()
    if "params" not in kept:
        assert any("no parameter count" in u for u in made.unknown)
    if "tokens" not in kept:
        assert any("tokens" in u for u in made.unknown)
    assert set(made.laws["estimable"]) <= {"yes", "weakly", "no", "unknown"}


def test_audit_refuses():
    runs = factorial()
    with pytest.raises(SchemaError, match="give a run table"):
        audit({"params": [1e8]})
    with pytest.raises(SchemaError, match="no rows to audit"):
        audit(runs.iloc[:0])
    with pytest.raises(ConfigError, match="sigma is -1"):
        audit(runs, sigma=-1.0)
    with pytest.raises(ConfigError, match="tau is nan"):
        audit(runs, tau=float("nan"))
    with pytest.raises(ConfigError, match="name it with law="):
        audit(runs, params=BESIROGLU)


def test_a_thousand_rows_take_less_than_a_second():
    runs = factorial(seeds=7, architectures=3)
    runs["loss"] = 3.0 + 0.003 * np.random.default_rng(1).standard_normal(len(runs))
    assert len(runs) == 1008
    taken = []
    for _ in range(2):
        start = time.process_time()
        audit(runs, tau=0.002)
        taken.append(time.process_time() - start)
    assert min(taken) < 1.0


# ---- what is a replicate -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("column", "values"),
    [("options", ("", '{"streams":2}')), ("corpus", ("automaton", "markov")), ("weight_decay", (0.0, 2e-4)), ("tied", (0, 1)),
     ("settings", (np.nan, '{"norm_eps":1e-6}'))],
)  # fmt: skip
def test_arms_are_no_seeds_of_each_other(column, values):
    """Two arms, 0.1 nats apart, three seeds each with SD 0.002: pooled over arms the noise would come out as 0.05."""
    rng = np.random.default_rng(0)
    cells = list(itertools.product((5e7, 2e8, 8e8), values, range(3)))
    table = pd.DataFrame(cells, columns=["params", column, "seed"]).assign(tokens=1e9)
    arm = np.array([values.index(v) if v in values else 0 for v in table[column]])
    table["loss"] = 3.0 + 0.1 * arm + rng.normal(0, 0.002, len(table))
    table["run_id"] = [f"r{i}" for i in range(len(table))]
    found = audit(table)
    assert found.counts["replicate df"] == 12  # 6 cells of 3
    assert found.sigma == pytest.approx(0.002, rel=0.5)  # chi with 12 degrees of freedom: within 0.6..1.4 at 95 %
    assert audit(table.drop(columns=column)).sigma > 0.03


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [("options", ("", '{"streams":2}'), "runs of one cell differ in options"),
     ("corpus", ("automaton", "markov"), r"losses of different corpus \(automaton, markov\) are mixed")],
)  # fmt: skip
def test_a_depth_analysis_refuses_arms_mixed_in_a_cell(column, values, message):
    table = factorial(seeds=2).assign(loss=3.0)
    table["loss"] += np.random.default_rng(0).normal(0, 0.01, len(table))
    one = table.assign(**{column: values[0]})
    assert not [why for why in take_in(one).invalid if "differ" in why or "mixed" in why]
    mixed = one.assign(**{column: np.where(one["seed"] == 0, values[0], values[1])})
    assert any(re.match(message, why) for why in take_in(mixed).invalid)
    if column != "corpus":  # arms with names of their own are fine
        named = mixed.assign(architecture=mixed[column])
        assert not [why for why in take_in(named).invalid if "differ" in why]


def test_a_law_that_a_user_added_leaves_the_audit_standing(monkeypatch):
    """It has no literature values, so it is not predicted, in a sentence; given params it is."""
    own = Law("own", "E + Q*params**-q + B*tokens**-beta")
    monkeypatch.setitem(LAWS, "own", own)
    runs = read_runs("embedded:simulated_shapes")
    report = audit(runs)
    assert "no literature values are known for Q, q of law 'own'" in report.summary()
    with pytest.raises(ConfigError, match="give params="):
        audit(runs, law="own")
    truth = {"E": 1.8, "Q": 480.0, "q": 0.35, "B": 2100.0, "beta": 0.37}
    assert audit(runs, law="own", params=truth) is not None
