"""Configs: ids that stay, TOML that comes back, keys that are refused, sweeps that expand the same way."""

import math
import random
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab import tomlfile
from scalinglab.arch_counts import extra_params
from scalinglab.arch_options import OPTIONS
from scalinglab.config import (
    Base,
    Budget,
    Evaluation,
    Matching,
    Optimizer,
    RunConfig,
    Schedule,
    ShapeSpec,
    Sweep,
    canonical,
    whole_steps,
)
from scalinglab.errors import ConfigError
from scalinglab.information import cell_numbers
from scalinglab.matching import charge
from scalinglab.planning import expand, plan, row

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
        (
            {"schedule": {"kind": "wsdd"}},
            "schedule.kind: Invalid enum value 'wsdd'; choose one of cosine, wsd, linear, constant",
        ),
        ({"precision": "fp8"}, "precision: Invalid enum value 'fp8'; choose one of fp32, fp64, bf16"),
        ({"optimizer": {"weight_decay": math.inf}}, "weight_decay=inf must be a finite number"),
        ({"optimizer": {"weight_decay": math.nan}}, "weight_decay=nan must be a finite number"),
        ({"schedule": {"warmup": 1.0}}, r"schedule.warmup=1 takes up all of the run \(100000 tokens\)"),
        ({"schedule": {"warmup_tokens": 100_000}}, "schedule.warmup_tokens=100000 takes up all of the run"),
        (
            {"schedule": {"kind": "wsd", "warmup": 0.5, "decay": 0.6}},
            "schedule.warmup=0.5 and schedule.decay=0.6 overlap",
        ),
        ({"schedule": {"kind": "wsd", "warmup_tokens": 90_000}}, "schedule.warmup_tokens=90000 and .* overlap"),
        ({"parametrization": "mupp"}, "parametrization 'mupp' is unknown; choose one of sp"),
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
        ({"match": [], "shapes": [SHAPE, {**SHAPE, "heads": 5}]}, r"shapes\[1\]: heads=5 does not divide width=32"),
        ({"run": {"corpus": "ca", "schedule": {"kind": "wsdd"}}}, r"run.schedule.kind: .* choose one of cosine, wsd"),
        (
            {"axes": {"optimizer.weight_dekay": [0.1]}},
            r"axes: unknown field optimizer\.weight_dekay of a run; choose from .*eps",
        ),
        (
            {"axes": {"optimizer": [0.1]}},
            r"axes: optimizer is a section; name one of its fields, e\.g\. optimizer\.beta1",
        ),
        ({"axes": {"batch": [4, 2.5]}}, r'axes\."batch"\[1\]: Expected `int`, got `float`'),
        ({"axes": {"batch": []}}, "axes: batch must be a list of at least one value"),
        ({"axes": {"batch": 4}}, "axes: batch must be a list of at least one value, not 4"),
        ({"axes": {"lr": [0.1]}}, "axes: lr has an axis of its own; give lrs"),
        ({"axes": {"shape.depth": [2]}}, "axes: shape.depth has an axis of its own; give shapes or match"),
        ({"axes": {"sweep": ["x"]}}, "axes: unknown field sweep"),
        ({"axes": {"init_std": [-1.0]}}, "run: init_std=-1.0 must be a positive number"),
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
    assert len(noted) == 2


def test_the_plan_counts_what_the_architecture_adds():
    shapes = [{**SHAPE, "depth": 2}, SHAPE]
    table = plan(
        sweep(match=[], shapes=shapes, architectures=["pre_ln", "moda"], parametrizations=["native"], seeds=[0])
    )
    assert len(table) == 8
    assert table.mismatch.isna().all()
    assert table.run_id.is_unique
    for line in table.itertuples():
        shape = ShapeSpec(**{**SHAPE, "depth": line.depth}).build()
        assert (
            line.params_total
            == shape.params_total + extra_params(line.architecture, shape)
            == shape.params_total + line.params_extra
        )
        assert 0 <= line.tokens - 20 * line.params_total < line.batch_tokens
        assert line.tokens == line.steps * line.batch_tokens
        assert line.flops_6n == 6 * line.params_backbone * line.tokens
        cost = charge(shape, architecture=line.architecture)
        assert line.flops_causal == pytest.approx(cost.flops * line.tokens)
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


TUNED = [
    {"architecture": a, "depth": d, "width": 32, "lr": lr}
    for a, d, lr in (("pre_ln", 2, 1e-3), ("pre_ln", 4, 2e-3), ("post_ln", 2, 4e-3), ("post_ln", 4, 8e-3))
]


