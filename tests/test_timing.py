"""Predicted wall time: exact where the truth is a power law, and an upper bound on what a schedule can do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("joblib")

from run_folders import config

from scalinglab import ConfigError
from scalinglab.config import Evaluation, RunConfig, Schedule
from scalinglab.train import timing
from scalinglab.train.jobs import stacks
from scalinglab.train.timing import predict


def runs(*architectures: str, depths: tuple[int, ...] = (1, 2, 4, 8)) -> list[RunConfig]:
    return [config(architecture=a, depth=d, seed=s) for a in architectures for d in depths for s in (0, 1)]


def power_law(monkeypatch: pytest.MonkeyPatch, *, timed: Any = lambda kind: True) -> dict[str, float]:
    """Let a step take flops^0.8 nanoseconds (twice that for post_ln), and time only some kinds. Returns the truth."""
    truth: dict[str, float] = {}

    def measure(kinds: dict[str, Any], *_: Any) -> dict[str, Any]:
        found = {}
        for key, kind in kinds.items():
            seconds = 1e-9 * kind.flops**0.8 * (2 if kind.stack[0].architecture == "post_ln" else 1)
            truth.update({run.run_id: seconds for run in kind.stack})
            if timed(kind):
                found[key] = timing._Timed(seconds, 1e10)
        return found

    monkeypatch.setattr(timing, "_time", measure)
    return truth


def test_within_an_architecture_the_rate_follows_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = power_law(monkeypatch, timed=lambda kind: kind.stack[0].shape.depth in (1, 8))
    table = predict(runs("pre_ln", "post_ln"), workers=1)
    assert dict(zip(table["run_id"], table["step_seconds"], strict=True)) == pytest.approx(truth, rel=1e-12)
    assert table.set_index("depth")["basis"].to_dict() == {
        1: "timed",
        2: "2 timed in post_ln",
        4: "2 timed in post_ln",
        8: "timed",
    }
    flops = 1e-9 * table["step_seconds"].iloc[0]  # any scale: the share is a ratio of rates
    assert np.isfinite(flops)
    assert table["peak_share"].between(0, 10).all()
    assert "4 of 8 kinds of stacks timed" in table.attrs["basis"]


def test_an_untimed_architecture_takes_the_rates_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = power_law(monkeypatch, timed=lambda kind: kind.stack[0].architecture == "pre_ln")
    table = predict(runs("pre_ln", "post_ln"), workers=1)
    other = table[table["architecture"] == "post_ln"]
    assert (other["basis"] == "other architectures").all()
    assert other["step_seconds"].to_numpy() == pytest.approx([truth[i] / 2 for i in other["run_id"]], rel=1e-12)


def test_without_timing_the_rates_are_assumed_and_said_to_be() -> None:
    table = predict(runs("pre_ln"), seconds=0, workers=2)
    assert (table["basis"] == "assumed").all()
    assert table["peak_share"].isna().all()
    assert table["seconds"].gt(0).all()
    assert "0 of 4" in table.attrs["basis"]


def test_the_sweep_takes_as_long_as_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    power_law(monkeypatch)
    given = runs("pre_ln", "post_ln")
    one = predict(given, workers=1)
    assert one.attrs["wall_seconds"] == pytest.approx(one["seconds"].sum() + 4.0)  # a worker starts in 4 s
    two = predict(given, workers=2)
    longest = two.groupby("depth")["seconds"].sum().max()
    assert max(two["seconds"].sum() / 2, longest / 2) <= two.attrs["wall_seconds"] - 4 <= one["seconds"].sum()
    many = predict(given, workers=99)
    per_job = [sum(many.set_index("run_id")["seconds"][list(job.run_ids)]) for job in stacks(given)]
    assert many.attrs["wall_seconds"] == pytest.approx(max(per_job) + 4)


def test_evaluations_cost_a_third_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    power_law(monkeypatch)
    few = config(evaluation=Evaluation(sequences=2))
    many = config(evaluation=Evaluation(sequences=2000))
    a, b = predict([few], workers=1).iloc[0], predict([many], workers=1).iloc[0]
    tokens = 2 * (2000 - 2) * few.shape.context  # before and after training
    assert b["seconds"] - a["seconds"] == pytest.approx(0.34 * tokens / few.batch_tokens * a["step_seconds"], rel=1e-9)


def test_a_shared_trunk_takes_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens a step: 8 and 16 steps; the second goes on where the decay of the first began, after 6."""
    power_law(monkeypatch)
    schedule = Schedule(kind="wsd", warmup_tokens=64)
    ladder = [config(tokens=t, schedule=schedule, evaluation=Evaluation(sequences=2, every=2)) for t in (512, 1024)]
    apart = [predict([run], workers=1).iloc[0] for run in ladder]
    both = predict(ladder, workers=1)
    assert both["seconds"].iloc[0] == pytest.approx(apart[0]["seconds"])
    # evaluations at steps 0, 2, 4 and 6 were those of the first run as well; each is of 2 sequences, one step's tokens
    saved = apart[1]["step_seconds"] * (6 + 4 * 0.34)
    assert both["seconds"].iloc[1] == pytest.approx(apart[1]["seconds"] - saved, rel=1e-9)
    assert both.attrs["wall_seconds"] == pytest.approx(both["seconds"].sum() + 4)


def test_a_run_whose_warmup_is_longer_than_the_timing_is_timed() -> None:
    long = config(tokens=64 * 1000, schedule=Schedule(warmup_tokens=64 * 100))
    assert predict([long], seconds=2, workers=1)["basis"].tolist() == ["timed"]


def test_what_is_timed_first_differs_most() -> None:
    kinds = {
        timing._kind_key(stack): timing._Kind(stack, timing._step_flops(stack[0]))
        for job in stacks(runs("pre_ln", "post_ln"))
        for stack in job.stacks
    }
    order = [(kinds[k].stack[0].architecture, kinds[k].stack[0].shape.depth) for k in timing._by_distance(kinds)]
    assert order[:4] == [("pre_ln", 8), ("post_ln", 8), ("pre_ln", 1), ("post_ln", 1)]
    assert sorted(order) == sorted((a, d) for a in ("pre_ln", "post_ln") for d in (1, 2, 4, 8))


def test_steps_are_really_timed() -> None:
    table = predict(runs("pre_ln", depths=(1,)), seconds=3, workers=1)
    assert table["basis"].tolist() == ["timed"] * 2
    # three decimal orders around what such a step can take on any machine of today
    assert 1e-5 < table["step_seconds"].iloc[0] < 1
    assert 0 < table["peak_share"].iloc[0] < 1
    assert math.isfinite(table.attrs["wall_seconds"])


@pytest.mark.parametrize(
    ("given", "options", "told"),
    [
        ([config()], {"seconds": -1}, "seconds=-1"),
        ([config(corpus="novel")], {"seconds": 3, "workers": 1}, "can't be timed: corpus='novel'"),
        ([config()], {"max_replicas": 0}, "max_replicas=0"),
        ([config()], {"workers": 0}, "workers=0 must be at least 1"),
        ([config()], {"workers": -2, "seconds": 0}, "workers=-2 must be at least 1"),
    ],
)
def test_bad_requests(given: list[RunConfig], options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        predict(given, **options)
