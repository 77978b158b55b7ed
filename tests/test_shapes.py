"""Parameter and FLOP counts against an independent count of matrices, and against DepthBench's published shapes."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.errors import ConfigError
from scalinglab.published import depthbench
from scalinglab.shapes import Shape, block_constant, flops_per_token, parameter_counts

# (depth, width, ffn_dim, backbone, total) in millions as DepthBench prints them for its 400M grid (repository README).
PUBLISHED_400M = [
    (16, 1216, 3248, 284.3, 406.5),
    (20, 1120, 2992, 301.5, 414.1),
    (24, 1024, 2736, 302.4, 405.4),
    (28, 960, 2560, 309.7, 406.2),
    (32, 896, 2400, 309.3, 399.4),
    (42, 800, 2144, 323.7, 404.2),
    (70, 640, 1712, 344.9, 409.2),
]

SHAPES = st.builds(
    lambda depth, heads, group, head_dim, ffn_dim, vocab, context, ffn, tied: Shape(
        depth,
        heads * group * head_dim,
        ffn_dim=ffn_dim,
        heads=heads * group,
        kv_heads=heads,
        vocab=vocab,
        context=context,
        ffn=ffn,
        tied=tied,
    ),
    st.integers(1, 90),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 128),
    st.integers(1, 9000),
    st.integers(1, 200_000),
    st.integers(1, 8192),
    st.sampled_from(["swiglu", "gelu"]),
    st.booleans(),
)


def matrices(shape: Shape) -> dict[str, list[tuple[int, ...]]]:
    """Every tensor of the model by name of its component, as a model's state dict would list them."""
    d, h, f = shape.width, shape.head_dim, shape.ffn_dim
    q, kv = shape.heads * h, shape.kv_heads * h
    block = {
        "params_attention": [(d, q), (d, kv), (d, kv), (q, d)],
        "params_ffn": [(d, f)] * (2 if shape.ffn == "swiglu" else 1) + [(f, d)],
        "params_other": [(d,), (d,)],
    }
    tensors = {name: many * shape.depth for name, many in block.items()}
    tensors["params_other"] = [*tensors["params_other"], (d,)]
    tensors["params_embedding"] = [(shape.vocab, d)]
    tensors["params_readout"] = [] if shape.tied else [(d, shape.vocab)]
    return tensors


@given(SHAPES)
def test_counts_equal_the_sum_over_tensors(shape):
    counted = {name: sum(int(np.prod(t)) for t in tensors) for name, tensors in matrices(shape).items()}
    assert {name: shape.params[name] for name in counted} == counted
    assert shape.params_total == sum(counted.values())
    assert shape.params_backbone == shape.params_total - counted["params_embedding"] - counted["params_readout"]
    assert shape.kappa * shape.depth * shape.width**2 == pytest.approx(shape.params_backbone)


@given(SHAPES)
def test_flop_conventions_differ_by_what_they_count(shape):
    n, logits = 6 * shape.params_backbone, 6 * shape.vocab * shape.width
    scores = shape.depth * shape.width * shape.context
    assert shape.flops_per_token("6n") == n
    assert shape.flops_per_token("causal") == n + logits + 6 * scores
    assert shape.flops_per_token("full") == n + logits + 12 * scores


def test_closed_form_of_the_usual_block():
    shape = Shape(24, 1024, ffn_dim=2736, heads=16, vocab=50280, context=2048)
    assert shape.params_backbone == 24 * (4 * 1024**2 + 3 * 1024 * 2736 + 2 * 1024) + 1024 == 302_433_280
    assert shape.params_total == 405_406_720
    assert shape.aspect == pytest.approx(42.67, abs=0.01)
    assert shape.kappa == pytest.approx(12.018, abs=1e-3)
    assert shape.head_dim == 64


@pytest.mark.parametrize(("depth", "width", "ffn_dim", "backbone", "total"), PUBLISHED_400M)
def test_depthbench_published_counts(depth, width, ffn_dim, backbone, total):
    shape = Shape(depth, width, ffn_dim=ffn_dim, heads=16, vocab=50280, context=2048)
    assert round(shape.params_backbone / 1e6, 1) == backbone
    assert round(shape.params_total / 1e6, 1) == total