def test_tuned_learning_rates_by_arm_and_shape():
    arms = {
        "match": [], "shapes": [{**SHAPE, "depth": d, "width": 32} for d in (2, 4)], "parametrizations": ["sp"],
        "architectures": ["pre_ln", "post_ln"], "lrs": [], "seeds": [0, 1],
    }  # fmt: skip
    runs = expand(sweep(**arms, tuned=TUNED)).runs
    want = {(t["architecture"], t["depth"]): t["lr"] for t in TUNED}
    assert len(runs) == 8
    assert all(r.lr == want[r.architecture, r.shape.depth] for r in runs)
    elsewhere = [*TUNED, {**TUNED[0], "lr": 5.0, "corpus": "other"}]  # of another corpus: no concern of this sweep
    assert [r.run_id for r in expand(sweep(**arms, tuned=elsewhere)).runs] == [r.run_id for r in runs]
    with pytest.raises(
        ConfigError, match="tuned has no learning rate for architecture post_ln, parametrization sp, depth 4"
    ):
        expand(sweep(**arms, tuned=TUNED[:3]))
    with pytest.raises(ConfigError, match="has lrs and tuned: give one"):
        sweep(**{**arms, "lrs": [1e-3]}, tuned=TUNED)


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
    assert Budget(flops=1e12).resolve(cost, 1) == math.ceil(1e12 / cost.flops)
    with pytest.raises(ConfigError, match="exactly one positive number"):
        Budget()


def test_canonical_leaves_out_labels_and_defaults():
    kept = canonical(run(sweep="a", match_group="b", seed=0))
    assert set(kept) == {"shape", "lr", "tokens", "corpus"}
    assert kept["shape"]["head_dim"] == 16
    assert math.isclose(kept["lr"], 0.003)


