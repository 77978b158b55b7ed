"""The shared backbone: attention, feed-forward, norm, positions, init, multipliers and tags, against independent code."""

import math
import pickle

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from scalinglab.arch_options import OPTIONS
from scalinglab.errors import ConfigError
from scalinglab.parametrization import PARAMETRIZATIONS
from scalinglab.shapes import Shape
from scalinglab.train.layers import Attention, FeedForward, RMSNorm, normalize, rotary, rotate
from scalinglab.train.model import Model, ModelConfig
from scalinglab.train.roles import retag, tag, tag_of, tags

SHAPE = Shape(3, 24, ffn_dim=40, heads=4, kv_heads=2, vocab=32, context=16)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def tokens(batch=2, length=12, seed=3):
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(seed))


def build(shape=SHAPE, **config):
    return Model(ModelConfig(shape, **{"dtype": "float64", **config}))


def fill(module, seed=0, std=0.5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * std)
    return module.double()


# ------------------------------------------------------------------------------------------------------------------ norm


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_rms_norm(eps):
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    norm = fill(RMSNorm(7, eps, "branch"))
    rows = x.numpy()
    expected = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + eps) * norm.gain_d.detach().numpy()
    np.testing.assert_allclose(norm(x).detach().numpy(), expected, rtol=1e-13)


def test_norm_without_eps_ignores_the_scale():
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(normalize(1e-9 * x, 0.0), normalize(x, 0.0), rtol=1e-14, atol=0)


def test_norm_statistics_are_float32_in_half_precision():
    # 4096 squares of 1 + 2^-7 would stall in a bfloat16 sum; float32 statistics give one rounding of the result.
    x = torch.full((4096,), 1 + 2**-7, dtype=torch.bfloat16)
    x[0] = 8.0
    expected = (x.double() / x.double().pow(2).mean().sqrt()).to(torch.bfloat16)
    assert normalize(x, 0.0).dtype == torch.bfloat16
    assert torch.equal(normalize(x, 0.0), expected)


# ------------------------------------------------------------------------------------------------------------- positions


def test_rotation_keeps_lengths_and_depends_on_distance():
    cos_sin = rotary(16, 8, 1e4, torch.zeros(0, dtype=torch.float64))
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    turned_q, turned_k = (rotate(x.expand(16, 8), cos_sin) for x in (q, k))
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(16))
    logits = turned_q @ turned_k.T
    for distance in (0, 3, 9):
        diagonal = logits.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-12, atol=1e-12)
    assert logits.diagonal(-1)[0] != logits.diagonal(-2)[0]
    assert torch.equal(turned_q[0], q)  # position 0 is not turned


def test_rotary_angles():
    cos, sin = rotary(5, 4, 100.0, torch.zeros(0, dtype=torch.float64))
    # Frequencies 100^0 and 100^(-1/2).
    np.testing.assert_allclose(cos[3].numpy(), [math.cos(3), math.cos(0.3)])
    np.testing.assert_allclose(sin[4].numpy(), [math.sin(4), math.sin(0.4)])


def test_odd_head_size_needs_learned_positions():
    shape = Shape(2, 15, ffn_dim=8, heads=3, vocab=8, context=8)
    with pytest.raises(ConfigError, match="head_dim=5 must be even"):
        ModelConfig(shape)
    assert Model(ModelConfig(shape, positions="learned"))(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 8)


def test_learned_positions():
    model = build(positions="learned")
    assert sum(p.numel() for p in model.parameters()) == SHAPE.params_total + 16 * 24
    same = torch.full((1, 6), 5)
    logits = model(same)
    assert not torch.allclose(logits[0, 0], logits[0, 5])  # one token everywhere, so only positions can tell
    with pytest.raises(ConfigError, match="17 tokens are more than the 16 learned positions"):
        model(torch.zeros(1, 17, dtype=torch.long))
    assert build()(torch.zeros(1, 17, dtype=torch.long)).shape[1] == 17  # rotary positions go on


