"""The label engine: every label is reachable, the first rule that holds decides, and nothing else matters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.depth_benefit.labels import (
    RULES,
    Evidence,
    Label,
    Verdict,
    decide,
    kaplan_verdict,
    reading_of,
    study_label,
)
from scalinglab.errors import ConfigError
from scalinglab.hypotheses.interior import Quadratic, interior_optimum
from scalinglab.uncertainty import t_quantile


def evidence(b=0.03, se=0.004, df=20.0, margin=0.009, **more):
    h95, h90 = t_quantile(0.975, df) * se, t_quantile(0.95, df) * se
    p = 0.001 if abs(b) > h95 else 0.5
    return Evidence(b, se, df, (b - h95, b + h95), (b - h90, b + h90), more.pop("p_adj", p), margin, **more)


ALL_RULES = {  # what makes each of the rules 1-7 hold, in order
    "INVALID_DATA": {"invalid": ("losses of different eval_dataset are mixed",)},
    "NOT_IDENTIFIED": {"condition": 1001.0},
    "UNTESTABLE_N": {"p_min": 0.0625, "alpha_adj": 0.05},
    "CONFOUNDED_LR": {"lr_edge": ("depth 42 at lr 0.002",)},
    "CONFOUNDED_N": {"mismatch_needed": True, "correction_available": False},
    "SELECTION_SENSITIVE": {"bounds": (-0.01, 0.05)},
    "FRAGILE": {"deletions": {"run 7": "INCONCLUSIVE"}},
}

CASES = [
    ("INVALID_DATA", evidence(**ALL_RULES["INVALID_DATA"])),
    ("NOT_IDENTIFIED", evidence(condition=1001.0)),
    ("NOT_IDENTIFIED", evidence(profile_open=True)),
    ("NOT_IDENTIFIED", evidence(df=2.9)),
    ("NOT_IDENTIFIED", evidence(shape_sd=0.19)),
    ("NOT_IDENTIFIED", evidence(se=math.nan)),
    ("UNTESTABLE_N", evidence(p_min=0.0625)),
    ("UNTESTABLE_N", evidence(p_min=0.01, alpha_adj=0.05 / 6)),
    ("CONFOUNDED_LR", evidence(lr_edge=("depth 16 at lr 0.01",))),
    ("CONFOUNDED_LR", evidence(lr_common=True, drift_cost=0.0151)),
    ("CONFOUNDED_N", evidence(mismatch_needed=True, correction_available=False)),
    ("CONFOUNDED_N", evidence(correction=-0.031)),
    ("SELECTION_SENSITIVE", evidence(bounds=(-0.001, 0.05))),
    ("SELECTION_SENSITIVE", evidence(bounds=(0.02, 0.05), bound_labels=("DEPTH_BENEFIT",))),
    ("SELECTION_SENSITIVE", evidence(bounds=(0.02, 0.05), composite_label="INCONCLUSIVE")),
    ("FRAGILE", evidence(deletions={"run 7": "DEPTH_BENEFIT_MATERIAL", "run 8": "INCONCLUSIVE"})),
    ("DEPTH_BENEFIT_MATERIAL", evidence()),
    ("DEPTH_BENEFIT", evidence(b=0.012)),
    ("DEPTH_BENEFIT_TRIVIAL", evidence(b=0.004, se=0.001)),
    ("DEPTH_HARM_MATERIAL", evidence(b=-0.03)),
    ("DEPTH_HARM", evidence(b=-0.012)),
    ("DEPTH_HARM_TRIVIAL", evidence(b=-0.004, se=0.001)),
    ("EQUIVALENT", evidence(b=0.001, se=0.002)),
    ("INCONCLUSIVE", evidence(b=0.004, se=0.006)),
    ("INCONCLUSIVE", evidence(b=0.03, p_adj=0.06)),  # the interval alone is not enough: Holm
    ("DEPTH_BENEFIT_MATERIAL", evidence(lr_common=True, drift_cost=0.0149)),  # half of B is the limit
    ("DEPTH_BENEFIT_MATERIAL", evidence(correction=-0.029)),
    ("DEPTH_BENEFIT_MATERIAL", evidence(mismatch_needed=True, correction_available=True)),
    ("DEPTH_BENEFIT_MATERIAL", evidence(bounds=(0.02, 0.05), bound_labels=("DEPTH_BENEFIT_MATERIAL",))),
    ("DEPTH_BENEFIT_MATERIAL", evidence(deletions={"run 7": "DEPTH_BENEFIT_MATERIAL"})),
    ("DEPTH_BENEFIT_MATERIAL", evidence(condition=1000.0, shape_sd=0.2, df=3.0, se=0.001, p_min=0.05)),
]


@pytest.mark.parametrize(("label", "given_evidence"), CASES)
def test_label(label, given_evidence):
    verdict = decide(given_evidence)
    assert verdict.label == label
    assert verdict.reason


def test_every_label_is_reached():
    """Labels of the schema: rules and readings here, modifiers and the study's below."""
    reached = {label for label, _ in CASES}
    elsewhere = {
        "INTERIOR_OPTIMUM", "MONOTONE_IN_RANGE", "OPTIMUM_UNRESOLVED", "RECIPE_LIMITED", "ARCH_DEPENDENT",
        "ARCH_INDEPENDENT", "ARCH_UNRESOLVED",
    }  # fmt: skip
    assert reached | elsewhere == set(get_args(Label))
    assert not reached & elsewhere