def test_python_calls_are_checked_as_files_are():
    given = {"shape": ShapeSpec(**SHAPE), "lr": 0.003, "tokens": 100_000, "corpus": "ca"}
    for change, message in [
        ({"lr": "a"}, "lr: Expected `float`, got `str`"),
        ({"tokens": None}, "tokens: Expected `int`, got `null`"),
        ({"tokens": 1e6}, "tokens: Expected `int`, got `float`"),
        ({"shape": ShapeSpec(**SHAPE).build()}, "shape: Expected `ShapeSpec`, got `Shape`"),
        ({"schedule": None}, "schedule: Expected `Schedule`, got `NoneType`"),
        ({"positions": "alibi"}, "positions: Invalid enum value 'alibi'; choose one of rope, learned"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RunConfig(**{**given, **change})
    with pytest.raises(ConfigError, match="base: Expected `Base`, got `Optimizer`"):
        RunConfig(**given, base=Optimizer())
    with pytest.raises(ConfigError, match=r"optimizer\.weight_decay: Expected `float`"):
        Optimizer(weight_decay="0.1")
    for wrong in (math.inf, math.nan, -1.0):
        for kind in ("tokens_per_param", "flops"):
            with pytest.raises(ConfigError, match="exactly one positive number"):
                Budget(**{kind: wrong})
    with pytest.raises(ConfigError, match=r"budget\.tokens: Expected `int"):
        Budget(tokens=1e6)


def test_a_sweep_in_python_takes_what_a_file_holds():
    data = {**sweep().to_dict(), "shapes": [SHAPE]}
    typed = Sweep(**data)
    assert typed == tomlfile.convert(data, Sweep)
    assert (typed.budgets, typed.shapes) == ([Budget(tokens_per_param=20)], [ShapeSpec(**SHAPE)])
    assert Sweep(**{**data, "budgets": [Budget(tokens_per_param=20)], "lrs": np.array([1e-3, 3e-3]).tolist()}) == typed
    with pytest.raises(ConfigError, match=r"lrs\[0\]: Expected `float`, got `str`"):
        Sweep(**{**data, "lrs": ["a"]})
    with pytest.raises(ConfigError, match=r"unknown key budgets\[0\]\.token \(did you mean tokens\?\)"):
        Sweep(**{**data, "budgets": [{"token": 5}]})


def test_a_schedule_is_not_held_against_tokens_that_a_budget_brings():
    """The stand-in for tokens is as long as any run; the real tokens are checked when the sweep is expanded."""
    late = {"corpus": "ca", "base": BASE, "schedule": {"kind": "wsd", "warmup_tokens": 50_000}}
    assert len(expand(sweep(run=late, budgets=[{"tokens": 100_000}])).runs) == 48
    with pytest.raises(ConfigError, match="warmup_tokens=50000 and .* overlap: of 50176 tokens"):
        expand(sweep(run=late, budgets=[{"tokens": 50_000}]))
    assert expand(sweep(run={**late, "tokens": 10}, budgets=[{"tokens": 100_000}])).runs[0].tokens == 100_352


def test_further_axes():
    one = {"architectures": ["pre_ln"], "parametrizations": ["sp"], "lrs": [1e-3], "seeds": [0]}
    axes = {"schedule.kind": ["wsd", "cosine"], "optimizer.weight_decay": [0.0, 1e-3], "batch": [4, 8]}
    many = sweep(**one, axes=axes)
    runs = expand(many).runs
    assert [(r.batch, r.optimizer.weight_decay, r.schedule.kind, r.shape.depth) for r in runs] == [
        (b, w, k, d) for b in (4, 8) for w in (0.0, 1e-3) for k in ("wsd", "cosine") for d in (2, 4, 8)
    ]
    nested = {"batch": [4, 8], "optimizer": {"weight_decay": [0, 1e-3]}, "schedule": {"kind": ["wsd", "cosine"]}}
    assert [r.run_id for r in expand(sweep(**one, axes=nested)).runs] == [r.run_id for r in runs]
    assert [r.run_id for r in expand(sweep(**one, axes={})).runs] == [r.run_id for r in expand(sweep(**one)).runs]
    kept = sweep(**one, run={"corpus": "ca", "base": BASE, "optimizer": {"eps": 1e-10}}, axes=axes)
    assert {r.optimizer.eps for r in expand(kept).runs} == {1e-10}
    assert tomlfile.convert(tomllib.loads(tomlfile.dumps(many.to_dict())), Sweep) == many


def test_arms_that_differ_in_options_or_data_have_columns_of_their_own():
    arms = [{"name": "hyper_connections", "options": {"streams": n}} for n in (2, 4)]
    corpora = [{"name": "ca", "options": {"k": k}} for k in (1, 2)]
    table = plan(sweep(architectures=arms, corpora=corpora, parametrizations=["sp"],
                       axes={"optimizer.weight_decay": [0.0, 2e-4], "norm_eps": [1e-8, 1e-6]}))  # fmt: skip
    assert set(table.options) == {'{"streams":2}', ""}  # four streams are the default
    assert set(table.corpus_options) == {'{"k":1}', '{"k":2}'}
    assert set(table.weight_decay) == {0.0, 2e-4}
    assert set(table.settings) == {"", '{"norm_eps":1e-06}'}
    told = table[["decay", "positions", "tied", "ffn", "schedule", "init_std", "precision"]].drop_duplicates()
    assert told.to_numpy().tolist() == [["independent", "rope", 0, "swiglu", "cosine", 0.02, "fp32"]]
    wsd = plan(sweep(run={"corpus": "ca", "base": BASE, "schedule": {"kind": "wsd", "decay": 0.1}})).schedule
    assert set(wsd) == {"wsd decay=0.1"}
    cells = cell_numbers(table)
    assert len(set(cells)) == len(table) // 2  # two seeds
    assert (table.groupby(cells).seed.nunique() == 2).all()


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([
    ("norm_eps", [1e-8, 1e-6]), ("rope_theta", [1e4, 1e5]), ("optimizer.beta2", [0.9, 0.99]), ("optimizer.decay", ["independent", "coupled"]),
    ("evaluation.every", [0, 5]), ("optimizer.grad_clip", [1.0, 2.0]), ("schedule.warmup", [0.0, 0.1]), ("precision", ["fp32", "bf16"]),
    ("positions", ["rope", "learned"]), ("base.width", [32, 64]), ("init_std", [0.02, 0.1]), ("batch", [4, 8]),
]))  # fmt: skip
def test_only_seeds_are_replicates(axis):
    """Whatever field differs, the runs are of two cells."""
    table = plan(sweep(axes=dict([axis]), architectures=["pre_ln"], parametrizations=["completep"], lrs=[1e-3]))
    assert table.groupby(cell_numbers(table)).seed.agg(["size", "nunique"]).eq(2).all(axis=None)


def test_learned_positions_are_counted():
    learned = {"corpus": "ca", "base": BASE, "positions": "learned"}
    rule = {
        "budget": 5.5e4,
        "by": "params_total",
        "depths": [4],
        "heads": 2,
        "vocab": 96,
        "context": 128,
        "tolerance": 0.3,
    }
    table = plan(sweep(run=learned, match=rule))
    assert (table.params_embedding == (96 + 128) * table.width).all()
    assert (table.params_total == table.params_backbone + (2 * 96 + 128) * table.width).all()
    assert np.allclose(table.mismatch, np.log(table.params_total / 5.5e4))
    assert (
        (table.tokens >= 20 * table.params_total) & (table.tokens < 20 * table.params_total + table.batch_tokens)
    ).all()
    assert set(table.width) != set(plan(sweep(match=rule)).width)
    rope = plan(sweep(match=[], shapes=[SHAPE])).iloc[0]
    other = plan(sweep(match=[], shapes=[SHAPE], run=learned)).iloc[0]
    same = ["params_backbone", "params_readout", "params_attention"]
    assert rope[same].tolist() == other[same].tolist()
    assert rope.flops_causal / rope.tokens == other.flops_causal / other.tokens


@pytest.mark.parametrize("positions", ["rope", "learned"])
@pytest.mark.parametrize("tied", [False, True])
def test_planned_parameters_are_those_of_the_model(positions, tied):
    pytest.importorskip("torch", reason="the model that is counted")
    from scalinglab.train.scaling import build

    config = run(positions=positions, shape={**SHAPE, "tied": tied}, architecture="hyper_connections")
    assert sum(p.numel() for p in build(config).parameters()) == row(config)["params_total"]


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_budgets_and_tokens_are_rounded_alike(tokens, step):
    steps = whole_steps(tokens, step)
    assert (steps - 1) * step < tokens <= steps * step
    assert whole_steps(float(tokens), step) in (steps, max(1, round(tokens / step)))  # to 1e-9 of a whole step
    assert (
        Budget(tokens=tokens).resolve(charge(ShapeSpec(**SHAPE).build()), step)
        == whole_steps(float(tokens), step) * step
    )


def test_rounding_errors_make_no_step():
    cost = charge(ShapeSpec(**SHAPE).build())
    for steps in range(1, 200):
        assert Budget(flops=cost.flops * steps * 1024).resolve(cost, 1024) == steps * 1024


def test_a_budget_below_one_step_is_said():
    noted = expand(sweep(budgets=[{"tokens": 1000}])).notes
    assert re.fullmatch(
        r"48 runs would be shorter than one step and get one: pre_ln-L2-\S+ asks for 1e\+03 tokens, a step has 1024",
        noted[0],
    )
    assert not expand(sweep(budgets=[{"tokens": 1024}])).notes


def test_match_groups_do_not_collide():
    rule = {"budget": 5e4, "depths": [2, 4], "heads": 2, "vocab": 96, "context": 128, "tolerance": 0.3}
    many = [rule, {**rule, "head_multiple": 4}, {**rule, "budget": 50_000.01}, {**rule, "budget": 6e4}]
    assert sweep(match=many).match_labels() == [
        "params_backbone=50000 head_multiple=2", "params_backbone=50000 head_multiple=4",
        "params_backbone=50000.010000000002", "params_backbone=60000",
    ]  # fmt: skip
    assert len(set(sweep(match=[{**rule, "budget": b} for b in (1_000_000, 1_000_001)]).match_labels())) == 2
    two = plan(sweep(match=rule, budgets=[{"tokens": 2048}, {"tokens_per_param": 20}]))
    assert set(two.match_group) == {"params_backbone=50000 tokens=2048", "params_backbone=50000 tokens_per_param=20"}
    with pytest.raises(ConfigError, match="match has the rule params_backbone=50000 twice"):
        sweep(match=[rule, rule]).match_labels()
    ratios = [{"tokens_per_param": 20}, {"tokens_per_param": 20, "of": "params_backbone"}]
    both = plan(sweep(match=rule, budgets=ratios))
    assert both.groupby("match_group").size().to_dict() == {
        "params_backbone=50000 tokens_per_param=20": 32,
        "params_backbone=50000 tokens_per_param=20 of=params_backbone": 32,
    }


def test_a_shape_that_fails_names_file_and_place(tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        tomlfile.dumps(
            {"name": "s", "run": {"lr": 0.1, "tokens": 5, "corpus": "ca"}, "shapes": [{**SHAPE, "heads": 5}]}
        )
    )
    with pytest.raises(ConfigError, match=r"sweep\.toml: shapes\[0\]: heads=5 does not divide width=32"):
        Sweep.load(path)


# ---- the reference page ----------------------------------------------------------------------------------------------------
PAGE = (Path(__file__).parents[1] / "docs" / "sweep-file.md").read_text()


def section(title):
    """Text below a heading, up to the next one of its rank or above."""
    rank = title.index(" ")
    return re.split(rf"^#{{1,{rank}}} ", PAGE.split(f"\n{title}", 1)[1], flags=re.MULTILINE)[0]


def table_rows(title):
    """Cells of the tables right below a heading, without their heads."""
    text = re.split(r"^#", section(title), flags=re.MULTILINE)[0]
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in rows if row[-1] != "meaning"]


