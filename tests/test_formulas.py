"""From the text of a law to log-linear terms."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.errors import ConfigError
from scalinglab.expressions import evaluate
from scalinglab.features import COLUMNS
from scalinglab.formulas import Coefficient, OutsideAlgebra, Term, parse_law
from scalinglab.laws import LAWS

DATA = {"params": 3e8, "tokens": 6e9, "depth": 24.0, "width": 1024.0, "u": -0.4, "aspect": 30.0, "unique_tokens": 1e9}


def value(terms, groups, params, data):
    """The law from its parsed terms, independently of the solver."""

    def one(term, power=1.0, drop=None):
        z = np.log(params[term.amplitude])
        for c in term.coefficients:
            z += c.sign * params[c.name] * evaluate(c.feature, data)
        if term.offset is not None:
            z += evaluate(term.offset, data)
        return np.exp(z * power)

    total = sum(one(t) for t in terms)
    for g in groups:
        d = params[g.exponent]
        total += sum(one(t, 1 / d) for t in g.terms) ** d
    return total


@pytest.mark.parametrize("key", [k for k, law in LAWS.items() if law.in_algebra])
def test_terms_give_the_value_of_the_text(key):
    law = LAWS[key]
    rng = np.random.default_rng(3)
    data = {**DATA, **law.constants}
    for _ in range(5):
        params = {n: float(rng.uniform(0.1, 0.9)) for n in law.names}
        want = evaluate(law.formula, {**data, **params})
        assert value(*law.structure, params, data) == pytest.approx(want, rel=1e-12)


@given(
    st.lists(st.sampled_from(["params", "tokens", "depth", "width"]), min_size=1, max_size=4, unique=True),
    st.booleans(),
)
def test_any_sum_of_power_laws_is_read(columns, floor):
    text = " + ".join(["E"] * floor + [f"A{i}*{c}**-a{i}" for i, c in enumerate(columns)])
    terms, groups = parse_law(text, COLUMNS)
    assert not groups
    assert len(terms) == len(columns) + floor
    params = {"E": 1.5} | {f"A{i}": 2.0 + i for i in range(4)} | {f"a{i}": 0.1 * (i + 1) for i in range(4)}
    assert value(terms, groups, params, DATA) == pytest.approx(evaluate(text, {**DATA, **params}), rel=1e-12)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("A/params**alpha", "A*params**-alpha"),
        ("A*(params/1e9)**-alpha", None),
        ("2*A*exp(-k*u)*params**-alpha", None),
        ("A*exp(g*(u + 2*log(depth)) - h*u**2/3)", None),
        ("A*params**(-alpha + beta*u)", None),
        ("((A*params**-alpha)**2)**0.5", None),
        ("E + ((A*params**-a)**(1/d) + (B*tokens**-b)**(1/d))**d", None),
        ("A*params**-0.5 + B", None),
    ],
)
def test_ways_of_writing(text, same):
    terms, groups = parse_law(text, COLUMNS)
    params = {
        "A": 3.0,
        "alpha": 0.3,
        "k": 0.2,
        "g": 0.1,
        "h": 0.05,
        "E": 1.0,
        "B": 2.0,
        "a": 0.2,
        "b": 0.4,
        "d": 0.7,
        "beta": 0.01,
    }
    assert value(terms, groups, params, DATA) == pytest.approx(evaluate(text, {**DATA, **params}), rel=1e-12)
    if same:
        assert parse_law(same, COLUMNS)[0] == terms


def test_structure_of_the_shape_law():
    terms, _ = LAWS["shape"].structure
    assert terms[0] == Term("E")
    assert terms[1].coefficients == (
        Coefficient("alpha", "log(params)", -1.0),
        Coefficient("gamma1", "u", 1.0),
        Coefficient("gamma2", "u ** 2", 1.0),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("E - A*params**-alpha", "subtracts"),
        ("E + A*B*params**-alpha", "exactly one amplitude"),
        ("E + A**2*params**-alpha", "exactly one amplitude"),
        ("E + A*log(params*k)", "not log-linear"),
        ("E + params**-alpha", "exactly one amplitude"),
        ("A*params**-(alpha*beta)", "not linear"),
        ("A*params**-alpha*tokens**-alpha", "twice"),
        ("A*params**-a + A*tokens**-b", "two terms"),
        ("(A*params**-a + B*tokens**-b)**d", "must be written"),
        ("((A*params**-a)**(1/d) - (B*tokens**-b)**(1/d))**d", "subtracted inside"),
    ],
)
def test_what_is_outside_the_algebra_says_why(text, why):
    with pytest.raises(OutsideAlgebra, match=why):
        parse_law(text, COLUMNS)


def test_not_even_arithmetic():
    with pytest.raises(ConfigError, match="can't be parsed"):
        parse_law("E + ", COLUMNS)
