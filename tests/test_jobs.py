"""Which runs train together: a function of the list of runs and of nothing else."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import config

from scalinglab import ConfigError
from scalinglab.config import Optimizer, RunConfig, Schedule
from scalinglab.planning import row
from scalinglab.train.jobs import Job, efficiency, lineup, pending, shard, stack_key, stacks

WSD = Schedule(kind="wsd", warmup_tokens=64)


def grid(
    seeds: int = 3, depths: tuple[int, ...] = (1, 2), tokens: tuple[int, ...] = (512,), **fields: object
) -> list[RunConfig]:
    return [
        config(depth=d, seed=s, lr=lr, tokens=t, **fields)
        for d in depths
        for t in tokens
        for lr in (0.01, 0.02)
        for s in range(seeds)
    ]


def test_runs_that_differ_in_seed_rate_decay_and_clipping_are_one_stack() -> None:
    runs = [
        config(), config(seed=1), config(lr=0.02), config(optimizer=Optimizer(weight_decay=0.1)),
        config(optimizer=Optimizer(grad_clip=2.0)), config(sweep="other"), config(match_group="g"),
    ]  # fmt: skip
    others = [
        config(depth=2), config(tokens=1024), config(batch=3), config(architecture="post_ln"), config(norm_eps=1e-5),
        config(optimizer=Optimizer(beta2=0.9)), config(corpus_options={"width": 5}), config(precision="fp64"),
    ]  # fmt: skip
    made = stacks([*runs, *others])
    assert [len(job.runs) for job in made] == [len(runs)] + [1] * len(others)


def test_a_key_agrees_with_what_the_stack_itself_refuses() -> None:
    pytest.importorskip("torch")
    from scalinglab.train.stack import check_stackable

    pairs = [
        (config(), config(seed=3, lr=0.5)),
        (config(), config(depth=2)),
        (config(), config(corpus_options={"width": 5})),
    ]
    for a, b in pairs:
        if stack_key(a) == stack_key(b):
            check_stackable([a, b])
        else:
            with pytest.raises(ConfigError, match="differ in"):
                check_stackable([a, b])


def test_names_agree_with_the_checkpoints_of_the_loop() -> None:
    pytest.importorskip("torch")
    from scalinglab.train.loop import stack_id

    (job,) = stacks([config(), config(seed=1)])
    assert job.name == stack_id(job.stacks[0])


@settings(max_examples=50, deadline=None)
@given(seeds=st.integers(1, 40), most=st.one_of(st.none(), st.integers(1, 13)))
def test_every_run_is_in_one_stack_of_bounded_and_even_size(seeds: int, most: int | None) -> None:
    runs = [config(seed=s, batch=2) for s in range(seeds)]  # 64 tokens a step: the limit is twelve replicas
    made = stacks(runs, max_replicas=most)
    assert sorted(r.run_id for job in made for r in job.runs) == sorted(r.run_id for r in runs)
    sizes = [len(job.runs) for job in made]
    assert max(sizes) <= (most or 12)
    assert max(sizes) - min(sizes) <= 1


def test_a_stack_has_about_4096_tokens_a_step() -> None:
    for batch, most in {32: 4, 64: 2, 128: 1, 1000: 1, 2: 12}.items():  # context 32
        sizes = [len(job.runs) for job in stacks([config(seed=s, batch=batch) for s in range(12)])]
        assert max(sizes) == most


def test_the_grouping_is_the_same_every_time_and_whatever_is_around_a_family() -> None:
    runs = grid()
    made = stacks(runs)
    assert [job.run_ids for job in stacks(list(runs))] == [job.run_ids for job in made]
    assert made[0] in stacks([r for r in runs if r.shape.depth == 1])
    assert made[1].name in [job.name for job in stacks([config(width=16), *runs])]


def test_a_ladder_of_budgets_follows_one_trunk_from_the_smallest_up() -> None:
    runs = grid(tokens=(1024, 256, 512), depths=(1,), schedule=WSD)
    (job,) = stacks(runs)
    assert [stack[0].tokens for stack in job.stacks] == [256, 512, 1024]
    assert len({tuple((r.seed, r.lr) for r in stack) for stack in job.stacks}) == 1, "the same replicas on every rung"
    # without a warmup in tokens the trunks differ, and so do cosine schedules
    for schedule in (Schedule(kind="wsd"), Schedule(warmup_tokens=64)):
        assert len(stacks(grid(tokens=(1024, 256), depths=(1,), schedule=schedule))) == 2
    # 64 tokens a step: rungs of 4, 8 and 16 steps, which decay in the last 1, 2 and 3; each takes the trunk before it over
    assert job.trunks == (0, 3, 6)
    left = {256: 4 / 4, 512: 5 / 8, 1024: 10 / 16}
    assert job.flops == pytest.approx(sum(row(r)["flops_causal"] * left[r.tokens] for r in job.runs))


def test_a_rung_of_other_runs_has_no_trunk_to_take_over() -> None:
    first, second, fewer = (tuple(grid(tokens=(t,), depths=(1,), schedule=WSD)) for t in (256, 512, 1024))
    assert Job((first, second, fewer[:1])).trunks == (0, 3, 0)
    plain = tuple(tuple(grid(tokens=(t,), depths=(1,))) for t in (256, 512))
    assert Job(plain).trunks == (0, 0)


def test_cost_and_order() -> None:
    small, large = stacks([config(), config(depth=8)])
    assert lineup([small, large]) == [large, small]
    assert small.flops == pytest.approx(row(small.runs[0])["flops_causal"])
    assert efficiency(16) == pytest.approx(0.29)
    assert efficiency(4) == efficiency(16)
    assert efficiency(40) > efficiency(32)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 9), seed=st.integers(0, 99))
def test_shards_are_a_partition(count: int, seed: int) -> None:
    runs = [config(depth=d, tokens=t) for d in (1, 2, 3) for t in (64, 512, 4096)]
    random.Random(seed).shuffle(runs)
    jobs = stacks(runs)
    parts = [shard(jobs, i + 1, count) for i in range(count)]
    assert sorted(job.name for part in parts for job in part) == sorted(job.name for job in jobs)
    loads = [sum(job.cost for job in part) for part in parts]
    assert max(loads) <= sum(loads) / count + max(job.cost for job in jobs)  # Graham's bound


def test_what_is_left_of_a_sweep() -> None:
    runs = grid(seeds=2, depths=(1,))
    jobs = stacks(runs)
    ids = [r.run_id for r in runs]
    assert pending(jobs, ids) == []
    assert pending(jobs, []) == jobs
    (rest,) = pending(jobs, ids[:1])
    assert list(rest.run_ids) == ids[1:]


def test_a_stack_that_was_begun_goes_on_as_it_was() -> None:
    runs = grid(seeds=2, depths=(1,))
    jobs = stacks(runs)
    begun = (runs[0], runs[2])
    made = pending(jobs, [runs[0].run_id], [begun])
    assert [job.runs for job in made] == [begun, (runs[1], runs[3])]
    # nothing asked of it is left: it is not taken up
    assert pending(jobs, [r.run_id for r in begun], [begun]) == [Job(((runs[1], runs[3]),))]
    # of two that share a run the first counts
    made = pending(jobs, [], [begun, (runs[2], runs[3])])
    assert [job.runs for job in made] == [begun, (runs[1], runs[3])]


def test_a_ladder_stays_in_order_around_a_stack_that_was_begun() -> None:
    runs = [config(seed=s, tokens=t, schedule=WSD) for t in (256, 512) for s in (0, 1)]
    jobs = stacks(runs)
    (made,) = pending(jobs, [], [(runs[0],)])
    assert made.stacks == ((runs[0],), (runs[1],), (runs[2], runs[3]))
    (made,) = pending(jobs, [runs[0].run_id, runs[1].run_id])
    assert made.stacks == ((runs[2], runs[3]),)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: stacks([config()], max_replicas=0), "max_replicas=0"),
        (lambda: shard([], 3, 2), "shard 3/2"),
        (lambda: shard([], 0, 2), "from 1 to N"),
    ],
)
def test_bad_requests(call: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()  # type: ignore[operator]