def test_the_page_has_every_field_of_a_sweep():
    where = {
        Sweep: "## The top", RunConfig: "## `[run]`", ShapeSpec: "### `[run.shape]`", Base: "### `[run.base]`", Optimizer: "### `[run.optimizer]`",
        Schedule: "### `[run.schedule]`", Evaluation: "### `[run.evaluation]`", Matching: "## `[match]`", Budget: "## `budgets`",
    }  # fmt: skip
    for kind, title in where.items():
        missing = [
            f for f in kind.__struct_fields__ if f"`{f}`" not in section(title) and f"[run.{f}]" not in section(title)
        ]
        assert not missing, (title, missing)


@pytest.mark.parametrize(
    ("kind", "title"),
    [(RunConfig, "## `[run]`"), (Optimizer, "### `[run.optimizer]`"), (Schedule, "### `[run.schedule]`"),
     (Evaluation, "### `[run.evaluation]`"), (ShapeSpec, "### `[run.shape]`"), (Matching, "## `[match]`"), (Budget, "## `budgets`")],
)  # fmt: skip
def test_defaults_on_the_page_are_those_of_the_code(kind, title):
    held = {f.name: f.default for f in msgspec.structs.fields(kind)}
    checked = 0
    for names, default, _ in table_rows(title):
        for name, value in zip(re.findall("`([^`]+)`", names), re.findall("`([^`]+)`", default), strict=False):
            expected = {} if held[name] is msgspec.NODEFAULT else held[name]
            assert tomllib.loads(f"x = {value}")["x"] == expected, name
            checked += 1
    assert checked >= 2, "the table could not be read"