def test_the_first_rule_decides():
    """With rules k..7 all true, rule k decides and the others are listed."""
    names = [name for name, _ in RULES]
    assert names == list(ALL_RULES)
    for k, name in enumerate(names):
        held = {key: value for n in names[k:] for key, value in ALL_RULES[n].items()}
        verdict = decide(evidence(**held))
        assert verdict.label == name
        assert list(verdict.also) == names[k + 1 :]
        assert verdict.reading == "DEPTH_BENEFIT_MATERIAL"


def test_modifiers_are_appended_never_substituted():
    verdict = decide(evidence(modifiers=("INTERIOR_OPTIMUM", "E_COLLAPSE")))
    assert verdict.codes == ("DEPTH_BENEFIT_MATERIAL", "INTERIOR_OPTIMUM", "E_COLLAPSE")
    assert "INTERIOR_OPTIMUM" in str(verdict)
    assert replace(verdict, stable=3, analyses=4).robustness == "label stable in 3 of 4 re-analyses"
    assert Verdict("INCONCLUSIVE", "", "INCONCLUSIVE", {}, ()).robustness == "no re-analysis"


def test_absence_is_not_in_the_vocabulary():
    for _, e in CASES:
        told = str(decide(e)).lower()
        assert "no effect" not in told
        assert "no difference" not in told


def test_inconclusive_names_what_can_be_missed():
    assert "0.012" in decide(evidence(b=0.004, se=0.006, mde=0.012)).reason


def test_evidence_refuses_nonsense():
    with pytest.raises(ConfigError, match="positive number of nats"):
        evidence(margin=0.0)
    with pytest.raises(ConfigError, match="alpha"):
        evidence(alpha=1.5)


