"""What the depth report lets people quote: tables made to mislead it, and what its labels and sentences then say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from scalinglab import cli
from scalinglab.depth_benefit import depth_benefit
from scalinglab.depth_benefit.labels import Evidence, Verdict, confounded_study, decide, same_in_practice
from scalinglab.depth_benefit.phrasing import REFUSALS, beyond, compute_worth
from scalinglab.errors import ConfigError
from scalinglab.published import depthbench
from scalinglab.report.html.sections import answers
from scalinglab.report.html.wording import WORDS, worded

DEPTHS = (4, 8, 16, 32, 64)
BEST = 4e-3  # learning rate


def table(gap=(0.0, 0.0), seeds=3, sigma=0.0015, rng=0, rates=(None,), drift=(0.0, 0.0), curve=0.0):
    """Two architectures of 100M parameters at five depths; gap, drift: nats and shift of ln(best rate) from depth 4 to 64."""
    noise = np.random.default_rng(rng)
    rows = []
    for k, a in enumerate(("pre_ln", "hc")):
        for depth in DEPTHS:
            x = math.log(depth / 16) / math.log(16)  # -1/2 to 1/2
            for seed in range(seeds):
                luck = sigma * noise.standard_normal()
                for lr in rates:
                    off = 0.0 if lr is None else math.log(lr / BEST) - drift[k] * (x + 0.5)
                    loss = 3.0 - gap[k] * x + curve * x * x + 0.0155 * off**2 + luck
                    rows.append({
                        "run_id": f"{a}-{depth}-{seed}-{lr}", "architecture": a, "depth": depth, "params": 1e8,
                        "width": round(math.sqrt(1e8 / 12 / depth)), "tokens": 2e9, "seed": seed, "loss": loss,
                        **({} if lr is None else {"lr": lr}),
                    })  # fmt: skip
    return pd.DataFrame(rows)


def asked(runs, **more):
    return depth_benefit(runs, draws=199, reanalyse=False, **more)


# ---- learning rates and the study ---------------------------------------------------------------------------------------
def test_a_drift_of_one_optimum_makes_no_dependence():
    """At one learning rate the drift of Pre-LN's optimum looks like a difference; swept, it is gone."""
    fixed = asked(table(rates=(BEST,), drift=(-2.0, 0.0)))
    assert fixed.verdicts["hc"].label == "CONFOUNDED_LR"
    contrast = fixed.gate.contrasts.loc["hc"]
    assert contrast["low"] > 0  # the tests alone would say that they differ
    assert fixed.study == "ARCH_UNRESOLVED"
    assert fixed.study_reason.startswith("learning rates may explain a difference")
    assert "Not a claim: learning rates" in fixed.sentences["interaction"]
    assert any("sweep the learning rate at every depth" in t for t in fixed.advice)
    assert answers(fixed)[-1].endswith("learning rates may explain what the tests say.")
    swept = asked(table(rates=[BEST * 2.0**k for k in range(-5, 2)], drift=(-2.0, 0.0)))
    assert swept.study == "ARCH_INDEPENDENT"


def verdict(label, also=()):
    return Verdict(label, "", "DEPTH_BENEFIT", dict.fromkeys(also, ""), ())


DEPENDENT, EQUAL = ("ARCH_DEPENDENT", "x"), ("ARCH_INDEPENDENT", "x")


@pytest.mark.parametrize(
    ("study", "labels", "limits", "expected"),
    [
        (DEPENDENT, {"r": "CONFOUNDED_LR", "a": "DEPTH_BENEFIT"}, {"a": (0.1, 0.2)}, "ARCH_UNRESOLVED"),
        (DEPENDENT, {"r": "EQUIVALENT", "a": "CONFOUNDED_LR"}, {"a": (0.1, 0.2)}, "ARCH_UNRESOLVED"),
        (DEPENDENT, {"r": "EQUIVALENT", "a": "CONFOUNDED_LR", "b": "DEPTH_HARM"}, {"a": (0.1, 0.2), "b": (-0.2, -0.1)}, "ARCH_DEPENDENT"),
        (DEPENDENT, {"r": "EQUIVALENT", "a": "DEPTH_HARM", "b": "CONFOUNDED_LR"}, {"a": (-0.2, -0.1), "b": (-0.1, 0.1)}, "ARCH_DEPENDENT"),
        (DEPENDENT, {"r": "CONFOUNDED_N", "a": "CONFOUNDED_N"}, {"a": (0.1, 0.2)}, "ARCH_DEPENDENT"),
        (EQUAL, {"r": "EQUIVALENT", "a": "CONFOUNDED_LR"}, {"a": (-0.1, 0.1)}, "ARCH_UNRESOLVED"),
        (EQUAL, {"r": "EQUIVALENT", "a": "FRAGILE"}, {"a": (-0.1, 0.1)}, "ARCH_INDEPENDENT"),
    ],
)  # fmt: skip
def test_whose_confound_unmakes_the_study(study, labels, limits, expected):
    verdicts = {a: verdict(v) for a, v in labels.items()}
    assert confounded_study(study, verdicts, limits, "r")[0] == expected