def test_the_page_has_every_option_of_an_architecture():
    given, owner = {name: {} for name in OPTIONS}, ""
    for line in table_rows("## Architectures"):
        name, option, default = (cell.strip("`") for cell in line[:3])
        owner = name or owner
        assert owner in OPTIONS, owner
        if option:
            given[owner][option] = default
    given["hyper_connections_static"] = given["hyper_connections"] | {"dynamic": "false"}
    assert {n: set(o) for n, o in given.items()} == {n: {f.name for f in fields(kind)} for n, kind in OPTIONS.items()}
    for name, options in given.items():
        for field in fields(OPTIONS[name]):
            if field.default is not None:
                assert tomllib.loads(f"x = {options[field.name]}")["x"] == field.default, (name, field.name)
    assert {line[0].strip("`") for line in table_rows("## Architectures")} - {""} == set(OPTIONS)


def test_the_page_has_every_option_of_a_corpus():
    from scalinglab.train.corpora import CORPORA, open_corpus

    given, facts, owner = {}, {}, ""
    for line in table_rows("## Corpora"):
        name, vocab, floor, option, default = (cell.strip("`") for cell in line[:5])
        owner = name or owner
        given.setdefault(owner, {})[option] = default
        facts.setdefault(owner, (vocab, floor))
    assert list(given) == [*CORPORA, "kjv", "text"]
    for name, kind in CORPORA.items():
        assert set(given[name]) == {f.name for f in fields(kind)} - {"context"}
        for field in fields(kind):
            if field.name != "context":
                written = tomllib.loads(f"x = {given[name][field.name]}")["x"]
                assert (tuple(written) if isinstance(written, list) else written) == field.default
        corpus = open_corpus(name, {}, context=128)
        assert facts[name] == (str(corpus.vocab), f"{corpus.floor(128):.4f}")
    for name in ("kjv", "text"):
        with pytest.raises(ConfigError) as refused:
            open_corpus(name, {"?": 1})
        assert set(given[name]) == set(str(refused.value).partition("options are ")[2].split(", "))
