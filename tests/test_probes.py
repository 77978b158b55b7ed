"""Depth probes against identities, closed forms and second implementations (plain loops over `Model.hidden`)."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from scalinglab.config import RunConfig, ShapeSpec
from scalinglab.errors import ConfigError, SchemaError
from scalinglab.probe_report import ProbeReport
from scalinglab.shapes import Shape
from scalinglab.train.archs import ARCHS
from scalinglab.train.archs.connector import Stream
from scalinglab.train.model import Model, ModelConfig
from scalinglab.train.probes import PROBES, Thresholds, forward, probe, probe_run
from scalinglab.train.probes.exchange import exchanged
from scalinglab.train.probes.intervals import Resamples
from scalinglab.train.probes.jacobian import transposed_products
from scalinglab.train.probes.lens import first_below
from scalinglab.train.probes.removal import effective_depth, participation
from scalinglab.train.scaling import build as build_run

SHAPE = Shape(4, 16, ffn_dim=40, heads=2, vocab=64, context=16)
NORMED = {"deepnorm", "keel", "post_ln", "mix_ln"}  # norms on the stream: no path weights
MIXED = {"attn_res", "block_attn_res"}  # no state that the next block builds on: no Jacobian
UNSCALED = {"scale_outputs": False}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def sequences(batch=4, length=16, seed=3, vocab=64):
    drawn = torch.randint(0, vocab, (batch, length + 1), generator=torch.Generator().manual_seed(seed))
    return drawn[:, :-1], drawn[:, 1:]


X, Y = sequences()


def model(architecture="pre_ln", options=None, *, shape=SHAPE, **config):
    return Model(ModelConfig(shape, architecture, options=options, **{"dtype": "float64", "norm_eps": 0.0, **config}))


def perturbed(architecture, options=None, *, std=0.2, seed=5):
    """All parameters moved away from their special initial values, branches at full size."""
    made = model(architecture, options, init_std=0.1, norm_eps=1e-6)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p += std * torch.randn(p.shape, generator=generator).double() * (1.0 if p.ndim < 2 else 0.1)
    return made


def run(made, which, x=X, y=Y, **options):
    return probe(made, x, y, which=which, **{"replicates": 50, **options})


def mean_loss(made, hidden, y=Y):
    return float(functional.cross_entropy(made.logits(hidden).flatten(0, 1), y.flatten()).detach())


def grid(measure, size):
    table = np.full((size, size), np.nan)
    table[measure.at, measure.other] = measure.value
    return table


# ---- every architecture ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ARCHS)
def test_every_architecture_runs_every_probe_that_applies(architecture):
    made = perturbed(architecture)
    before = {name: p.clone() for name, p in made.state_dict().items()}
    torch.manual_seed(1)
    state = torch.get_rng_state()
    report = run(made.train(), "all", *sequences(6, 16), label=architecture)
    expected = set()
    if architecture in NORMED:
        expected |= {"paths"}
    if architecture in MIXED:
        expected |= {"jacobian"}
    if architecture == "looped":
        expected |= {"gradients", "permutation"}
    assert set(report.skipped) == expected
    assert {m.probe for m in report.measures} == set(PROBES) - expected
    frame = report.to_frame()
    assert np.isfinite(frame["value"][frame["measure"] != "settled_depth"]).all()
    bounded = frame.dropna(subset=["low", "high"])
    assert (bounded["low"] <= bounded["high"] + 1e-12).all()
    # Nothing is left behind: weights to the bit, mode, the connector's own start, the global generator.
    assert all(torch.equal(p, before[name]) for name, p in made.state_dict().items())
    assert made.training
    assert "start" not in vars(made.connector)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in made.parameters())


@pytest.mark.parametrize("architecture", ["pre_ln", "mhc", "block_attn_res", "moda", "denseformer"])
def test_a_tap_that_only_watches_changes_nothing(architecture):
    made = perturbed(architecture)
    seen = []
    with torch.no_grad():
        tapped = forward(made, X, arrive=lambda i, _: seen.append(i), wrote=lambda i, x, y: None)
        assert torch.equal(tapped, made.hidden(X))
        skipped = forward(made, X, skip={2, 3})
        torch.testing.assert_close(skipped, made.hidden(X, skip={2, 3}), rtol=0, atol=0)
    assert seen == list(range(2 * SHAPE.depth + 1))


def test_one_block_alone():
    report = run(model(shape=Shape(1, 16, ffn_dim=40, heads=2, vocab=64, context=16)), "all", *sequences(6, 16))
    assert set(report.skipped) == {"pruning", "permutation", "groups"}
    assert "causal" not in report
    assert np.isnan(report.scalar("rms_slope"))


# ---- identities --------------------------------------------------------------------------------------------------------
def test_a_pre_ln_block_that_writes_zero_has_no_effect_at_all():
    made = perturbed("pre_ln")
    with torch.no_grad():
        made.blocks[1].attention.output_dh.zero_()
        made.blocks[1].ffn.down_df.zero_()
    report = run(made, ["growth", "removal", "contributions", "usefulness", "jacobian", "groups"], *sequences(8, 16))
    assert report.measure("removal_loss").value[1] == 0
    assert report.measure("block_influence").value[1] == 0
    causal = grid(report.measure("causal"), 4)
    assert (causal[1, 2:] == 0).all()
    assert (causal[0, 1:] > 0)[1:].all()
    assert causal[2, 3] > 0
    assert report.measure("output_effect").value[1] == 0
    assert report.measure("block_contribution").value[1] == 0
    angle = grid(report.measure("angular_distance"), 5)
    assert angle[1, 2] == 0
    assert report.measure("jacobian_deviation").value[1] == 0
    group = report.measure("group_loss")
    alone = group.value[(group.at == 1) & (group.other == 1)]
    assert alone == 0


def test_exchanging_equal_blocks_costs_nothing_and_others_cost_something():
    made = perturbed("pre_ln")
    made.blocks[2].load_state_dict(made.blocks[1].state_dict())
    score = grid(run(made, ["permutation"]).measure("permutation"), 4)
    assert score[1, 2] == 0
    assert score[0, 1] > 1e-4


def test_sandwich_grows_as_the_root_of_the_sublayers():
    """z_l holds 2l vectors of rms one and a small embedding: sqrt(2l) if they were orthogonal. They nearly are at d = 64:
    within 10 % (a second implementation has 3.87 at L = 8)."""
    made = model("sandwich", shape=Shape(8, 64, ffn_dim=176, heads=4, vocab=256, context=64))
    report = run(made, ["growth"], *sequences(4, 64, vocab=256))
    rms = report.measure("rms").value
    np.testing.assert_allclose(rms[1:], np.sqrt(2 * np.arange(1, 9)), rtol=0.1)
    assert report.scalar("rms_slope") == pytest.approx(1, abs=0.1)


def test_lens_of_the_last_state_is_the_model():
    for architecture in ("pre_ln", "hyper_connections", "attn_res", "keel"):
        made = perturbed(architecture)
        report = run(made, ["lens"])
        assert report.measure("lens_kl").value[-1] == pytest.approx(0, abs=1e-12)
        assert report.measure("lens_kl_reverse").value[-1] == pytest.approx(0, abs=1e-12)
        assert report.measure("lens_overlap").value[-1] == 1
        assert report.measure("lens_loss").value[-1] == pytest.approx(report.loss, rel=1e-12)
        assert report.loss == pytest.approx(float(made.loss(X, Y).detach()), rel=1e-12)


def test_removal_of_attention_residuals_at_init_is_that_of_pre_ln():
    """Uniform mixes over the sources that are left are positive multiples of the Pre-LN stream without the block."""
    plain = run(model("pre_ln"), ["removal"]).measure("removal_loss").value
    for architecture, options in (
        ("attn_res", None), ("block_attn_res", {"size": 3}), ("hyper_connections", UNSCALED), ("denseformer", None),
    ):  # fmt: skip
        found = run(model(architecture, options), ["removal"]).measure("removal_loss").value
        np.testing.assert_allclose(found, plain, rtol=0, atol=1e-12)


# ---- path weights ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("pre_ln", None), ("lns", None), ("sandwich", None), ("hyper_connections", {"readout": "mean"}),
     ("hyper_connections_static", {"readout": "mean"}), ("denseformer", None), ("layerscale", None), ("moda", None)],
)  # fmt: skip
def test_path_weights_are_ones_at_init(architecture, options):
    report = run(model(architecture, options), ["paths"])
    np.testing.assert_allclose(report.measure("path_weight").value, 1, rtol=0, atol=1e-12)
    counts = np.arange(1, 2 * SHAPE.depth + 2)
    np.testing.assert_allclose(report.measure("sources_entropy").value, counts, rtol=1e-12)


def test_attention_residuals_read_all_sources_alike_at_init():
    report = run(model("attn_res"), ["paths"])
    counts = np.arange(1, 2 * SHAPE.depth + 2)
    np.testing.assert_allclose(report.measure("sources_entropy").value, counts, rtol=1e-12)
    np.testing.assert_allclose(report.measure("sources_participation").value, counts, rtol=1e-12)
    weights = report.measure("path_weight")
    np.testing.assert_allclose(weights.value, 1 / (1 + weights.at), rtol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("hyper_connections", None), ("hyper_connections", {"readout": "mean", "streams": 2}),
     ("hyper_connections_static", None), ("mhc", {"streams": 3}), ("attn_res", None), ("block_attn_res", {"size": 3}),
     ("denseformer", {"dilation": 2, "period": 2}), ("denseformer", None), ("layerscale", None), ("sandwich", None)],
)  # fmt: skip
def test_path_weights_put_together_what_is_read(architecture, options):
    """The definition itself, token by token: read_k = sum over sources of c * source, at weights far from init."""
    made = perturbed(architecture, options)
    sources, read, coefficients, memory = [], {}, {}, [None]

    def arrive(i, stream):
        coefficients[i], memory[0] = stream.unfold(i, memory[0])

    def wrote(i, x, y):
        read[i] = x
        sources.append(y)

    embedding, _ = made._embed(X)
    with torch.no_grad():
        read[2 * SHAPE.depth] = forward(made, X, arrive=arrive, wrote=wrote)
        first = made.connector.start(embedding).lens(0) if architecture in MIXED else embedding
        for k, x in read.items():
            stacked = torch.stack([first, *sources[:k]], dim=-1)
            torch.testing.assert_close((stacked * coefficients[k].unsqueeze(-2)).sum(-1), x, rtol=1e-9, atol=1e-9)


def test_transport_rank_is_full_at_init_and_one_for_a_mix_that_averages():
    shape = {"streams": 4}
    assert run(model("hyper_connections", shape), ["rank"]).scalar("transport_rank") == pytest.approx(4, rel=1e-9)
    made = model("hyper_connections_static", shape)
    with torch.no_grad():
        for sublayer in made.connector.sublayers:
            sublayer.mix_nn.fill_(0.25)
    assert run(made, ["rank"]).scalar("transport_rank") == pytest.approx(1, rel=1e-6)


# ---- second implementations --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", ["pre_ln", "deepnorm", "moda"])
def test_removal_and_causal_scores_by_plain_loops(architecture):
    made, L = perturbed(architecture), SHAPE.depth
    report = run(made, ["removal"])

    def trace(skip):
        embedding, _ = made._embed(X)
        behind = {}
        hidden = made.hidden(X, skip=skip, observe=lambda i, stream, x, y: behind.__setitem__(i, stream.h))
        states = [embedding]
        for block in range(L):
            states.append(behind.get(2 * block + 1, states[-1]))  # the identity where the block was skipped
        return states, hidden

    with torch.no_grad():
        z, hidden = trace(set())
        base = mean_loss(made, hidden)
        for s in range(L):
            z_s, hidden_s = trace({2 * s, 2 * s + 1})
            assert report.measure("removal_loss").value[s] == pytest.approx(mean_loss(made, hidden_s) - base, abs=1e-12)
            p, p_s = made.logits(hidden).softmax(-1), made.logits(hidden_s).softmax(-1)
            assert report.measure("output_effect").value[s] == pytest.approx(float((p - p_s).norm(dim=-1).mean()))
            for l in range(s + 1, L):
                u, u_s = z[l + 1] - z[l], z_s[l + 1] - z_s[l]
                ratio = (u_s - u).norm(dim=-1) / u.norm(dim=-1)
                assert grid(report.measure("causal"), L)[s, l] == pytest.approx(float(ratio.mean()), rel=1e-9)
                means = float((u_s - u).norm(dim=-1).mean() / u.norm(dim=-1).mean())
                assert grid(report.measure("causal_ratio_of_means"), L)[s, l] == pytest.approx(means, rel=1e-9)
                most = float(ratio[:, 1:].amax(-1).mean())
                assert grid(report.measure("causal_max"), L)[s, l] == pytest.approx(most, rel=1e-9)
    c = grid(report.measure("causal"), L)
    effects = [np.nanmean(c[s]) for s in range(L - 1)]
    assert report.scalar("causal_global") == pytest.approx(sum(effects) / L / math.sqrt(L))
    assert report.scalar("depth_score") == pytest.approx(np.average(np.arange(L - 1), weights=effects))
    late = [c[s, l] for s in range(1, L) for l in range(s + 1, L)]
    assert report.scalar("causal_late_fraction") == pytest.approx(np.mean(np.array(late) > 0.45))


def test_angles_and_influence_by_cosines():
    made = perturbed("hyper_connections")
    report = run(made, ["growth"])
    states = []
    with torch.no_grad():
        forward(made, X, arrive=lambda i, stream: states.append(stream.state(i)) if i % 2 == 0 else None)
    assert states[0].shape[-1] == 4 * SHAPE.width
    angle = grid(report.measure("angular_distance"), 5)
    for a in range(5):
        for b in range(a + 1, 5):
            cosine = functional.cosine_similarity(states[a], states[b], dim=-1)
            assert angle[a, b] == pytest.approx(float((cosine.arccos() / math.pi).mean()), rel=1e-6)
            if b == a + 1:
                assert report.measure("block_influence").value[a] == pytest.approx(float((1 - cosine).mean()), rel=1e-6)


def test_ranks_by_singular_values():
    made = perturbed("pre_ln")
    report = run(made, ["rank"])
    states = []
    with torch.no_grad():
        forward(made, X, arrive=lambda i, stream: states.append(stream.state(i)) if i % 2 == 0 else None)
    for l, z in enumerate(states):
        s = np.linalg.svd(z.flatten(0, 1).numpy(), compute_uv=False)
        p = s**2 / (s**2).sum()
        assert report.measure("stable_rank").value[l] == pytest.approx(1 / p.max())
        assert report.measure("effective_rank").value[l] == pytest.approx(math.exp(-(p * np.log(p)).sum()))
        assert report.measure("nuclear_rank").value[l] == pytest.approx(s.sum() / math.sqrt((s**2).sum()))


@pytest.mark.parametrize("architecture", ["pre_ln", "keel", "hyper_connections"])
def test_jacobian_exact_by_unit_vectors_and_hutchinson_near_it(architecture):
    """Exact: torch.autograd.functional.jacobian of one block, run by hand. Hutchinson with 150 signs: within 4 s.e."""
    shape = Shape(2, 8, ffn_dim=16, heads=2, vocab=64, context=4)
    made = Model(ModelConfig(shape, architecture, options={"streams": 2} if architecture[0] == "h" else None,
                             dtype="float64", init_std=0.3))  # fmt: skip
    x, y = X[:2, :4], Y[:2, :4]
    states = []
    with torch.no_grad():
        forward(made, x, arrive=lambda i, stream: states.append(stream.state(i).clone()) if i % 2 == 0 else None)
    D = states[0].shape[-1]
    unit = transposed_products(made, x, torch.eye(D, dtype=torch.float64))
    for block in range(2):

        def one_block(z, block=block):
            out = []

            def arrive(i, stream):
                if i == 2 * block:
                    stream.restore(i, z)
                if i == 2 * block + 2:
                    out.append(stream.state(i))

            forward(made, x, arrive=arrive)
            return out[0]

        full = torch.autograd.functional.jacobian(one_block, states[block])  # [b, t, D, b, t, D]
        mean = full.sum((0, 1, 3, 4)) / x.numel()  # J[out, in]
        torch.testing.assert_close(unit[block] / x.numel(), mean, rtol=1e-9, atol=1e-9)
        exact = float((mean - torch.eye(D)).norm() / math.sqrt(D))
        report = run(made, ["jacobian"], x, y, directions=150)
        found = report.measure("jacobian_deviation")
        se = (found.high[block] ** 2 - found.low[block] ** 2) / (2 * 1.96)
        assert abs(found.value[block] ** 2 - exact**2) < 4 * se
        assert se < 0.3 * exact**2


def test_usefulness_of_affine_blocks_is_one_and_on_a_plain_stream_the_map_is_the_blocks():
    x, y = sequences(16, 16)
    linear = Linear(affine=True)
    assert run(linear, ["usefulness"], x, y).measure("affine_ratio").value == pytest.approx(np.ones(3), rel=1e-9)
    bent = run(Linear(affine=False), ["usefulness"], x, y)
    assert (abs(bent.measure("affine_ratio").value - 1) > 0.01).all()
    # Pre-LN: fit z_1 on z_0 of the even sequences and judge the odd ones, with numpy's least squares.
    made = perturbed("pre_ln")
    states = []
    with torch.no_grad():
        forward(made, x, arrive=lambda i, stream: states.append(stream.state(i)) if i % 2 == 0 else None)
        ones = np.ones((len(x), x.shape[1], 1))
        inputs = np.concatenate([ones, states[1].numpy()], axis=-1)
        losses = []
        for fitted, judged in ((0, 1), (1, 0)):
            a, b = (v[fitted::2].reshape(-1, v.shape[-1]) for v in (inputs, states[2].numpy()))
            weights = np.linalg.lstsq(a, b, rcond=None)[0]

            def put(i, stream, weights=weights, judged=judged):
                if i == 4:
                    stream.h = torch.as_tensor(inputs[judged::2] @ weights)

            losses.append(mean_loss(made, forward(made, x[judged::2], arrive=put), y[judged::2]))
        base = mean_loss(made, made.hidden(x), y)
    found = run(made, ["usefulness"], x, y).measure("affine_ratio").value[1]
    assert found == pytest.approx(np.mean(losses) / base, rel=1e-6)


def test_usefulness_wants_enough_tokens():
    assert "34 tokens" in run(perturbed("pre_ln"), ["usefulness"], *sequences(4, 8)).skipped["usefulness"]


def test_contributions_by_hand():
    made = perturbed("pre_ln")
    report = run(made, ["contributions"])
    seen = {}
    with torch.no_grad():
        made.hidden(X, observe=lambda i, stream, x, y: seen.__setitem__(i, (x, y)))
    for block in range(SHAPE.depth):
        (h, a), (h_a, m) = seen[2 * block], seen[2 * block + 1]
        for name, written, read in (("attention", a, h), ("ffn", m, h_a), ("block", a + m, h)):
            ratio = float((written.norm(dim=-1) / read.norm(dim=-1)).mean())
            cosine = float(functional.cosine_similarity(written, read, dim=-1).mean())
            assert report.measure(f"{name}_contribution").value[block] == pytest.approx(ratio)
            assert report.measure(f"{name}_cosine").value[block] == pytest.approx(cosine, abs=1e-12)


def test_both_kl_directions_and_the_loss_of_an_early_exit():
    made = perturbed("pre_ln")
    report = run(made, ["lens"])
    with torch.no_grad():
        states = {}
        final = made.logits(made.hidden(X, observe=lambda i, s, x, y: states.__setitem__(i, s.h))).log_softmax(-1)
        early = made.logits(states[3]).log_softmax(-1)
        forth = float(functional.kl_div(early, final, log_target=True, reduction="none").sum(-1).mean())
        back = float(functional.kl_div(final, early, log_target=True, reduction="none").sum(-1).mean())
    assert report.measure("lens_kl").value[2] == pytest.approx(forth)
    assert report.measure("lens_kl_reverse").value[2] == pytest.approx(back)
    assert abs(forth - back) > 1e-4 * forth
    assert report.measure("lens_loss").value[2] == pytest.approx(mean_loss(made, states[3]))


def test_pruning_takes_the_closest_states_and_groups_contain_it():
    made = perturbed("pre_ln")
    report = run(made, ["growth", "pruning", "groups"])
    angle, group = grid(report.measure("angular_distance"), 5), report.measure("group_loss")
    for n, start, loss in zip(
        range(1, 4), report.measure("pruning_start").value, report.measure("pruning_loss").value, strict=True
    ):
        starts = [angle[l, l + n] for l in range(5 - n)]
        assert start == int(np.argmin(starts))
        assert loss == pytest.approx(float(group.value[(group.at == start) & (group.other == n)][0]), abs=1e-12)
        assert report.measure("best_group_loss").value[n - 1] == pytest.approx(group.value[group.other == n].min())
    with torch.no_grad():
        direct = mean_loss(made, made.hidden(X, skip=range(2, 6))) - float(made.loss(X, Y).detach())
    assert group.value[(group.at == 1) & (group.other == 2)] == pytest.approx(direct, abs=1e-12)


# ---- exchange: what moves, what stays ----------------------------------------------------------------------------------
def exchanged_loss(architecture, i, j, options=None, *, by_hand):
    made = perturbed(architecture, options)
    score = grid(run(made, ["permutation"]).measure("permutation"), SHAPE.depth)[i, j]
    base = float(made.loss(X, Y).detach())
    by_hand(made)
    with torch.no_grad():
        return score, abs(float(made.loss(X, Y).detach()) - base) / base


def swap(a, b):
    with torch.no_grad():
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


def swap_modules(one, two):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        swap(a, b)


def test_keel_keeps_its_first_sublayer_and_its_constants():
    def by_hand(made):
        swap_modules(made.blocks[0], made.blocks[2])
        swap_modules(made.connector.post_norms[0], made.connector.post_norms[4])  # of sublayers 1 and 5; 0 has none

    score, reference = exchanged_loss("keel", 0, 2, by_hand=by_hand)
    assert score == pytest.approx(reference, abs=1e-12)


def test_attention_residuals_take_the_mixer_inside_and_at_the_right_boundary_along():
    def by_hand(made):
        swap_modules(made.blocks[0], made.blocks[3])
        for inside in (0, 1):  # mixers[i - 1] reads for sublayer i: block l has those in front of 2l + 1 and of 2l + 2
            swap_modules(made.connector.mixers[inside], made.connector.mixers[6 + inside])

    score, reference = exchanged_loss("attn_res", 0, 3, by_hand=by_hand)
    assert score == pytest.approx(reference, abs=1e-12)


def test_the_factor_of_lns_travels():
    made = perturbed("lns")
    score = grid(run(made, ["permutation"]).measure("permutation"), SHAPE.depth)[0, 3]
    base = float(made.loss(X, Y).detach())
    # The factor stands behind the norm, so taking it along is the same as scaling the gain of the norm.
    swap_modules(made.blocks[0], made.blocks[3])
    with torch.no_grad():
        for block, ratio in ((0, math.sqrt(1 / 4)), (3, math.sqrt(4))):
            made.blocks[block].attention_norm.gain_d *= ratio
            made.blocks[block].ffn_norm.gain_d *= ratio
        assert score == pytest.approx(abs(float(made.loss(X, Y).detach()) - base) / base, abs=1e-12)


@pytest.mark.parametrize("architecture", sorted(set(ARCHS) - {"looped"}))
def test_an_exchange_moves_every_parameter_of_a_block_that_its_partner_has_and_is_undone(architecture):
    made = perturbed(architecture)
    before = {name: p.clone() for name, p in made.state_dict().items()}
    with exchanged(made, 1, 2):
        moved = {name for name, p in made.state_dict().items() if not torch.equal(p, before[name])}
    assert all(torch.equal(p, before[name]) for name, p in made.state_dict().items())
    backbone = {f"blocks.{k}.{name}" for k in (1, 2) for name, _ in made.blocks[1].named_parameters()
                if name in dict(made.blocks[2].named_parameters())}  # fmt: skip
    own = moved - backbone
    per_sublayer = {"sandwich": 4, "deepnorm": 4, "post_ln": 4, "keel": 4, "layerscale": 4, "attn_res": 8, "block_attn_res": 8,
                    "moda": 4, "hyper_connections": 32, "hyper_connections_static": 12, "mhc": 36}  # fmt: skip
    assert backbone <= moved
    assert len(own) == per_sublayer.get(architecture, 0)
    assert all(name.startswith("connector.") for name in own)


# ---- gradients ---------------------------------------------------------------------------------------------------------
def test_gradient_ratios_at_init():
    """L = 12, d = 64, std .02, eps 0. The published order (Pre-LN 3.3, LNS 4.8, sandwich 6.3, DeepNorm and Post-LN 1.04,
    KEEL 780) holds; the levels move with the data (2.3 .. 3.7 for Pre-LN over seven sets), so bands. Equalities are exact."""
    shape = Shape(12, 64, ffn_dim=176, heads=4, vocab=256, context=16)
    x, y = sequences(4, 16, vocab=256)

    def ratio(architecture, options=None):
        return run(model(architecture, options, shape=shape), ["gradients"], x, y, chunk=4).scalar("gradient_ratio")

    plain = ratio("pre_ln")
    assert 2.2 < plain < 4.0
    assert plain < ratio("lns") < ratio("sandwich") < 11
    assert ratio("deepnorm") == pytest.approx(1, abs=0.1)
    assert ratio("post_ln") == pytest.approx(1, abs=0.1)
    assert 500 < ratio("keel") < 1200
    assert ratio("hyper_connections", UNSCALED) == pytest.approx(plain, rel=1e-9)
    assert ratio("attn_res") == pytest.approx(plain, rel=1e-9)


def test_gradients_are_those_of_backward_in_any_chunks():
    made = perturbed("mhc")
    report = run(made, ["gradients", "backward"], chunk=3)
    made.loss(X, Y).backward()
    norms = [math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters())) for block in made.blocks]
    np.testing.assert_allclose(report.measure("block_gradient").value, norms, rtol=1e-9)
    assert report.scalar("gradient_ratio") == pytest.approx(norms[0] / norms[-1])
    assert report.scalar("gradient_spread") == pytest.approx(max(norms) / min(norms))


def test_state_gradients_by_finite_differences():
    made = perturbed("keel")
    value = run(made, ["backward"], X[:1], Y[:1]).measure("state_gradient").value[2]
    noise = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    pulled = []

    def arrive(i, stream, step=0.0):
        if i == 4:
            stream.restore(i, stream.state(i) + step * noise)

    for step in (1e-5, -1e-5):
        with torch.no_grad():
            hidden = forward(made, X[:1], arrive=lambda i, s, step=step: arrive(i, s, step))
            pulled.append(mean_loss(made, hidden, Y[:1]) * Y[:1].numel())
    directional = (pulled[0] - pulled[1]) / 2e-5
    leaf = []

    def hold(i, stream):
        if i == 4:
            leaf.append(stream.state(i).detach().requires_grad_())
            stream.restore(i, leaf[0])

    loss = functional.cross_entropy(
        made.logits(forward(made, X[:1], arrive=hold)).flatten(0, 1), Y[:1].flatten(), reduction="sum"
    )
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float((gradient * noise).sum()) == pytest.approx(directional, rel=1e-5)
    assert value == pytest.approx(float(gradient.square().mean().sqrt()), rel=1e-9)


# ---- numbers from values per sequence ----------------------------------------------------------------------------------
@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_effective_depth_lies_between_one_and_the_blocks(values):
    delta = np.array([values])
    for count in (effective_depth(delta)[0, 0], participation(delta)[0, 0]):
        assert 1 - 1e-9 <= count <= len(values) + 1e-9
    with_harmless = np.concatenate([delta, [[-3.0, 0.0]]], axis=1)  # blocks whose removal helps don't count
    assert effective_depth(with_harmless)[0, 0] == pytest.approx(effective_depth(delta)[0, 0])
    assert participation(with_harmless)[0, 0] == pytest.approx(participation(delta)[0, 0])


def test_effective_depth_of_equal_blocks_is_their_number_and_of_none_zero():
    assert effective_depth(np.array([[0.3, 0.3, 0.3, -1.0]]))[0, 0] == pytest.approx(3)
    assert participation(np.array([[0.3, 0.3, 0.3, -1.0]]))[0, 0] == pytest.approx(3)
    assert effective_depth(np.array([[0.5, 0.25, 0.25]]))[0, 0] == pytest.approx(2**1.5)
    assert effective_depth(np.array([[-0.1, 0.0]]))[0, 0] == 0
    assert participation(np.array([[-0.1, 0.0]]))[0, 0] == 0
    assert first_below(np.array([[3.0, 0.2, 0.05, 0.2]]), 0.1)[0, 0] == 2
    assert np.isnan(first_below(np.array([[3.0, 0.2]]), 0.1)[0, 0])


def test_thresholds_count():
    made = perturbed("pre_ln")
    report = run(made, ["growth", "removal", "lens"], thresholds=Thresholds(removal=0.05, influence=0.3, lens=0.5))
    assert report.scalar("influential_blocks") == (report.measure("block_influence").value > 0.3).sum()
    assert report.scalar("costly_blocks") == (report.measure("removal_loss").value > 0.05).sum()
    below = np.flatnonzero(report.measure("lens_kl").value < 0.5)
    assert report.scalar("settled_depth") == below[0]
    assert report.settings["thresholds"]["removal"] == 0.05
    assert report.scalar("effective_depth_share") == pytest.approx(report.scalar("effective_depth") / 4)


def test_intervals_over_sequences_cover_a_mean():
    """400 normal samples of 40: a 90 % percentile interval covers within 4 binomial s.d. of .9, less its known shortfall."""
    rng = np.random.default_rng(0)
    hits = 0
    for k in range(400):
        _, low, high = Resamples.draw(40, seed=k, replicates=300, level=0.9).estimate(rng.normal(size=(40, 1)))
        hits += bool(low[0] < 0 < high[0])
    assert 0.9 - 0.02 - 4 * math.sqrt(0.09 / 400) < hits / 400 < 0.9 + 4 * math.sqrt(0.09 / 400)


def test_one_sequence_has_no_interval():
    report = run(perturbed("pre_ln"), ["removal"], X[:1], Y[:1])
    assert np.isnan(report.measure("removal_loss").low).all()


def test_results_do_not_depend_on_the_chunks():
    made = perturbed("attn_res")
    names = ["growth", "rank", "removal", "lens", "paths", "pruning", "usefulness", "contributions", "backward"]
    x, y = sequences(9, 16)
    one, many = (run(made, names, x, y, chunk=c).to_frame() for c in (9, 2))
    np.testing.assert_allclose(one["value"], many["value"], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(one["low"], many["low"], rtol=1e-9, atol=1e-12)


# ---- cost --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PROBES)
def test_passes_are_those_that_were_promised(name):
    said = []
    run(perturbed("pre_ln"), [name], *sequences(6, 32), chunk=2, progress=lambda *args: said.append(args))
    names, done, totals = zip(*said, strict=True)
    assert set(names) == {name}
    assert list(done) == list(range(1, len(done) + 1))
    assert set(totals) == {len(done)} == {3 * PROBES[name].passes(SHAPE.depth)}


def test_the_default_is_linear_in_depth():
    def default(L):
        return sum(p.passes(L) for p in PROBES.values() if p.default)

    assert default(20) - default(10) == 30
    assert {name for name, p in PROBES.items() if not p.default} == {"permutation", "groups"}
    assert default(10) == 3 * 10 + 12


def test_neighbours_only():
    said = []
    report = run(perturbed("pre_ln"), ["permutation"], max_distance=1, progress=lambda *args: said.append(args))
    pairs = report.measure("permutation")
    assert (pairs.other - pairs.at == 1).all()
    assert said[-1][1:] == (4, 4)


# ---- any module --------------------------------------------------------------------------------------------------------
class Linear(nn.Module):
    """Three blocks of two maps on a plain stream: a user's own model, with nothing but the interface."""

    def __init__(self, affine):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(64, 8, generator=generator, dtype=torch.float64))
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2)) for _ in range(3)
        )
        for p in self.blocks.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
        self.bend = (lambda x: x) if affine else torch.tanh
        self.connector = SimpleNamespace(start=Stream)

    def hidden(self, tokens):
        stream = self.connector.start(self.table[tokens])
        for i in range(6):
            layer = getattr(self, "layers", None) or self.blocks
            layer = layer[i // 2][i % 2]
            stream.write(i, stream.apply(i, lambda x, layer=layer: self.bend(layer(x)), stream.read(i)))
        return stream.finish()

    def logits(self, hidden):
        return hidden @ self.table.T


def test_a_module_of_ones_own_runs_every_probe():
    report = run(Linear(affine=False), "all", *sequences(8, 16))
    assert report.skipped == {}
    assert report.depth == 3


def test_without_the_interface_or_blocks():
    with pytest.raises(ConfigError, match=r"no connector.start"):
        probe(nn.Linear(2, 2), X, Y)
    made = Linear(affine=False)
    made.layers = made.blocks
    del made.blocks
    report = run(made, ["gradients", "permutation", "growth"])
    assert set(report.skipped) == {"gradients", "permutation"}
    assert "no `blocks`" in report.skipped["gradients"]


def test_an_odd_number_of_sublayers_and_a_loop_out_of_order():
    made = Linear(affine=False)

    def odd(tokens):
        stream = made.connector.start(made.table[tokens])
        for i in range(5):
            stream.write(i, stream.read(i))
        return stream.finish()

    def jumping(tokens):
        stream = made.connector.start(made.table[tokens])
        stream.read(1)
        return stream.finish()

    for hidden, message in ((odd, "5 sublayers"), (jumping, "count 0 .. 2L - 1 in order")):
        made.hidden = hidden
        with pytest.raises(ConfigError, match=message):
            probe(made, X, Y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"which": ["removals"]}, "'removals' is unknown"),
        ({"chunk": 0}, "chunk=0"),
        ({"level": 1.0}, r"level inside \(0, 1\)"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        probe(model(), X, Y, **options)
    with pytest.raises(ConfigError, match="must both be"):
        probe(model(), X, Y[:, :3])
    with pytest.raises(ConfigError, match="lens=0"):
        Thresholds(lens=0)


# ---- a run's folder ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = RunConfig(
        shape=ShapeSpec(depth=2, width=16, ffn_dim=32, heads=2, vocab=16, context=16), lr=1e-3, tokens=1, corpus="markov",
        corpus_options={"alphabet": 15, "order": 1}, architecture="attn_res", seed=4,
    )  # fmt: skip
    run_dir = tmp_path_factory.mktemp("runs") / config.run_id
    config.save(run_dir / "config.toml")
    torch.save(build_run(config).state_dict(), run_dir / "weights.pt")
    return run_dir