def test_a_confound_behind_the_label_counts_as_well():
    verdicts = {"r": verdict("NOT_IDENTIFIED", also=("CONFOUNDED_LR",)), "a": verdict("DEPTH_BENEFIT")}
    assert confounded_study(DEPENDENT, verdicts, {"a": (0.1, 0.2)}, "r")[0] == "ARCH_UNRESOLVED"


def test_the_same_best_rate_at_all_depths_is_no_common_rate():
    swept = asked(table(rates=(BEST / 4, BEST / 2, BEST, 2 * BEST, 4 * BEST)))
    assert "CONFOUNDED_LR" not in {v for a in swept.verdicts.values() for v in (a.label, *a.also)}
    two = asked(table(rates=(BEST, 2 * BEST)))  # no bracket
    assert set(two.label.values()) == {"CONFOUNDED_LR"}


# ---- sentences ------------------------------------------------------------------------------------------------------------
def test_two_equal_ends_say_nothing_of_what_lies_between():
    made = asked(table(curve=0.2))
    assert "between" not in made.sentences["reading/hc"]
    assert "hc: d/L 5.64 and 361 were equivalent to within the margin" in made.sentences["reading/hc"]


def test_refused_labels_stand_behind_their_sentences():
    made = asked(table(gap=(0.002, 0.1), rates=(BEST,)))
    assert made.label["pre_ln"] == "CONFOUNDED_LR"
    assert made.label["hc"].startswith("DEPTH_BENEFIT")
    assert "Not a claim: learning rate may explain it (one learning rate" in made.sentences["effect/pre_ln"]
    assert "Not a claim" not in made.sentences["effect/hc"]
    mixed = asked(table().assign(eval_dataset=["a", "b"] * 15))
    assert set(mixed.label.values()) == {"INVALID_DATA"}
    assert all(k.startswith("label/") for k in mixed.sentences)


def test_words_of_refusals_agree_between_text_and_page():
    told = {k: w.short[0].lower() + w.short[1:] for k, w in WORDS.items() if w.tone == "refused" and k in REFUSALS}
    assert told == REFUSALS


def test_better_or_worse_only_where_the_interval_says_so():
    made = asked(table(gap=(-0.0035, 0.05)))
    low, high = made.outcome.effects.pick("E1", "pre_ln").interval()
    assert low < 0 < high
    assert "it is open whether pre_ln models" in made.sentences["effect/pre_ln"]
    assert "hc models with 64 layers reached lower loss than 4-layer models" in made.sentences["effect/hc"]
    assert "curves of loss over depth are not parallel, F(" in made.sentences["interaction"]
    same = asked(table())
    assert same.study == "ARCH_INDEPENDENT"
    assert "unresolved" not in same.sentences["interaction"]


def test_compute_beyond_tenfold_is_told_in_words():
    assert compute_worth([math.log(1.15), math.log(1.13), math.log(1.17)]) == "15 % [13, 17]"
    assert compute_worth([math.log(1.2), -9.0, 9.0]) == "20 % [over 90 % less, more than 10-fold]"
    assert beyond(math.log(9.9)) == ""


# ---- unequal sizes ---------------------------------------------------------------------------------------------------------
def test_sizes_that_work_against_the_effect_cannot_explain_it():
    bench = asked(depthbench())
    against = [a for a, v in bench.verdicts.items() if v.understated]
    assert against == ["pre_ln", "moda"]
    for a in against:
        v = bench.verdicts[a]
        assert v.label == "CONFOUNDED_N"
        assert "unequal sizes can't explain that, and correcting them makes it larger" in v.reason
        assert "may explain" not in bench.sentences[f"effect/{a}"]
        assert "may explain" not in worded(v.label, v).short
    first = next(t for t in answers(bench) if "pre_ln" in t)
    assert "pre_ln and moda: unequal sizes can't explain it" in first
    assert "may explain" in worded("CONFOUNDED_N", bench.verdicts["hc"]).short


def evidence(b, **more):
    return Evidence(b, 0.002, 20, (b - 0.0042, b + 0.0042), (b - 0.0034, b + 0.0034), 1e-6, 0.009, mismatch_needed=True, correction_available=False, **more)  # fmt: skip


@pytest.mark.parametrize(
    ("b", "off", "against"),
    [(-0.02, (0.08, 0.0), True), (0.02, (0.08, 0.0), False), (0.02, (-0.08, 0.0), True), (-0.02, (0.0, 0.1), True),
     (-0.02, (0.08, -0.1), False), (-0.003, (0.08, 0.0), False)],
)  # fmt: skip
def test_which_mismatch_works_against_an_effect(b, off, against):
    made = decide(evidence(b, dln_params=off[0], dln_tokens=off[1]))
    assert made.label == "CONFOUNDED_N"
    assert made.understated == against
    assert ("can't explain" in made.reason) == against


