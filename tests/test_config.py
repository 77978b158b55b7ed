"""Configs: ids that stay, TOML that comes back, keys that are refused, sweeps that expand the same way."""

import math
import random
import re
import tomllib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab import tomlfile
from scalinglab.arch_counts import extra_params
from scalinglab.config import Budget, RunConfig, ShapeSpec, Sweep, canonical
from scalinglab.errors import ConfigError
from scalinglab.matching import charge
from scalinglab.planning import expand, plan

SHAPE = {"depth": 4, "width": 32, "ffn_dim": 96, "vocab": 96, "context": 128, "heads": 2}
BASE = {"depth": 4, "width": 32, "head_dim": 16, "ffn_dim": 96}
RUN = {"shape": SHAPE, "lr": 0.003, "tokens": 100_000, "corpus": "ca"}


def run(**changes):
    return tomlfile.convert({**RUN, **changes}, RunConfig)


def sweep(**changes):
    data = {
        "name": "depth", "run": {"corpus": "ca", "base": BASE}, "lrs": [1e-3, 3e-3], "seeds": [0, 1],
        "budgets": [{"tokens_per_param": 20}], "architectures": ["pre_ln", "lns"], "parametrizations": ["sp", "completep"],
        "match": {"budget": 5.5e4, "depths": [2, 4, 8], "heads": 2, "vocab": 96, "context": 128, "tolerance": 0.1},
    }  # fmt: skip
    return tomlfile.convert({**data, **changes}, Sweep)


def shuffled(data, rng):
    if not isinstance(data, dict):
        return data
    return {key: shuffled(data[key], rng) for key in rng.sample(list(data), len(data))}


def test_golden_ids():
    """These ids are on people's disks. A change here needs a new SCHEMA and a line in the changelog."""
    assert run().run_id == "pre_ln-L4-d32-sp-lr0.003-s0-11cd18b877"
    full = run(architecture="hyper_connections", options={"streams": 2}, parametrization="completep", base=BASE, seed=3,
               perturb={"matrix.branch.lr": {"depth": -0.5}}, optimizer={"weight_decay": 0.0})  # fmt: skip
    assert full.run_id == "hyper_connections-L4-d32-completep+1-lr0.003-s3-7e4c87d74b"


def test_defaults_are_held_fast():
    """Defaults are no part of the hash, so that they may not change under it."""
    every = {f: getattr(run(), f) for f in RunConfig.__struct_fields__ if f not in RUN}
    assert every == {
        "corpus_options": {}, "architecture": "pre_ln", "options": {}, "parametrization": "sp", "perturb": {}, "base": None,
        "seed": 0, "batch": 8, "init_std": 0.02, "norm_eps": 1e-8, "positions": "rope", "rope_theta": 1e4,
        "precision": "fp32", "optimizer": every["optimizer"], "schedule": every["schedule"],
        "evaluation": every["evaluation"], "sweep": "", "match_group": "",
    }  # fmt: skip
    assert msgspec.structs.astuple(every["optimizer"]) == (0.9, 0.95, 1e-12, 2e-4, "independent", 1.0)
    assert msgspec.structs.astuple(every["schedule"]) == ("cosine", 0.1, 0.1, 0.2, None)
    assert msgspec.structs.astuple(every["evaluation"]) == (256, 0)


@given(st.randoms(use_true_random=False))
def test_id_does_not_depend_on_key_order(rng):
    data = {**RUN, "options": {"streams": 2, "tanh": False}, "architecture": "hyper_connections",
            "optimizer": {"beta1": 0.8, "eps": 1e-10}}  # fmt: skip
    assert tomlfile.convert(shuffled(data, rng), RunConfig).run_id == tomlfile.convert(data, RunConfig).run_id


@pytest.mark.parametrize(
    "same",
    [
        {"batch": 8, "optimizer": {"beta1": 0.9}},
        {"shape": {**SHAPE, "head_dim": 16, "kv_heads": 2, "tied": False}},
        {"sweep": "one", "match_group": "two"},
        {"base": BASE},  # sp scales nothing
        {"options": {}},
    ],
)
def test_one_run_has_one_id(same):
    assert run(**same).run_id == run().run_id


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1}, {"lr": 0.0030000001}, {"tokens": 100_001}, {"corpus_options": {"width": 8}}, {"architecture": "lns"},
        {"shape": {**SHAPE, "tied": True}}, {"optimizer": {"beta2": 0.99}}, {"parametrization": "sp_gpt2"},
        {"schedule": {"warmup": 0.0}}, {"precision": "fp64"}, {"perturb": {"input.outside.lr": {"width": 1}}, "base": BASE},
    ],
)  # fmt: skip
def test_another_run_has_another_id(other):
    assert run(**other).run_id != run().run_id


