"""The safe grammar: same values as Python, nothing else can run."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError
from scalinglab.expressions import FUNCTIONS, evaluate, names

NUMBERS = st.floats(0.1, 10).map(lambda v: round(v, 3))


def expressions() -> st.SearchStrategy[str]:
    leaf = st.one_of(NUMBERS.map(repr), st.sampled_from(["x", "y"]))

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            inner.map(lambda t: f"-({t})"),
            inner.map(lambda t: f"exp(-abs({t}))"),
            inner.map(lambda t: f"log(1 + abs({t}))"),
            inner.map(lambda t: f"(({t})**2)"),
        )

    return st.recursive(leaf, grow, max_leaves=8)


@given(expressions(), NUMBERS, NUMBERS)
def test_values_are_those_of_python(text, x, y):
    try:
        want = eval(text, {"x": x, "y": y, "exp": math.exp, "log": math.log, "abs": abs, "__builtins__": {}})
    except (ZeroDivisionError, OverflowError):
        return
    assert evaluate(text, {"x": x, "y": y}) == pytest.approx(want, rel=1e-12, abs=1e-300)


@given(expressions(), st.lists(NUMBERS, min_size=2, max_size=5))
def test_arrays_are_evaluated_elementwise(text, xs):
    together = np.broadcast_to(evaluate(text, {"x": np.array(xs), "y": 2.0}), len(xs))
    alone = [evaluate(text, {"x": v, "y": 2.0}) for v in xs]
    # numpy may take another path for arrays (SIMD), so last-bit differences grow with the depth of the expression
    np.testing.assert_allclose(together, np.array(alone, dtype=float), rtol=1e-9)


def test_names_functions_conditions():
    assert names("r0 * exp(-gamma1/(2*gamma2))") == {"r0", "gamma1", "gamma2"}
    got = evaluate(
        "depth > 3 and not (phase == 'hot') or depth < 2",
        {"depth": np.array([1, 4, 4]), "phase": np.array(["hot", "hot", "cool"])},
    )
    assert got.tolist() == [True, False, True]
    assert evaluate("1 < x < 3", {"x": np.array([1, 2, 3])}).tolist() == [False, True, False]
    assert evaluate("2^3", {}) == 8
    assert evaluate("minimum(x, 2) + maximum(x, 2)", {"x": 5.0}) == 7
    assert evaluate("softplus(1000)", {}) == 1000
    assert evaluate("1 / 0", {}) == np.inf
    assert set(FUNCTIONS) >= {"log", "exp", "sqrt", "softplus"}


HOSTILE = [
    "__import__('os').system('true')", "x.__class__", "(lambda: 1)()", "[x for x in (1,)]", "x[0]", "open('a')", "f'{x}'",
    "x if x else y", "print(x)", "exp(x, out=x)", "x := 3", "x; y", "{'a': 1}", "(1, 2)", "x is y", "x in y", "x | y",
    "x @ y", "x // y", "x % y", "await x", "*x", "...", "b'a'", "1j", "None",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_anything_but_arithmetic_is_refused(text):
    with pytest.raises(ConfigError):
        evaluate(text, {"x": 1.0, "y": 2.0})


def test_refusals_say_what_and_what_to_do():
    with pytest.raises(ConfigError, match="empty"):
        evaluate("  ", {})
    with pytest.raises(ConfigError, match="can't be parsed"):
        evaluate("1 +", {})
    with pytest.raises(ConfigError, match=r"reads 'z', which is not there; known: x"):
        evaluate("z", {"x": 1})
    with pytest.raises(ConfigError, match="known functions: log"):
        evaluate("sin(x)", {"x": 1})
    with pytest.raises(ConfigError, match="2,000 are read"):
        evaluate("+".join(["1"] * 2000), {})
    with pytest.raises(ConfigError, match="nested deeper"):
        evaluate("-" * 70 + "x", {"x": 1})
    with pytest.raises(ConfigError, match="can't be evaluated"):
        evaluate("x + 'a'", {"x": 1.0})


@settings(max_examples=200)
@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_clear_error(text):
    with contextlib.suppress(ConfigError):  # and nothing else
        evaluate(text, {"x": 1.0})


def test_huge_powers_end_at_once():
    assert evaluate("10**10**10", {}) == np.inf
    assert evaluate("9**9**9**9", {}) == np.inf
