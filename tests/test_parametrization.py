"""Exponents against the printed table, against Adam itself, and the rules per architecture."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.arch_options import OPTIONS
from scalinglab.errors import ConfigError
from scalinglab.native import NATIVE, native
from scalinglab.parametrization import (
    PARAMETRIZATIONS,
    Group,
    coupled_decay,
    independent_decay,
    parametrization,
    scaled,
)
from scalinglab.shapes import Shape

TAGS = [
    ("input", "outside"), ("matrix", "branch"), ("vector", "branch"), ("matrix", "trunk"), ("vector", "trunk"),
    ("vector", "outside"), ("readout", "outside"),
]  # fmt: skip
RATIOS = st.floats(1 / 64, 64)
ALL = [*PARAMETRIZATIONS.values(), *map(native, NATIVE)]
N, L = 4.0, 16.0  # m_N and m_L of the table below


def group(name, role, location, width=N, depth=L, fan_in=None):
    return parametrization(name).resolve(role, location, width_ratio=width, depth_ratio=depth, fan_in_ratio=fan_in)


# CompleteP's table 1 (arXiv:2505.01618) at m_N = 4, m_L = 16, written out: lr, eps, weight decay, init std, forward.
# Decay at alpha = 1/2 holds lr * decay (the printed table doesn't); epsilon outside the stack follows the gradient.
@pytest.mark.parametrize(
    ("name", "role", "location", "expected"),
    [
        ("sp", "matrix", "branch", (1, 1, 1, 1, 1)),
        ("sp", "vector", "branch", (1, 1, 0, 1, 1)),
        ("sp", "readout", "outside", (1, 1, 1, 1, 1)),
        ("mup", "input", "outside", (1, 1 / 4, 1, 1, 1)),
        ("mup", "matrix", "branch", (1 / 4, 1 / 4, 4, 1 / 2, 1)),
        ("mup", "vector", "branch", (1, 1 / 4, 0, 1, 1)),
        ("mup", "readout", "outside", (1, 1 / 4, 1, 1, 1 / 4)),
        ("depth_mup", "matrix", "branch", (1 / 16, 1 / 16, 16, 1 / 2, 1)),
        ("depth_mup", "vector", "branch", (1 / 4, 1 / 16, 0, 1, 1)),
        ("depth_mup", "input", "outside", (1, 1 / 4, 1, 1, 1)),
        ("completep", "matrix", "branch", (1 / 4, 1 / 64, 4, 1 / 2, 1)),
        ("completep", "vector", "branch", (1, 1 / 64, 0, 1, 1)),
        ("completep", "vector", "outside", (1, 1 / 4, 0, 1, 1)),
        ("completep", "readout", "outside", (1, 1 / 4, 1, 1, 1 / 4)),
        ("completep", "matrix", "trunk", (1 / 64, 1 / 4, 64, 1 / 2, 1)),
        ("completep", "vector", "trunk", (1 / 16, 1 / 4, 0, 1, 1)),
        ("alpha=0", "matrix", "branch", (1 / 64, 1 / 4, 64, 1 / 2, 1)),
    ],
)
def test_printed_table(name, role, location, expected):
    got = group(name, role, location)
    assert (got.lr, got.eps, got.weight_decay, got.init_std, got.forward) == pytest.approx(expected)


def test_scales_of_the_model():
    base = Shape(2, 256, ffn_dim=1024, head_dim=64, vocab=64, context=8)
    shape = Shape(32, 1024, ffn_dim=4096, heads=4, vocab=64, context=8)  # head size 64 -> 256
    got = {name: PARAMETRIZATIONS[name].scales(shape, base) for name in PARAMETRIZATIONS}
    assert [got[n].branch_multiplier for n in got] == pytest.approx([1, 1, 1, 1 / 4, 1 / 16])
    assert [got[n].readout_multiplier for n in got] == pytest.approx([1, 1, 1 / 4, 1 / 4, 1 / 4])
    # sqrt(base head size) / head size in muP, 1 / sqrt(head size) in the standard parametrization
    assert [got[n].attention_scale for n in got] == pytest.approx([1 / 16] * 2 + [8 / 256] * 3)
    assert [s.init for s in got.values()] == ["normal", "gpt2", "normal", "normal", "normal"]
    fixed = Shape(32, 1024, ffn_dim=4096, head_dim=64, vocab=64, context=8)
    assert {PARAMETRIZATIONS[n].scales(fixed, base).attention_scale for n in got} == {
        1 / 8
    }  # only heads grow: no arm differs


@pytest.mark.parametrize("entry", ALL, ids=lambda p: p.name)
def test_all_coincide_at_the_base_shape(entry):
    base = Shape(8, 64, ffn_dim=192, heads=4, vocab=64, context=8)
    scales = entry.scales(base, base)
    assert (scales.branch_multiplier, scales.embedding_multiplier, scales.readout_multiplier) == (1, 1, 1)
    assert scales.attention_scale == 1 / math.sqrt(16)
    for role, location in TAGS:
        at_base = entry.resolve(role, location, width_ratio=1.0, depth_ratio=1.0)
        decayed = 0.0 if role == "vector" else 1.0
        assert at_base == Group(lr=1.0, eps=1.0, weight_decay=decayed, init_std=1.0, forward=1.0)


@given(st.floats(0, 1), RATIOS, RATIOS, RATIOS)
def test_depth_rule_has_a_fixed_product_and_decay_is_held(alpha, width, depth, fan_in):
    chosen = scaled(alpha)
    matrix = chosen.resolve("matrix", "branch", width_ratio=width, depth_ratio=depth, fan_in_ratio=fan_in)
    branch = depth ** chosen.table["branch_multiplier"].depth
    assert branch * matrix.lr * fan_in == pytest.approx(1 / depth)
    assert matrix.init_std == pytest.approx(fan_in**-0.5)  # of its own fan-in, not of the stream's width
    for role, location in TAGS:
        got = chosen.resolve(role, location, width_ratio=width, depth_ratio=depth, fan_in_ratio=fan_in)
        assert got.weight_decay_independent == pytest.approx(0.0 if role == "vector" else 1.0)


@given(RATIOS, RATIOS)
def test_depth_only_leaves_width_alone(width, depth):
    for role, location in TAGS:
        got = scaled(0.5, width=False).resolve(role, location, width_ratio=width, depth_ratio=depth)
        alone = scaled(0.5).resolve(role, location, width_ratio=1.0, depth_ratio=depth)
        assert got == alone


def adam(weight, gradient, lr, eps, decay, steps=5):
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for t in range(1, steps + 1):
        g = gradient(weight)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        weight = weight * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + eps)
    return weight


@pytest.mark.parametrize(("eps_exponent", "same"), [(None, True), (0.0, False)])
def test_the_absorbed_readout_is_the_same_model_under_adam(eps_exponent, same):
    """With a large epsilon, so that a wrong scaling of it shows: a constant one in both forms breaks the equivalence."""
    rng, m = np.random.default_rng(0), 8.0
    hidden, target, start = rng.normal(size=(32, 16)), rng.normal(size=(32, 4)), rng.normal(size=(16, 4))
    lr, eps, decay = 0.1, 0.3, 0.02

    def train(chosen):
        g = chosen.resolve("readout", "outside", width_ratio=m, depth_ratio=1.0)
        weight = adam(
            start * g.init_std,
            lambda w: hidden.T @ (g.forward * hidden @ w - target) * g.forward / 32,
            lr * g.lr, eps * g.eps, decay * g.weight_decay,
        )  # fmt: skip
        return g.forward * weight

    multiplier = parametrization("mup")
    absorbed = multiplier.absorbed_readout()
    assert absorbed.table["readout.outside.eps"].width == 0  # "epsilon unchanged", as Complete(d)P has it in this form
    if eps_exponent is not None:
        multiplier = multiplier.perturb("readout.outside.eps", to={"width": eps_exponent})
    assert np.allclose(train(multiplier), train(absorbed), rtol=1e-10, atol=1e-12) is same


def test_absorbed_readout_cannot_be_tied():
    tied = Shape(2, 64, ffn_dim=128, heads=4, vocab=64, context=8, tied=True)
    assert parametrization("completep").scales(tied, tied).readout_multiplier == 1
    with pytest.raises(ConfigError, match="a tied readout needs the forward multiplier"):
        parametrization("completep").absorbed_readout().scales(tied, tied)


@pytest.mark.parametrize(
    ("architecture", "branch", "matrix_lr", "trunk_lr"),
    [
        ("pre_ln", -1, 0, -1),
        ("sandwich", -1, 0, -1),
        ("lns", -0.5, 0, -1),
        ("post_ln", -1, 0, -1),
        ("deepnorm", 0, -0.5, -1),
        ("hyper_connections", -1, 0, -1),
        ("denseformer", -1, 0, -2),
        ("attn_res", -1, 0, -1),
    ],
)
def test_rules_per_architecture(architecture, branch, matrix_lr, trunk_lr):
    table = native(architecture).table
    assert table["branch_multiplier"].depth == branch
    assert (table["matrix.branch.lr"].depth, table["vector.trunk.lr"].depth) == (matrix_lr, trunk_lr)
    assert table["matrix.branch.lr"].fan_in == -1  # queries over depth are such matrices
    assert table["matrix.branch.weight_decay"].depth == -matrix_lr


def test_every_architecture_has_a_rule_and_says_how_it_is_known():
    assert set(NATIVE) == set(OPTIONS)
    assert native("pre_ln").table == parametrization("completep").table
    for name in NATIVE:
        assert any(word in native(name).note for word in ("checked", "training")), name
    with pytest.raises(ConfigError, match="no scaling rule was derived for architecture 'siamese'"):
        native("siamese")


@given(
    st.sampled_from([p for p in ALL if p.init == "normal"]),
    st.sampled_from(["width", "depth", "fan_in"]),
    st.floats(0.1, 2),
    st.data(),
)
def test_perturb_changes_one_entry_and_tells(entry, exponent, change, data):
    key = data.draw(st.sampled_from(sorted(entry.table)))
    wrong = entry.perturb(key, by={exponent: change})
    assert [k for k in entry.table if entry.table[k] != wrong.table[k]] == [key]
    assert getattr(wrong.table[key], exponent) == pytest.approx(getattr(entry.table[key], exponent) + change)
    assert key in wrong.description
    assert entry.changes == ()  # the original is untouched


def test_perturb_examples():
    half = parametrization("depth_mup")
    assert (
        half.perturb("matrix.branch.lr", to={"depth": 0}).description == "depth_mup: matrix.branch.lr depth -0.5 -> 0"
    )
    twice = half.perturb("readout_multiplier", to={"width": 0}).perturb("vector.branch.weight_decay", to={"factor": 1})
    assert len(twice.changes) == 2
    assert twice.resolve("readout", "outside", width_ratio=4, depth_ratio=1).forward == 1
    assert twice.resolve("vector", "branch", width_ratio=4, depth_ratio=1).weight_decay == 1


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda p: p.perturb("matrix.branch.lr", to={"depth": 0.0}),
            "this changes nothing: matrix.branch.lr of 'completep'",
        ),
        (lambda p: p.perturb("matrix.lr", to={"depth": 1.0}), "has no entry 'matrix.lr'; entries: input.outside"),
        (lambda p: p.perturb("matrix.branch.lr", to={"deep": 1.0}), "'deep' is no exponent of matrix.branch.lr"),
        (lambda p: p.perturb("matrix.branch.lr"), "takes either"),
        (
            lambda p: p.resolve("matrix", "outside", width_ratio=1, depth_ratio=1),
            "role 'matrix' and location 'outside'",
        ),
        (lambda p: p.resolve("bias", "branch", width_ratio=1, depth_ratio=1), "no rule for a tensor with role 'bias'"),
        (
            lambda p: p.resolve("matrix", "branch", width_ratio=0, depth_ratio=1),
            "ratios to the base shape must be positive",
        ),
        (lambda p: parametrization("mup2"), "'mup2' is unknown; choose one of sp, sp_gpt2, mup, depth_mup, completep"),
        (lambda p: parametrization("alpha=2"), "alpha=2 is outside"),
        (lambda p: parametrization("alpha=x"), "could not convert"),
        (
            lambda p: parametrization("sp_gpt2").perturb("branch_multiplier", to={"depth": -1}),
            "depth would count twice",
        ),
        (lambda p: coupled_decay(0.1, 0.0), "must be positive"),
    ],
)
def test_what_is_refused(act, message):
    with pytest.raises(ConfigError, match=message):
        act(parametrization("completep"))


@given(st.floats(1e-6, 1), st.floats(1e-6, 1))
def test_decay_conversion(decay, lr):
    assert independent_decay(coupled_decay(decay, lr), lr) == pytest.approx(decay)
    assert independent_decay(0.1, 2e-3) == pytest.approx(2e-4)  # DepthBench: 0.1 at a peak of 0.002