LADDER = {  # three aspect ratios (about 28, 43, 75) of five sizes, the fifteen shapes of DepthBench's size ladder
    "200M": [(24, 672, 1792), (18, 768, 2048), (12, 896, 2400)],
    "300M": [(28, 800, 2144), (21, 896, 2400), (14, 1056, 2816)],
    "400M": [(32, 896, 2400), (24, 1024, 2736), (16, 1216, 3248)],
    "500M": [(34, 992, 2656), (26, 1120, 2992), (17, 1344, 3584)],
    "1.6B": [(28, 2048, 6144), (40, 1728, 5184), (54, 1504, 4512)],
}


def test_depthbench_ladder_is_matched_on_total_within_three_percent():
    assert sum(map(len, LADDER.values())) == 15
    for name, shapes in LADDER.items():
        kv = 8 if name == "1.6B" else 16
        made = [Shape(d, w, ffn_dim=f, heads=16, kv_heads=kv, vocab=50280, context=2048) for d, w, f in shapes]
        totals = np.array([shape.params_total for shape in made])
        assert np.ptp(np.log(totals)) < 0.06, name
        assert totals.mean() == pytest.approx(float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]], rel=0.03), name
    ends = [
        Shape(*s[:2], ffn_dim=s[2], heads=16, vocab=50280, context=2048) for s in (LADDER["200M"][0], LADDER["500M"][0])
    ]
    assert [round(shape.params_backbone / 1e6) for shape in ends] == [130, 403]  # as published


def test_depthbench_table_counts_are_exact():
    table = depthbench().drop_duplicates(["depth", "width"])
    assert len(table) == 11
    for row in table.itertuples():
        shape = Shape(row.depth, row.width, ffn_dim=row.ffn_dim, heads=row.heads, vocab=row.vocab, context=row.context)
        assert shape.params_total == row.params_total
        assert shape.params_backbone == row.params_backbone + row.width  # the table leaves out the final norm
        assert shape.flops_per_token("causal") == row.flops_per_token + 6 * row.width


def test_gqa_of_the_qwen_like_tier():
    shape = Shape(28, 2048, ffn_dim=6144, heads=16, kv_heads=8, vocab=50280, context=2048)
    assert shape.params["params_attention"] == 28 * (2 * 2048 * 2048 + 2 * 2048 * 1024)
    assert round(shape.params_total / 1e9, 1) == 1.6


def test_columns_and_shapes_are_one_implementation():
    table = pd.DataFrame({"depth": [3, 48], "width": [256, 1024], "ffn_dim": [1024, 2736]})
    counts = parameter_counts(table.depth, table.width, table.ffn_dim, vocab=50304)
    for i, row in enumerate(table.itertuples()):
        shape = Shape(row.depth, row.width, ffn_dim=row.ffn_dim, heads=2, vocab=50304, context=8)
        assert {k: int(v.iloc[i]) if hasattr(v, "iloc") else int(v) for k, v in counts.items()} == shape.params
    assert block_constant(counts["params_backbone"], table.depth, table.width).iloc[1] == pytest.approx(12.02, abs=0.01)
    assert "params_total" not in parameter_counts(2, 64, 128)


def test_a_shape_is_frozen_and_keyword_only():
    shape = Shape(2, 64, ffn_dim=128, head_dim=16, vocab=256, context=32)
    assert (shape.heads, shape.kv_heads) == (4, 4)
    with pytest.raises(AttributeError):
        shape.depth = 3
    with pytest.raises(TypeError):
        Shape(2, 64, 128, vocab=256, context=32, heads=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 0}, "depth=0 of a Shape must be a positive whole number"),
        ({"width": 64.0}, "width=64.0 of a Shape must be"),
        ({"vocab": True}, "vocab=True"),
        ({"heads": 5}, "heads=5 does not divide width=64"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"kv_heads": 0}, "kv_heads=0 of a Shape"),
        ({"ffn": "relu"}, "ffn='relu' is unknown; choose one of swiglu, gelu"),
        ({"heads": 0}, "needs heads or head_dim"),
    ],
)
def test_bad_shapes(change, message):
    good = {"depth": 2, "width": 64, "ffn_dim": 128, "heads": 4, "vocab": 256, "context": 32}
    with pytest.raises(ConfigError, match=message):
        Shape(**{**good, **change})


def test_flops_say_what_they_miss():
    assert flops_per_token(10, convention="6n") == 60
    with pytest.raises(ConfigError, match="'causal' needs vocab, context"):
        flops_per_token(10, depth=1, width=2)
    with pytest.raises(ConfigError, match="'8n' is unknown; choose one of 6n, causal, full"):
        flops_per_token(10, convention="8n")
    with pytest.raises(ConfigError, match="ffn='relu' is unknown"):
        parameter_counts(1, 2, 3, ffn="relu")