# ---- fragile ----------------------------------------------------------------------------------------------------------------
def test_moving_within_the_margin_is_no_fragility():
    assert same_in_practice("EQUIVALENT", "DEPTH_HARM_TRIVIAL")
    assert same_in_practice("DEPTH_BENEFIT_TRIVIAL", "DEPTH_HARM_TRIVIAL")
    assert not same_in_practice("EQUIVALENT", "INCONCLUSIVE")
    assert not same_in_practice("DEPTH_BENEFIT", "DEPTH_BENEFIT_TRIVIAL")
    near = Evidence(0.001, 0.002, 20, (-0.0032, 0.0052), (-0.0024, 0.0044), 0.5, 0.009, deletions={"run 1": "DEPTH_HARM_TRIVIAL"})  # fmt: skip
    assert decide(near).label == "EQUIVALENT"


# ---- runs -------------------------------------------------------------------------------------------------------------------
def test_depths_that_cannot_be_compared_are_told():
    runs = table().assign(tokens=lambda t: np.where(t["depth"] == 64, 2.4e9, 2e9))
    told = {w.code: w for w in asked(runs).warnings}["RUNS_LEFT_OUT"]
    assert told.severity == "warn"
    assert "6 runs at depth 64" in told.message
    assert "tokens 2.4e+09 where the others have 2e+09" in told.message
    assert "RUNS_LEFT_OUT" not in {w.code for w in asked(table()).warnings}


def blown(runs):
    return runs.assign(loss=runs["loss"].where(~runs["run_id"].isin(["pre_ln-64-0-None", "pre_ln-64-1-None"]), 10.7))


def test_a_loss_like_chance_is_named_and_can_be_counted_as_lost():
    seen = asked(blown(table()))
    told = next(w.message for w in seen.warnings if w.code == "LOSS_OUTLIER")
    assert "pre_ln-64-0-None (loss 10.7, pre_ln 64x361)" in told
    assert "--diverged-above 4.5" in told
    lost = depth_benefit(blown(table()), draws=199, diverged_above=4.5)
    assert len(lost.intake.lost) == 2
    assert "2 runs with a final loss above 4.5 count as lost" in {w.message for w in lost.warnings}
    assert "LOSS_OUTLIER" not in {w.code for w in lost.warnings}
    assert lost.tables["T7"]["diverged"].sum() == 2
    t6 = lost.tables["T6"].query("analysis == 'N is total parameters'").set_index("architecture")
    assert t6["estimate"].to_dict() == pytest.approx(lost.effects.query("estimand == 'E1'").set_index("architecture")["estimate"].to_dict())  # fmt: skip
    with pytest.raises(ConfigError, match="diverged_above=-1"):
        asked(table(), diverged_above=-1)


def test_the_command_line_counts_diverged_runs(tmp_path, capsys):
    blown(table()).to_csv(tmp_path / "runs.csv", index=False)
    with pytest.raises(SystemExit):
        cli.main(["depth", str(tmp_path / "runs.csv"), "--diverged-above", "4.5", "--no-reanalyse", "--draws", "99"])
    assert "2 runs diverged or were stopped (pre_ln 2)" in capsys.readouterr().out


# ---- re-analyses and exact tests ----------------------------------------------------------------------------------------
def test_what_the_design_cannot_bear_is_no_instability():
    made = depth_benefit(table(gap=(0.05, 0.06)), draws=199)
    own = made.tables["T6"].query("analysis == 'own error'")
    assert set(own["label"]) == {"NOT_IDENTIFIED"}  # two degrees of freedom
    assert not own["counts"].any()
    v = made.verdicts["hc"]
    assert v.stable == v.analyses
    assert v.impossible == 1
    assert "1 more can't be made with this design" in v.robustness


def test_three_sign_flips_say_what_p_they_can_reach():
    runs = table(gap=(0.0, 0.05))
    made = asked(runs, method="pairs", test="sign_flip")
    e = made.outcome.effects.pick("E1", "hc")
    pairs = runs[(runs["architecture"] == "hc") & runs["depth"].isin([4, 64])].pivot_table(index="seed", columns="depth", values="loss")  # fmt: skip
    gap = (pairs[4] - pairs[64]).to_numpy()
    assert e.se == pytest.approx(gap.std(ddof=1) / math.sqrt(3))  # the interval is that of the pairs
    assert "smallest p that this test can give with so few runs is 0.25" in made.sentences["reading/hc"]
    assert "MDE" not in " ".join(made.sentences.values())
    assert "t(" not in made.sentences["effect/hc"]
    assert "bootstrap" not in made.study_reason + made.sentences["interaction"]
    assert any("sign flips need 7 pairs" in t for t in made.advice)  # two tests: 2 / 2^7 is below .025


def test_advice_of_sign_flips_is_their_count():
    """2 / 2^n <= alpha is reached at n = 1 + log2(1 / alpha)."""
    for alpha in (0.05, 0.025, 0.05 / 3):
        n = 1 + math.ceil(math.log2(1 / alpha))
        assert 2 / 2**n <= alpha < 2 / 2 ** (n - 1)