def test_probe_of_a_run_folder(folder):
    report = probe_run(folder, sequences=8, which=["growth", "removal"], chunk=3)
    assert report.label == folder.name
    assert (report.depth, report.settings["sequences"], report.settings["context"]) == (2, 8, 16)
    assert report.loss == pytest.approx(math.log(16), abs=0.1)  # untrained: nearly uniform over 16 symbols
    path = report.save(folder)
    assert path.name == "probes.json"
    assert json.loads(path.read_text())["schema"] == "scalinglab/probes-1"
    again = ProbeReport.load(folder)
    np.testing.assert_array_equal(again.to_frame()["value"], report.to_frame()["value"])


def test_a_run_folder_without_weights_or_with_others(folder, tmp_path):
    (tmp_path / "config.toml").write_bytes((folder / "config.toml").read_bytes())
    with pytest.raises(SchemaError, match="does not exist: the run isn't finished"):
        probe_run(tmp_path)
    torch.save({"other": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(SchemaError, match="not the weights of the model"):
        probe_run(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"nothing")
    with pytest.raises(SchemaError, match="damaged or cut off"):
        probe_run(tmp_path)
    (tmp_path / "weights.pt").write_bytes((folder / "weights.pt").read_bytes())
    (tmp_path / "summary.json").write_text('{"weights_sha256": "0"}')
    with pytest.raises(SchemaError, match="it was exchanged"):
        probe_run(tmp_path)
    with pytest.raises(ConfigError, match="config.toml"):
        probe_run(tmp_path / "nowhere")
