"""Run tables: schema, completion, declared N, last rows, selection."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.runs import SCHEMA, complete, declare_params, final_rows, select, validate
from scalinglab.schema import ordered


def table(**columns) -> pd.DataFrame:
    base = {
        "run_id": ["a", "a", "b"],
        "step": [100, 200, 200],
        "depth": [24, 24, 16],
        "width": [1024, 1024, 1216],
        "ffn_dim": [2736, 2736, 3248],
        "vocab": 50280,
        "context": 2048,
        "tokens": [1e9, 2e9, 2e9],
        "loss": [3.4, 3.1, 3.0],
    }
    return pd.DataFrame(base | columns)


def test_schema_says_type_unit_and_meaning_of_every_column():
    assert all(c.dtype in ("int", "float", "str") and c.unit and c.meaning for c in SCHEMA.values())
    promised = (
        "run_id sweep match_group architecture parametrization seed depth width head_dim ffn_dim aspect vocab context "
        "params_embedding params_attention params_ffn params_readout params_other params_backbone params_total params "
        "tokens flops flops_6n flops_causal flops_full batch_tokens lr loss loss_se step status"
    )
    assert set(promised.split()) <= set(SCHEMA)


def test_validate_returns_canonical_types_and_leaves_the_input_alone():
    df = table(loss=["3.4", "3.1", "3.0"], depth=[24.0, 24.0, 16.0], tokens=[1, 2, 3], mine=["x", "y", "z"])
    before = df.copy()
    out = validate(df)
    assert out.loss.dtype == float
    assert out.depth.dtype == np.int64
    assert out.tokens.dtype == float  # 6 * params * tokens would overflow integers
    assert list(out.mine) == ["x", "y", "z"]
    pd.testing.assert_frame_equal(df, before)


@pytest.mark.parametrize("column", ["params", "tokens", "depth", "width", "loss"])
@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "is zero"), (-1.0, "is negative"), (np.inf, "is infinite"), (np.nan, "is missing")]
)
def test_bad_numbers_name_row_and_column(column, value, word):
    df = table(params=[1e8, 1e8, 2e8])
    df[column] = df[column].astype(float)
    df.loc[1, column] = value
    with pytest.raises(SchemaError, match=rf"my table, row 2, column '{column}'.*{word}"):
        validate(df, source="my table")


def test_other_breaches():
    with pytest.raises(SchemaError, match="run table has no rows"):
        validate(table().iloc[:0])
    with pytest.raises(SchemaError, match="has no column 'loss'; its columns are run_id, step"):
        validate(table().drop(columns="loss"))
    with pytest.raises(SchemaError, match="row 3, column 'loss': 'oops' is not a number"):
        validate(table(loss=["3", "2", "oops"]))
    with pytest.raises(SchemaError, match=r"row 1, column 'depth': 2.5 is not a whole number"):
        validate(table(depth=[2.5, 3, 4]))
    with pytest.raises(SchemaError, match=r"row 2, column 'vocab': 0.5 is too small, vocab must be at least 1"):
        validate(table(vocab=[5, 0.5, 5]))


def test_duplicated_keys_name_both_rows():
    df = table(step=[100, 100, 200], tokens=1e9)
    with pytest.raises(
        SchemaError, match=r"row 2 repeats the key of run table, row 1: run_id=a, step=100, tokens=1000000000"
    ):
        validate(df)
    assert len(validate(df.assign(config=["x", "y", "z"]), key=("config",))) == 3
    assert len(validate(df.assign(eval_dataset=["c4", "dolma", "c4"]))) == 3
    with pytest.raises(ConfigError, match="key column 'nope' is not in the table"):
        validate(df, key=("nope",))


@pytest.mark.parametrize("status", ["diverged", "Killed", " failed ", "nan"])
def test_a_stopped_run_may_lack_its_loss(status):
    df = table(loss=[3.4, np.nan, 3.0], status=["finished", status, "finished"])
    assert validate(df).loss.isna().tolist() == [False, True, False]
    with pytest.raises(SchemaError, match="row 2, column 'loss': loss is missing"):
        validate(df.assign(status="finished"))


def test_complete_computes_what_follows_from_the_shape():
    out = complete(table())
    assert out.aspect.tolist() == pytest.approx([1024 / 24, 1024 / 24, 76])
    assert out.params_backbone.tolist() == [302_433_280, 302_433_280, 284_253_376]
    assert out.params_total.tolist() == [405_406_720, 405_406_720, 406_534_336]
    assert out.flops_6n.tolist() == (6 * out.params_backbone * out.tokens).tolist()
    logits, scores = 6 * 50280 * out.width, 6.0 * out.depth * out.width * 2048
    assert out.flops_causal.tolist() == pytest.approx(
        (out.tokens * (6 * out.params_backbone + logits + scores)).tolist()
    )
    assert (out.flops_full - out.flops_causal).tolist() == pytest.approx((out.tokens * scores).tolist())
    assert out.attrs["mapping"]["aspect"] == "computed: width / depth"
    assert any("swiglu feed-forward, untied readout" in note for note in out.attrs["notes"])


def test_complete_never_overwrites_and_never_mutates():
    df = table(
        aspect=[1.0, np.nan, 3.0], params_backbone=[302432256.0, 302432256.0, 284252160.0], flops_6n=[1.0, 2.0, 3.0]
    )
    before = df.copy()
    out = complete(df)
    pd.testing.assert_frame_equal(df, before)
    assert out.aspect.tolist() == pytest.approx([1.0, 1024 / 24, 3.0])
    assert out.params_backbone.tolist() == df.params_backbone.tolist()
    assert out.flops_6n.tolist() == [1.0, 2.0, 3.0]


def test_complete_leaves_components_of_another_architecture_empty():
    out = complete(table(params_backbone=[3.02e8, 3.02e8, 9e8]))
    assert out.params_ffn.isna().tolist() == [False, False, True]
    assert out.params_backbone.tolist() == [3.02e8, 3.02e8, 9e8]
    assert any("left empty in 1 of 3 rows" in note and "params_backbone" in note for note in out.attrs["notes"])


def test_complete_counts_grouped_queries_and_two_matrix_ffn():
    df = table(heads=16, kv_heads=[16, 8, 8])
    out = complete(df, ffn="gelu", tied=True)
    assert out.params_attention.tolist() == [24 * 4 * 1024**2, 24 * 3 * 1024**2, 16 * 3 * 1216**2]
    assert out.params_ffn.iloc[0] == 24 * 2 * 1024 * 2736
    assert out.params_readout.tolist() == [0, 0, 0]
    assert out.head_dim.tolist() == [64, 64, 76]


def test_complete_without_a_shape_invents_nothing():
    out = complete(pd.DataFrame({"params": [1e8], "tokens": [2e9], "loss": [3.0]}))
    assert out.columns.tolist() == ["params", "tokens", "flops_6n", "loss"]
    assert out.flops_6n.tolist() == [1.2e18]
    assert any("no params_backbone" in note for note in out.attrs["notes"])


def test_declare_params():
    df = complete(table())
    for convention in ("backbone", "total"):
        out = declare_params(df, convention)
        assert out.attrs["params"] == convention
        assert (out.params == df[f"params_{convention}"]).all()
        assert "params" not in df
    with pytest.raises(SchemaError, match="'params_total', which is not in the table; it has params_backbone"):
        declare_params(pd.DataFrame({"params_backbone": [1e8]}), "total")
    with pytest.raises(SchemaError, match=r"'params_total' is missing in 1 rows \(first: row 2\)"):
        declare_params(pd.DataFrame({"params_total": [1e8, np.nan]}), "total")
    with pytest.raises(ConfigError, match="choose one of 'backbone', 'total', 'as given'"):
        declare_params(df, "embedding")


@given(st.permutations(range(12)))
def test_final_rows_are_the_last_steps_whatever_the_order(order):
    df = pd.DataFrame({"run_id": list("abc") * 4, "step": np.repeat([10, 20, 30, 40], 3), "loss": np.arange(12.0) + 1})
    out = final_rows(df.iloc[list(order)])
    assert sorted(out.run_id) == ["a", "b", "c"]
    assert (out.step == 40).all()


def test_final_rows_keep_evaluation_sets_apart_and_attrs():
    df = table(eval_dataset=["c4", "dolma", "c4"])
    df.attrs["notes"] = ["x"]
    out = final_rows(df)
    assert len(out) == 3
    assert out.attrs["notes"] == ["x"]
    assert final_rows(table().drop(columns=["step", "tokens"])).loss.tolist() == [3.1, 3.0]
    with pytest.raises(SchemaError, match="needs the column 'run_id'"):
        final_rows(df.drop(columns="run_id"))


def test_select():
    df = table(**{"val/acc": [0.1, 0.2, 0.3]})
    assert select(df, "run_id == 'a' and step > 100").loss.tolist() == [3.1]
    assert select(df, "val_acc >= 0.2").loss.tolist() == [3.1, 3.0]
    assert select(df.assign(loss=[np.nan, 3.1, 3.0]), "loss == loss").step.tolist() == [200, 200]
    assert select(df, "depth > 3").attrs["notes"] == ["where depth > 3: 3 of 3 rows kept"]
    with pytest.raises(SchemaError, match="keeps none of the 3 rows"):
        select(df, "depth > 99")
    with pytest.raises(ConfigError, match="reads 'dept', which is not there"):
        select(df, "dept > 3")
    with pytest.raises(ConfigError, match="is not a condition"):
        select(df, "depth")
    with pytest.raises(ConfigError, match="can't be evaluated"):
        select(df, "run_id < 3")
    with pytest.raises(ConfigError, match="isn't arithmetic"):
        select(df, "loss.__class__")


@given(st.permutations(["mine", "loss", "run_id", "width", "depth"]))
def test_canonical_columns_come_first(names):
    assert ordered(names) == ["run_id", "depth", "width", "loss", "mine"]