def test_python_and_numpy_values_give_the_id_of_the_file():
    shape = ShapeSpec(**SHAPE)
    assert RunConfig(shape=shape, lr=np.float64(0.003), tokens=np.int64(100_000), corpus="ca").run_id == run().run_id
    assert run(lr=1).run_id == run(lr=1.0).run_id
    looped = {"architecture": "hyper_connections"}
    assert run(**looped, options={"streams": 4}).run_id == run(**looped).run_id  # an option at its default
    with pytest.raises(ConfigError, match="lr: Expected `float`"):
        _ = RunConfig(shape=shape, lr=True, tokens=100_000, corpus="ca").run_id
    with pytest.raises(ConfigError, match="a config can't hold this value"):
        _ = RunConfig(shape=shape, lr=0.1, tokens=10, corpus="ca", corpus_options={"a": object()}).run_id
    assert re.fullmatch(r"[A-Za-z0-9_.+-]+", run(parametrization="alpha=0.75", base=BASE).run_id)


def test_steps_and_scaling():
    assert (run().batch_tokens, run().steps) == (1024, 98)
    named = run(parametrization="native", architecture="lns", base=BASE).scaling()
    assert named.table["branch_multiplier"].depth == -0.5
    wrong = run(parametrization="completep", perturb={"branch_multiplier": {"depth": -0.5}}, base=BASE).scaling()
    assert wrong.description == "completep: branch_multiplier depth -1 -> -0.5"


def test_toml_round_trip(tmp_path):
    config = run(architecture="hyper_connections", options={"streams": 2}, lr=1e-7, perturb={"branch_multiplier": {"depth": -0.5}},
                 base=BASE, corpus_options={"path": 'a "b"\\\n', "weights": [0.5, 1.0], "on": True})  # fmt: skip
    assert RunConfig.load(config.save(tmp_path / "run.toml")) == config
    many = sweep(architectures=["pre_ln", {"name": "moda", "options": {"ffn_cache": False}}])
    assert Sweep.load(many.save(tmp_path / "sweep.toml")) == many


TOML = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), TOML, max_size=4))
def test_written_toml_is_read_back_equal(data):
    assert tomllib.loads(tomlfile.dumps(data)) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"optimizer": {"beta": 0.9}},
            r"unknown key optimizer\.beta \(did you mean beta\d\?\); keys there are beta1, beta2",
        ),
        ({"shape": {**SHAPE, "hidden": 3}}, r"unknown key shape\.hidden; keys there are depth, width"),
        ({"learning_rate": 0.1}, "unknown key learning_rate; keys there are shape, lr"),
        ({"lr": "fast"}, "lr: Expected `float`, got `str`"),
        ({"lr": -1.0}, "lr=-1.0 must be a positive number"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"optimizer": {"beta1": 1.0}}, r"optimizer.beta1=1.0 must lie in \[0, 1\)"),
        ({"optimizer": {"grad_clip": 0.0}}, "grad_clip=0.0 must be positive"),
        ({"schedule": {"kind": "step"}}, "schedule.kind: Invalid enum value 'step'"),
        ({"parametrization": "completep"}, r"'completep' needs \[base\]"),
        ({"parametrization": "mup3", "base": BASE}, "'mup3' is unknown"),
        ({"perturb": {"branch_multiplier": {"deep": 1}}, "base": BASE}, "'deep' is no exponent"),
        ({"architecture": "resnet"}, "architecture 'resnet' is unknown"),
        ({"options": {"streams": 2}}, "option 'streams' of pre_ln is unknown"),
        ({"shape": {**SHAPE, "heads": 5}}, "heads=5 does not divide width=32"),
    ],
)
def test_a_wrong_run_is_refused_with_its_path(change, message):
    with pytest.raises(ConfigError, match=message):
        run(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"run": {"corpus": "ca", "optimizer": {"bta1": 0.9}}},
            r"unknown key run\.optimizer\.bta1 \(did you mean beta1\?\)",
        ),
        ({"run": {"corpus": "ca", "wdith": 3}}, r"unknown key run\.wdith"),
        ({"match": {"budget": 1.0, "depth": [2]}}, r"unknown key match\.depth \(did you mean depths\?\)"),
        ({"budgets": [{"tokens": 5}, {"flop": 1}]}, r"unknown key budgets\[1\]\.flop \(did you mean flops\?\)"),
        ({"budgets": [{"tokens": 5, "flops": 1.0}]}, r"budgets\[0\]: a budget is exactly one positive number"),
        ({"match": []}, "has no shapes"),
        ({"lrs": []}, r"needs lrs or run\.lr"),
        ({"run": {}}, r"needs corpora or run\.corpus"),
        ({"run": {"corpus": "ca", "sweep": "x"}}, r"run\.sweep is set by the sweep"),
        ({"seeed": [1]}, r"unknown key seeed \(did you mean seeds\?\)"),
    ],
)
def test_a_wrong_sweep_is_refused_with_its_path(change, message):
    with pytest.raises(ConfigError, match=message):
        sweep(**change)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"run\.toml: can't be read"):
        RunConfig.load(path)
    path.write_text("lr = ")
    with pytest.raises(ConfigError, match=r"run\.toml: not TOML"):
        RunConfig.load(path)
    path.write_text("lr = 1.0")
    with pytest.raises(ConfigError, match=r"run\.toml: Object missing required field"):
        RunConfig.load(path)
    with pytest.raises(ConfigError, match="TOML can't hold"):
        tomlfile.dumps({"a": object()})