numbers = st.floats(-0.1, 0.1)
scenario = st.builds(
    evidence, b=numbers, se=st.floats(1e-4, 0.05), df=st.floats(1.0, 60.0), margin=st.floats(1e-3, 0.05),
    p_adj=st.floats(0, 1), p_min=st.floats(0, 0.1), lr_common=st.booleans(), drift_cost=st.floats(0, 0.05),
    mismatch_needed=st.booleans(), correction_available=st.booleans(), correction=numbers,
    condition=st.one_of(st.none(), st.floats(1, 5000)), shape_sd=st.one_of(st.none(), st.floats(0, 2)),
    bounds=st.one_of(st.none(), st.tuples(numbers, numbers)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(scenario)
def test_labels_are_exhaustive_and_follow_the_order(e):
    verdict = decide(e)
    assert verdict.label in get_args(Label)
    held = [name for name, rule in RULES if rule(e) is not None]
    assert verdict.label == (held[0] if held else reading_of(e)[0])


@settings(max_examples=300, deadline=None)
@given(scenario, st.floats(1.0, 20.0))
def test_a_wider_margin_only_moves_towards_immaterial(e, factor):
    order = {"MATERIAL": 0, "": 1, "TRIVIAL": 2}

    def rank(label):
        if label == "EQUIVALENT":
            return 1
        return 0 if label == "INCONCLUSIVE" else order[label.split("_", 2)[2] if label.count("_") == 2 else ""]

    before, after = reading_of(e)[0], reading_of(replace(e, margin=e.margin * factor))[0]
    assert before.split("_")[:2] == after.split("_")[:2] or {before, after} <= {"INCONCLUSIVE", "EQUIVALENT"}
    assert rank(after) >= rank(before)


@settings(max_examples=300, deadline=None)
@given(scenario, st.floats(0.1, 10.0))
def test_labels_do_not_depend_on_the_unit(e, k):
    """Nats or bits: all quantities in nats times a factor."""
    low, high = (None, None) if e.bounds is None else e.bounds
    other = replace(
        e, estimate=e.estimate * k, se=e.se * k, ci95=(e.ci95[0] * k, e.ci95[1] * k), ci90=(e.ci90[0] * k, e.ci90[1] * k),
        margin=e.margin * k, drift_cost=e.drift_cost * k, correction=e.correction * k,
        bounds=None if low is None or high is None else (low * k, high * k),
    )  # fmt: skip
    edges = (
        abs(abs(e.correction) - abs(e.estimate)), abs(e.drift_cost - abs(e.estimate) / 2), *map(abs, e.ci95),
        *(abs(abs(v) - e.margin) for v in (*e.ci95, *e.ci90)),
    )  # fmt: skip
    if min(edges) > 1e-9:  # rounding decides on an edge
        assert decide(other).label == decide(e).label


@settings(max_examples=200, deadline=None)
@given(scenario)
def test_deeper_and_shallower_are_mirror_images(e):
    mirrored = replace(
        e, estimate=-e.estimate, ci95=(-e.ci95[1], -e.ci95[0]), ci90=(-e.ci90[1], -e.ci90[0]), correction=-e.correction,
        bounds=None if e.bounds is None else (-e.bounds[1], -e.bounds[0]),
    )  # fmt: skip
    a, b = decide(e).label, decide(mirrored).label
    assert a == b.replace("HARM", "x").replace("BENEFIT", "HARM").replace("x", "BENEFIT")


# ---- study and rivals ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("label", "p", "boot", "limits", "equivalent"),
    [
        ("ARCH_DEPENDENT", 0.01, 0.02, {"a": (0.001, 0.02), "b": (-0.01, 0.01)}, False),
        ("ARCH_UNRESOLVED", 0.01, 0.2, {"a": (0.001, 0.02)}, False),  # both gates are needed
        ("ARCH_UNRESOLVED", 0.2, 0.01, {"a": (0.001, 0.02)}, False),
        ("ARCH_UNRESOLVED", 0.01, 0.01, {"a": (-0.001, 0.02)}, False),  # and a contrast
        ("ARCH_INDEPENDENT", 0.5, 0.5, {"a": (-0.001, 0.001)}, True),
        ("ARCH_UNRESOLVED", math.nan, math.nan, {"a": (0.001, 0.02)}, False),
    ],
)
def test_study_label(label, p, boot, limits, equivalent):
    assert study_label(p_gate=p, p_bootstrap=boot, contrasts=limits, equivalent=equivalent)[0] == label


def test_kaplan_verdict():
    assert kaplan_verdict(("EQUIVALENT",), decision="equivalent: all shapes")[0] == "supported"
    assert kaplan_verdict(("EQUIVALENT", "NARROW_RANGE"), decision="equivalent: x")[0] == "open"
    assert kaplan_verdict(("REFUTED", "NARROW_RANGE"), decision="refuted: x") == ("refuted", "x")
    assert kaplan_verdict(("OPEN",), decision="open: x")[0] == "open"


def test_optimum_modifiers_come_from_the_interior_test():
    """The three modifiers, from a quadratic whose vertex lies inside, outside, or nowhere in particular."""
    import numpy as np

    cov = np.diag([1e-6, 1e-6])
    assert interior_optimum(Quadratic(0.0, 0.02, cov, 20), -1, 1).label == "INTERIOR_OPTIMUM"
    assert interior_optimum(Quadratic(0.5, 0.02, cov, 20), -1, 1).label == "MONOTONE_IN_RANGE"
    assert interior_optimum(Quadratic(0.0, 0.001, 1e4 * cov, 20), -1, 1).label == "OPTIMUM_UNRESOLVED"