# -------------------------------------------------------------------------------------------------------------- sublayers


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_attention_with_loops(kv_heads, scale):
    shape = Shape(1, 24, ffn_dim=8, heads=4, head_dim=4, kv_heads=kv_heads, vocab=8, context=8)
    attention = fill(Attention(shape, scale))
    x = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    positions = rotary(6, 4, 1e4, x)
    found = attention(x, positions)
    expected = torch.zeros_like(found)
    for b in range(2):
        q, k, v = (x[b] @ w.T for w in (attention.query_hd, attention.key_kd, attention.value_kd))
        mixed = torch.zeros(6, 16, dtype=torch.float64)
        for h in range(4):
            ours, shared = slice(4 * h, 4 * h + 4), slice(4 * (h * kv_heads // 4), 4 * (h * kv_heads // 4) + 4)
            turned_q, turned_k = rotate(q[:, ours], positions), rotate(k[:, shared], positions)
            for t in range(6):
                logits = torch.stack([turned_q[t] @ turned_k[s] for s in range(t + 1)]) * (
                    0.5 if scale is None else scale
                )
                mixed[t, ours] = torch.softmax(logits, 0) @ v[: t + 1, shared]
        expected[b] = mixed @ attention.output_dh.T
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_feed_forward(ffn):
    layer = fill(FeedForward(Shape(1, 6, ffn_dim=10, heads=1, vocab=8, context=8, ffn=ffn)))
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    up = x @ layer.up_fd.T
    if ffn == "swiglu":
        gate = x @ layer.gate_fd.T
        inner = gate * torch.sigmoid(gate) * up
    else:
        inner = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    torch.testing.assert_close(layer(x), inner @ layer.down_df.T, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------------ model


def test_pre_ln_model_written_out():
    model = fill(build(norm_eps=1e-6), std=0.3)
    text = tokens()
    h = model.embedding_vd[text]
    positions = rotary(12, 6, 1e4, h)
    for block in model.blocks:
        h = h + block.attention(block.attention_norm(h), positions)
        h = h + block.ffn(block.ffn_norm(h))
    expected = model.final_norm(h) @ model.head_vd.T
    torch.testing.assert_close(model(text), expected, rtol=1e-12, atol=1e-12)
    loss = -torch.log_softmax(expected, -1).gather(-1, tokens(seed=9)[..., None]).mean()
    torch.testing.assert_close(model.loss(text, tokens(seed=9)), loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_shape_counts_the_model(tied, ffn):
    shape = Shape(2, 24, ffn_dim=40, heads=4, kv_heads=2, vocab=32, context=16, ffn=ffn, tied=tied)
    model = build(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.params_total
    assert ("head_vd" in dict(model.named_parameters())) is not tied
    assert model(tokens()).shape == (2, 12, 32)


def test_multipliers():
    base = build()
    assert torch.equal(build(readout_multiplier=0.5)(tokens()), 0.5 * base(tokens()))
    none = build(branch_multiplier=0.0)
    torch.testing.assert_close(none.hidden(tokens()), none.embedding_vd[tokens()])
    large, outputs = build(branch_multiplier=2.0), []
    large.hidden(tokens(), observe=lambda i, stream, x, y: outputs.append(y))
    base_outputs = []
    base.hidden(tokens(), observe=lambda i, stream, x, y: base_outputs.append(y))
    torch.testing.assert_close(outputs[0], 2 * base_outputs[0])
    lifted = build(embedding_multiplier=3.0, branch_multiplier=0.0)
    torch.testing.assert_close(lifted.hidden(tokens()), 3 * lifted.embedding_vd[tokens()])


def test_attention_scale_default_is_one_over_root_head_size():
    explicit = build(attention_scale=1 / math.sqrt(SHAPE.head_dim))
    assert torch.equal(explicit(tokens()), build()(tokens()))
    assert not torch.equal(build(attention_scale=0.01)(tokens()), build()(tokens()))


def test_loss_at_init_is_near_the_uniform_one():
    assert build(dtype="float32").loss(tokens(), tokens(seed=1)).item() == pytest.approx(math.log(32), abs=0.05)


def test_a_model_is_re_entrant():
    model = build(architecture="hyper_connections")
    one, two = tokens(seed=1), tokens(seed=2)
    expected = model(one), model(two)
    streams = [model.connector.start(model.embedding_vd[t]) for t in (one, two)]
    for i in range(6):
        block = model.blocks[i // 2]
        norm, part = (block.ffn_norm, block.ffn) if i % 2 else (block.attention_norm, block.attention)
        for stream in streams:  # two passes in step
            x = norm(stream.read(i))
            stream.write(i, part(x) if i % 2 else part(x, rotary(12, 6, 1e4, x)))
    for stream, logits in zip(streams, expected, strict=True):
        torch.testing.assert_close(model.logits(stream.finish()), logits)


def test_skipping_a_block_that_adds_nothing_changes_nothing():
    model = build()
    with torch.no_grad():
        model.blocks[1].attention.output_dh.zero_()
        model.blocks[1].ffn.down_df.zero_()
    assert torch.equal(model.hidden(tokens(), skip=(2, 3)), model.hidden(tokens()))
    assert not torch.equal(model.hidden(tokens(), skip=(0, 1)), model.hidden(tokens()))


@pytest.mark.parametrize("architecture", list(OPTIONS))
def test_any_sublayers_can_be_skipped_and_states_have_their_size(architecture):
    shape = Shape(4, 24, ffn_dim=40, heads=4, vocab=32, context=16)
    model, states = build(shape, architecture=architecture), []
    model.hidden(tokens(), skip=(2, 3, 7), observe=lambda i, stream, x, y: states.append(stream.state(i + 1)))
    streams = {"hyper_connections": 4, "hyper_connections_static": 4, "mhc": 4}.get(architecture, 1)
    assert [state.shape for state in states] == [(2, 12, 24 * streams)] * 5
    assert torch.isfinite(model.hidden(tokens(), skip=range(8))).all()


# ------------------------------------------------------------------------------------------------------------------- init


def test_init_std_and_cut():
    shape = Shape(2, 128, ffn_dim=256, heads=4, vocab=512, context=64)
    model = build(shape, init_std=0.05)
    for param in (model.embedding_vd, model.head_vd, model.blocks[0].attention.output_dh, model.blocks[1].ffn.down_df):
        # A normal cut at three sigma has std 0.98658 sigma.
        assert param.std().item() == pytest.approx(0.98658 * 0.05, rel=0.02)
        assert param.abs().max() <= 0.15
    assert all((m.gain_d == 1).all() for m in model.modules() if isinstance(m, RMSNorm))


def test_gpt2_init_divides_output_projections():
    plain, scaled = build(), build(init="gpt2")
    for name, param in plain.named_parameters():
        factor = 1 / math.sqrt(6) if name.endswith(("output_dh", "down_df")) else 1.0
        torch.testing.assert_close(scaled.get_parameter(name), factor * param, rtol=1e-6, atol=0)


def test_init_depends_on_the_generator_alone():
    state = torch.random.get_rng_state()
    one, two = build(), build()
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is nobody's business
    two.init_weights(torch.Generator().manual_seed(7))
    assert not torch.equal(one.head_vd, two.head_vd)
    two.init_weights(torch.Generator().manual_seed(0))
    assert torch.equal(one.head_vd, two.head_vd)
    torch.testing.assert_close(build(dtype="float32").head_vd.double(), one.head_vd, rtol=1e-7, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_meta_init(tied):
    shape = Shape(2, 24, ffn_dim=40, heads=4, vocab=32, context=16, tied=tied)
    with torch.device("meta"):
        model = build(shape, positions="learned")
    model.to_empty(device="cpu").init_weights(torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens()), build(shape, positions="learned")(tokens()))


def test_gradients_by_finite_differences():
    model = fill(build(Shape(1, 8, ffn_dim=12, heads=2, vocab=32, context=16)), std=0.5)
    text, targets = tokens(1, 5), tokens(1, 5, seed=8)
    model.loss(text, targets).backward()
    for name, param in model.named_parameters():
        flat, grad = param.data.view(-1), param.grad.view(-1)
        place, step = int(grad.abs().argmax()), 1e-6
        with torch.no_grad():
            flat[place] += step
            up = model.loss(text, targets)
            flat[place] -= 2 * step
            down = model.loss(text, targets)
            flat[place] += step
        assert ((up - down) / (2 * step)).item() == pytest.approx(grad[place].item(), rel=1e-6), name


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architecture": "gpt"}, "unknown; choose one of pre_ln"),
        ({"positions": "alibi"}, "positions='alibi' is unknown; choose one of rope, learned"),
        ({"init": "xavier"}, "choose one of normal, gpt2"),
        ({"dtype": "float16"}, "choose one of float32, float64, bfloat16"),
        ({"norm_eps": -1e-6}, "0 or positive"),
        ({"init_std": 0.0}, "init_std=0.0 must be positive"),
        ({"init": "gpt2", "branch_multiplier": 0.5}, "depth twice"),
    ],
)
def test_configs_that_make_no_sense_are_refused(config, match):
    with pytest.raises(ConfigError, match=match):
        ModelConfig(SHAPE, **config)


# ------------------------------------------------------------------------------------------------------------------- tags


@pytest.mark.parametrize("architecture", list(OPTIONS))
def test_every_parameter_has_a_rule_in_every_parametrization(architecture):
    shape = Shape(4, 24, ffn_dim=40, heads=4, vocab=32, context=16)
    found = tags(build(shape, architecture=architecture, positions="learned"))
    for name, t in found.items():
        for table in PARAMETRIZATIONS.values():
            table.resolve(t.role, t.location, width_ratio=2.0, depth_ratio=2.0)
        assert (t.location == "outside") == name.startswith(("embedding", "positions", "head", "final_norm")), name
        if t.role == "vector":
            assert t.fan_in == 1


def test_fan_in_is_the_number_of_terms():
    model = build()
    for name, param in model.named_parameters():
        if tag_of(param, name).role in ("matrix", "readout"):
            assert tag_of(param, name).fan_in == param.shape[-1], name


def test_what_acts_on_the_stream_is_trunk():
    expected = {
        "pre_ln": set(), "sandwich": set(), "attn_res": set(), "moda": set(), "layerscale": set(),
        "deepnorm": {"gain_d"}, "keel": {"gain_d"}, "mix_ln": {"gain_d"},
        "hyper_connections": {"mix_nn", "mix_weight_nd", "mix_scale"},
        "mhc": {"mix_nn", "mix_weight", "mix_gate"},
    }  # fmt: skip
    shape = Shape(4, 24, ffn_dim=40, heads=4, vocab=32, context=16)
    for architecture, leaves in expected.items():
        found = tags(build(shape, architecture=architecture))
        assert {name.split(".")[-1] for name, t in found.items() if t.location == "trunk"} == leaves, architecture


def test_static_routing_is_exempt_from_decay_by_default():
    shape = Shape(4, 24, ffn_dim=40, heads=4, vocab=32, context=16)
    for architecture, leaves in {
        "hyper_connections": {"read_n", "mix_nn", "write_n"},
        "mhc": {"read_n", "mix_nn", "write_n", "read_gate", "mix_gate", "write_gate"},
        "attn_res": set(),
    }.items():
        found = tags(build(shape, architecture=architecture))
        assert {name.split(".")[-1] for name, t in found.items() if not t.decay} == leaves


def test_tags_survive_pickle_and_conversion():
    model = build()
    assert tags(pickle.loads(pickle.dumps(model))) == tags(model)
    assert tags(model.to(torch.bfloat16)) == tags(build())


def test_untagged_and_mistagged_parameters_are_errors():
    with pytest.raises(ConfigError, match="weight has no role"):
        tags(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="choose one of input, matrix"):
        tag(nn.Parameter(torch.zeros(2)), "bias", "branch", 1)
    with pytest.raises(ConfigError, match="fan_in=0"):
        tag(nn.Parameter(torch.zeros(2)), "vector", "branch", 0)


def test_retag_leaves_unknown_parameters_alone():
    layer = nn.Linear(2, 2)
    retag(layer, {})
    assert not hasattr(layer.weight, "role")