def test_a_sweep_is_the_product_of_its_axes():
    expansion = expand(sweep())
    assert len(expansion.runs) == 3 * 2 * 2 * 2 * 2
    assert not expansion.notes
    assert len({r.run_id for r in expansion.runs}) == len(expansion.runs)
    assert {r.sweep for r in expansion.runs} == {"depth"}
    axes = {(r.shape.depth, r.lr, r.seed, r.architecture, r.parametrization) for r in expansion.runs}
    assert len(axes) == len(expansion.runs)
    assert [(r.architecture, r.parametrization, r.shape.depth, r.lr, r.seed) for r in expansion.runs[:3]] == [
        ("pre_ln", "sp", 2, 1e-3, 0), ("pre_ln", "sp", 2, 1e-3, 1), ("pre_ln", "sp", 2, 3e-3, 0)
    ]  # fmt: skip


def test_expansion_does_not_depend_on_key_order():
    data = sweep().to_dict()
    again = tomlfile.convert(shuffled(data, random.Random(1)), Sweep)
    assert [r.run_id for r in expand(again).runs] == [r.run_id for r in expand(sweep()).runs]


def test_duplicates_are_removed_and_said():
    expansion = expand(sweep(lrs=[1e-3, 3e-3, 0.001], architectures=["pre_ln"]))
    assert len(expansion.runs) == len(expansion.mismatch) == 24
    assert re.match(r"12 duplicate runs removed: pre_ln-L2-.*, \.\.\.", expansion.notes[0])


def test_notes_of_a_sweep():
    noted = expand(sweep(run={"corpus": "ca", "base": BASE, "positions": "learned",
                              "optimizer": {"decay": "coupled", "eps": 1e-8}})).notes  # fmt: skip
    assert [note.split(":")[0] for note in noted][:2] == ["weight decay is coupled", "optimizer.eps is above 1e-12"]
    assert "learned positions add" in noted[2]


def test_the_plan_counts_what_the_architecture_adds():
    shapes = [{**SHAPE, "depth": 2}, SHAPE]
    table = plan(
        sweep(match=[], shapes=shapes, architectures=["pre_ln", "moda"], parametrizations=["native"], seeds=[0])
    )
    assert len(table) == 8
    assert table.mismatch.isna().all()
    assert table.run_id.is_unique
    for row in table.itertuples():
        shape = ShapeSpec(**{**SHAPE, "depth": row.depth}).build()
        assert (
            row.params_total
            == shape.params_total + extra_params(row.architecture, shape)
            == shape.params_total + row.params_extra
        )
        assert row.tokens == pytest.approx(20 * row.params_total, abs=row.batch_tokens / 2)
        assert row.tokens == row.steps * row.batch_tokens
        assert row.flops_6n == 6 * row.params_backbone * row.tokens
        cost = charge(shape, architecture=row.architecture)
        assert row.flops_causal == pytest.approx(cost.flops * row.tokens)
    assert set(table.parametrization) == {"native"}
    assert set(table.alpha) == {1.0}


def test_matching_with_and_without_the_charge():
    rule = {"budget": 5e4, "depths": [4], "heads": 2, "vocab": 96, "context": 128, "tolerance": 0.2}
    arms = {"architectures": ["pre_ln", "moda"], "parametrizations": ["sp"], "lrs": [1e-3], "seeds": [0]}
    charged, free = (plan(sweep(match={**rule, "charge": c}, **arms)).set_index("architecture") for c in (True, False))
    assert free.loc["moda", "width"] == free.loc["pre_ln", "width"] > charged.loc["moda", "width"]
    for table in (charged, free):
        assert np.allclose(table.mismatch, np.log(table.params_backbone / 5e4))
    assert free.loc["moda", "mismatch"] > free.loc["pre_ln", "mismatch"] + 0.1
    assert set(free.match_group) == {"params_backbone=50000"}


def test_several_rules_are_several_groups():
    rules = [
        {"budget": b, "depths": [2, 4], "heads": 2, "vocab": 96, "context": 128, "tolerance": 0.2} for b in (3e4, 6e4)
    ]
    table = plan(sweep(match=rules))
    assert table.groupby("match_group").size().to_dict() == {"params_backbone=30000": 32, "params_backbone=60000": 32}


def test_budgets():
    cost = charge(ShapeSpec(**SHAPE).build())
    assert Budget(tokens=1000).resolve(cost, 512) == 1024
    assert Budget(tokens=1).resolve(cost, 512) == 512
    assert Budget(tokens_per_param=20, of="params_backbone").resolve(cost, 1) == 20 * cost.params["params_backbone"]
    assert Budget(flops=1e12).resolve(cost, 1) == round(1e12 / cost.flops)
    with pytest.raises(ConfigError, match="exactly one positive number"):
        Budget()


def test_canonical_leaves_out_labels_and_defaults():
    kept = canonical(run(sweep="a", match_group="b", seed=0))
    assert set(kept) == {"shape", "lr", "tokens", "corpus"}
    assert kept["shape"]["head_dim"] == 16
    assert math.isclose(kept["lr"], 0.003)
