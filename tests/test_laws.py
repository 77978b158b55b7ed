"""Every law: the log-sum-exp path against its own text, parameters there and back, crossing, ties, bounds, fixed values."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.encoding import encode
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.features import COLUMNS, R0
from scalinglab.laws import LAWS, Law, law_from
from scalinglab.solver import COLLAPSED

ALGEBRA = [k for k, law in LAWS.items() if law.in_algebra]

# the formulas once more, written by hand in numpy: a second source for the table of laws
HAND = {
    "kaplan_n": lambda p, r: p["A"] / r.params ** p["alpha"],
    "kaplan_d": lambda p, r: p["B"] / r.tokens ** p["beta"],
    "kaplan": lambda p, r: (
        (p["A"] ** (1 / p["delta"]) * r.params ** (-p["alpha"] / p["delta"]) + p["B"] ** (1 / p["delta"]) / r.tokens)
        ** p["delta"]
    ),
    "chinchilla": lambda p, r: p["E"] + p["A"] / r.params ** p["alpha"] + p["B"] / r.tokens ** p["beta"],
    "ces": lambda p, r: (
        p["E"]
        + ((p["A"] / r.params ** p["alpha"]) ** (1 / p["delta"]) + (p["B"] / r.tokens ** p["beta"]) ** (1 / p["delta"]))
        ** p["delta"]
    ),
    "ray": lambda p, r: p["E"] + p["A"] / r.params ** p["alpha"],
    "shape": lambda p, r: (
        p["E"]
        + p["A"] / r.params ** p["alpha"] * np.exp(p["gamma1"] * _u(r) + p["gamma2"] * _u(r) ** 2)
        + p["B"] / r.tokens ** p["beta"]
    ),
    "shape_drift": lambda p, r: (
        p["E"]
        + p["A"]
        / r.params ** p["alpha"]
        * np.exp(p["gamma1"] * _u(r) + p["gamma2"] * _u(r) ** 2 + p["gamma3"] * _u(r) * np.log(r.params / 3e8))
        + p["B"] / r.tokens ** p["beta"]
    ),
    "shape_data": lambda p, r: (
        p["E"]
        + p["A"] / r.params ** p["alpha"] * np.exp(p["gamma1"] * _u(r) + p["gamma2"] * _u(r) ** 2)
        + p["B"] / r.tokens ** p["beta"] * np.exp(p["zeta1"] * _u(r))
    ),
    "width_depth": lambda p, r: (
        p["E"] + p["A"] / r.width ** p["a"] + p["B"] / r.depth ** p["b"] + p["C"] / r.tokens ** p["c"]
    ),
    "width_depth_params": lambda p, r: (
        p["E"]
        + p["A"] / r.width ** p["a"]
        + p["B"] / r.depth ** p["b"]
        + p["P"] / r.params ** p["p"]
        + p["C"] / r.tokens ** p["c"]
    ),
    "levine": lambda p, r: (
        p["E"]
        + p["A"] / r.params ** p["alpha"]
        + p["B"] / r.tokens ** p["beta"]
        + p["eta1"] * _hinge(_levine(r) - np.log(r.depth))
        + p["eta2"] * _hinge(np.log(r.depth) - _levine(r))
    ),
    "critical_depth": lambda p, r: (
        p["E"]
        + p["A"] / r.params ** p["alpha"]
        + p["B"] / r.tokens ** p["beta"]
        + p["eta"] * _hinge(np.log(r.depth) - p["k"] - p["chi"] * np.log(r.width))
    ),
    "effective_depth": lambda p, r: (
        p["E"] + p["A"] / r.width ** p["a"] + p["B"] / r.depth ** p["b"] + p["C"] / r.tokens ** p["c"]
    ),
    "data_constrained": lambda p, r: (
        p["E"]
        + p["A"] / r.params ** p["alpha"]
        + p["B"]
        / (r.unique_tokens * (1 + p["Rd"] * (1 - np.exp(-(r.tokens / r.unique_tokens - 1) / p["Rd"])))) ** p["beta"]
    ),
}


def _u(r):
    return np.log(r.width / r.depth / 42.67)


def _hinge(x):
    return 0.1 * np.log1p(np.exp(x / 0.1))


def _levine(r):
    return np.log(np.maximum((np.log(r.width) - 5.039) / 0.0555, 1))


def table(n=24, seed=0):
    rng = np.random.default_rng(seed)
    depth, width = rng.integers(4, 80, n), 64 * rng.integers(4, 40, n)
    unique = rng.uniform(1e9, 1e11, n)
    return pd.DataFrame(
        {
            "run_id": [f"r{i}" for i in range(n)],
            "depth": depth,
            "width": width,
            "params": 12.0 * depth * width**2,
            "tokens": unique * rng.uniform(1, 8, n),
            "unique_tokens": unique,
            "architecture": np.array(["a", "b", "c"])[np.arange(n) % 3],
            "loss": 3.0,
        }
    )


def draw(names, rng):
    """Natural parameters of plausible size."""
    out = {}
    for name in names:
        plain = name.split("[")[0]
        if plain == "E":
            out[name] = rng.uniform(0.5, 2)
        elif plain == "delta":
            out[name] = rng.uniform(0.3, 2)
        elif plain.startswith(("gamma", "zeta")):
            out[name] = rng.normal(0, 0.03)
        elif plain in ("alpha", "beta", "a", "b", "c", "p"):
            out[name] = rng.uniform(0.1, 0.7)
        elif plain == "Rd":
            out[name] = rng.uniform(3, 20)
        elif plain in ("k", "chi"):
            out[name] = rng.uniform(0.1, 0.6)
        elif plain.startswith("eta"):
            out[name] = rng.uniform(0.01, 0.2)
        else:
            out[name] = np.exp(rng.uniform(0, 6))
    return out


def test_the_table_of_laws_is_complete():
    assert set(HAND) == set(LAWS)
    assert all(law.source for law in LAWS.values())
    assert LAWS["shape"].names == ("E", "A", "alpha", "gamma1", "gamma2", "B", "beta")
    assert [k for k in LAWS if not LAWS[k].in_algebra] == ["critical_depth", "data_constrained"]
    assert R0 == 42.67


@pytest.mark.parametrize("key", LAWS)
def test_the_text_of_a_law_is_the_law(key):
    runs, law, rng = table(), LAWS[key], np.random.default_rng(1)
    for _ in range(5):
        p = draw(law.names, rng)
        np.testing.assert_allclose(law.loss(p, runs), HAND[key](p, runs), rtol=1e-12)


@pytest.mark.parametrize("key", ALGEBRA)
@pytest.mark.parametrize("centred", [True, False])
def test_log_sum_exp_path_equals_the_text(key, centred):
    runs, law, rng = table(), LAWS[key], np.random.default_rng(2)
    encoding = encode(law, runs, centred=centred)
    for _ in range(8):
        p = draw(law.names, rng)
        theta = encoding.internal(p)
        np.testing.assert_allclose(encoding.problem.log_loss(theta)[0], np.log(HAND[key](p, runs)), atol=1e-12)
        back = dict(zip(encoding.names, encoding.natural(theta)[0], strict=True))
        assert back == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize("key", ALGEBRA)
@pytest.mark.parametrize("share", ["H0", "H1", "H2", "H3", "H4", (), None])
def test_crossed_laws_there_and_back(key, share):
    runs, rng = table(), np.random.default_rng(3)
    law = LAWS[key].crossed("architecture", ("a", "b", "c"), share)
    encoding = encode(law, runs)
    assert set(encoding.names) == set(law.param_names)
    for _ in range(3):
        p = draw(law.param_names, rng)
        theta = encoding.internal(p)
        want = np.empty(len(runs))
        for level in "abc":  # the plain law of each level on its own rows
            own = (runs["architecture"] == level).to_numpy()
            plain = {n: p.get(f"{n}[{level}]", p.get(n)) for n in LAWS[key].names}
            want[own] = HAND[key](plain, runs[own])
        np.testing.assert_allclose(np.exp(encoding.problem.log_loss(theta)[0]), want, rtol=1e-11)
        np.testing.assert_allclose(law.loss(p, runs), want, rtol=1e-12)
        back = dict(zip(encoding.names, encoding.natural(theta)[0], strict=True))
        assert back == pytest.approx(p, rel=1e-10)


def test_what_the_levels_share():
    def free(level, key="shape"):
        law = LAWS[key].crossed("architecture", ("a", "b"), level)
        return set(law.names) - law.shared

    assert free("H0") == set()
    assert free("H1") == {"A"}
    assert free("H2") == {"A", "gamma1", "gamma2"}
    assert free("H3") == {"A", "gamma1", "gamma2", "alpha"}
    assert free("H4") == {"A", "gamma1", "gamma2", "alpha", "B", "beta"}
    assert free(()) == {"A", "gamma1", "gamma2", "alpha", "B", "beta"}  # E stays common
    assert free(None) == {"E", "A", "gamma1", "gamma2", "alpha", "B", "beta"}
    assert free(("alpha", "beta")) == {"A", "gamma1", "gamma2", "B"}
    assert free("H2", "width_depth") == {"A", "a", "B", "b"}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ALGEBRA), st.integers(0, 10**6))
def test_there_and_back_from_inside(key, seed):
    rng = np.random.default_rng(seed)
    encoding = encode(LAWS[key], table(seed=seed % 7))
    theta = rng.normal(0, 0.5, (6, encoding.problem.size))
    again = np.stack(
        [encoding.internal(dict(zip(encoding.names, row, strict=True))) for row in encoding.natural(theta)]
    )
    np.testing.assert_allclose(again, theta, atol=1e-9)


def test_a_collapsed_floor_is_exactly_zero_both_ways():
    encoding = encode(LAWS["chinchilla"], table())
    p = {"E": 0.0, "A": 100.0, "alpha": 0.3, "B": 200.0, "beta": 0.3}
    theta = encoding.internal(p)
    assert theta[encoding.coordinates.index("E")] == COLLAPSED
    assert dict(zip(encoding.names, encoding.natural(theta)[0], strict=True)) == pytest.approx(p, rel=1e-12)
    np.testing.assert_allclose(encoding.problem.log_loss(theta)[0], np.log(HAND["chinchilla"](p, table())), atol=1e-12)


C1 = {"E": 1.7, "A": 300.0, "alpha": 0.3, "B": 500.0, "beta": 0.4}
S2 = {**C1, "gamma1": 0.02, "gamma2": 0.01}
WD = {"E": 1.7, "A": 30.0, "a": 0.7, "B": 3.0, "b": 0.7, "C": 500.0, "c": 0.4}


@pytest.mark.parametrize(
    ("key", "variant", "p"),
    [
        ("chinchilla", {"ties": {"beta": "alpha"}}, {**C1, "beta": 0.3}),
        ("chinchilla", {"ties": {"B": "A"}}, {**C1, "B": 300.0}),
        ("chinchilla", {"fixed": {"E": 0.0}}, {**C1, "E": 0.0}),
        ("chinchilla", {"fixed": {"A": 300.0}}, C1),
        ("shape", {"fixed": {"gamma1": 0.02, "beta": 0.4}}, S2),
        ("ces", {"fixed": {"delta": 1.0}}, {**C1, "delta": 1.0}),
        ("width_depth", {"ties": {"b": "a"}}, WD),
        ("chinchilla", {"bounds": {"E": (1.0, 2.0), "alpha": (0.1, 0.9)}}, C1),
    ],
)
def test_ties_fixed_values_and_bounds_keep_the_law(key, variant, p):
    runs = table()
    encoding = encode(LAWS[key].with_(**variant), runs)
    theta = encoding.internal(p)
    np.testing.assert_allclose(encoding.problem.log_loss(theta)[0], np.log(HAND[key](p, runs)), atol=1e-12)
    assert dict(zip(encoding.names, encoding.natural(theta)[0], strict=True)) == pytest.approx(p, rel=1e-12)
    free = len(p) - len(variant.get("ties", {})) - len(variant.get("fixed", {}))
    assert encoding.problem.size == free + ("delta" in variant.get("fixed", {}))  # a fixed outer exponent stays, pinned


def test_a_tied_parameter_moves_with_its_target():
    encoding = encode(LAWS["chinchilla"].with_(ties={"beta": "alpha"}), table())
    theta = encoding.internal({"E": 1.7, "A": 300.0, "alpha": 0.3, "B": 500.0, "beta": 0.3})
    theta[encoding.coordinates.index("alpha")] += 0.05
    got = encoding.frame(theta).iloc[0]
    assert got["alpha"] == pytest.approx(0.35)
    assert got["beta"] == got["alpha"]


def test_finding_laws():
    assert law_from("C1") is LAWS["chinchilla"]
    assert law_from("s2") is LAWS["shape"]
    made = law_from("E + A*params**-alpha*(width/1e3)**-g", ["params"])
    assert made.names == ("E", "A", "alpha", "g")
    with pytest.raises(ConfigError, match="did you mean 'chinchilla'"):
        law_from("chinchila")
    with pytest.raises(ConfigError, match="no parameter"):
        law_from("params + tokens")
    assert law_from(lambda data, a, b: a).names == ("a", "b")


def test_derived_columns_and_missing_ones():
    runs = table()
    law = LAWS["shape"]
    p = draw(law.names, np.random.default_rng(5))
    by_aspect = runs.assign(aspect=runs["width"] / runs["depth"]).drop(columns=["width", "depth"])
    np.testing.assert_allclose(law.loss(p, by_aspect), law.loss(p, runs), rtol=1e-14)
    with pytest.raises(SchemaError, match="needs width and depth"):
        law.loss(p, runs.drop(columns=["width"]))
    with pytest.raises(SchemaError, match="'tokens', which the run table lacks"):
        law.loss(p, runs.drop(columns=["tokens"]))
    with pytest.raises(SchemaError, match=r"not finite in 2 rows .*row index 3"):
        law.loss(p, runs.assign(tokens=runs["tokens"].where(~runs.index.isin([3, 5]))))
    with pytest.raises(SchemaError, match="not numeric"):
        law.loss(p, runs.assign(tokens="many"))


def test_refusals():
    law = LAWS["chinchilla"]
    for bad, why in (
        ({"fixed": {"gamma": 1.0}}, "no parameter of law"),
        ({"ties": {"alpha": "alpha"}}, "can't be tied"),
        ({"ties": {"alpha": "beta", "beta": "A"}}, "can't be tied"),
        ({"bounds": {"E": (2.0, 1.0)}}, "is empty"),
        ({"constants": {"r0": 10.0}}, "no constant"),
    ):
        with pytest.raises(ConfigError, match=why):
            law.with_(**bad)
    with pytest.raises(ConfigError, match="at least two"):
        law.crossed("architecture", ("a",))
    with pytest.raises(ConfigError, match="share: 'zeta'"):
        law.crossed("architecture", ("a", "b"), ("zeta",))
    crossed = law.crossed("architecture", ("a", "b"))
    with pytest.raises(SchemaError, match="not in the fit; it knows a, b"):
        encode(crossed, table())
    with pytest.raises(ConfigError, match="must not be negative"):
        encode(law.with_(fixed={"A": -1.0}), table())
    with pytest.raises(ConfigError, match="no term left"):
        encode(Law("x", "A*params**-alpha", columns=COLUMNS, fixed={"A": 0.0}), table())


def test_many_parameter_rows_at_once():
    law, runs, rng = LAWS["shape"], table(), np.random.default_rng(6)
    frame = pd.DataFrame([draw(law.names, rng) for _ in range(4)])
    many = law.loss(frame, runs)
    assert many.shape == (4, len(runs))
    for row, params in zip(many, frame.to_dict("records"), strict=True):
        np.testing.assert_allclose(row, law.loss(params, runs), rtol=1e-14)
