"""What a large study costs: nothing is worked out, read or held more often than its size asks for, and no result changes by it."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from run_folders import config, write_run

from scalinglab import collecting, comparison, diagnostics, planning, uncertainty
from scalinglab.collecting import collect
from scalinglab.config import RunConfig, ShapeSpec, Sweep, canonical
from scalinglab.encoding import encode
from scalinglab.errors import ConfigError
from scalinglab.fitting import Fit, fit
from scalinglab.laws import LAWS
from scalinglab.planning import Arms, expand, plan, row

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "scale.py"
BASE = {"depth": 2, "width": 16, "head_dim": 4, "ffn_dim": 48}


def wide_sweep(seeds: int = 2, **changes: Any) -> Sweep:
    """Arms of every kind: options, perturbed and native parametrizations, budgets, further axes."""
    given: dict[str, Any] = {
        "name": "wide",
        "run": {"corpus": "automaton", "corpus_options": {"width": 4}, "base": BASE, "batch": 2},
        "shapes": [
            ShapeSpec(depth=depth, width=16, heads=4, ffn_dim=48, vocab=16, context=32, kv_heads=kv)
            for depth, kv in ((2, None), (4, 2))
        ],
        "budgets": [{"tokens": 640}, {"tokens_per_param": 0.5}],
        "architectures": ["pre_ln", {"name": "layerscale", "options": {"initial": 1}}],
        "parametrizations": ["sp", "native", {"name": "completep", "perturb": {"matrix.branch.lr": {"depth": 0.5}}}],
        "lrs": [0.001, 0.01],
        "seeds": list(range(seeds)),
        "axes": {"optimizer.weight_decay": [0.0, 1e-3]},
    }
    return Sweep(**{**given, **changes})


# ---- plan ------------------------------------------------------------------------------------------------------------------
def test_a_plan_is_the_table_of_its_runs_worked_out_one_by_one() -> None:
    made = expand(wide_sweep())
    alone = pd.DataFrame([row(run, miss) for run, miss in zip(made.runs, made.mismatch, strict=True)])
    pd.testing.assert_frame_equal(plan(made), alone, check_exact=True)
    assert plan(made)["run_id"].tolist() == [run.run_id for run in made.runs]
    assert len(alone) == 2 * 2 * 2 * 3 * 2 * 2 * 2
    assert plan(wide_sweep()).equals(plan(made))


def test_ids_of_arms_are_those_of_their_runs_whatever_the_types() -> None:
    arms = Arms()
    shape = ShapeSpec(depth=2, width=16, heads=4, ffn_dim=48, vocab=16, context=32)
    for lr in (0.01, 1, np.float64(0.02)):
        for seed in (0, 3, np.int64(4)):
            for init in (0.02, 1, 1.0):
                run = RunConfig(shape=shape, lr=lr, tokens=640, corpus="automaton", seed=seed, init_std=init)
                assert arms.name(run) == run.run_id == row(run, arms=arms)["run_id"]


def test_more_seeds_and_rates_work_out_no_more_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = calls(monkeypatch, planning, "canonical")
    few = len(expand(wide_sweep(seeds=2)).runs), counted()
    many = len(expand(wide_sweep(seeds=40, lrs=[1e-3 * k for k in range(1, 6)])).runs), counted()
    assert many[0] == 50 * few[0]
    assert many[1] - few[1] == few[1], "canonical configs are made per arm, not per run"


def test_the_short_way_to_a_canonical_config_is_the_long_one() -> None:
    """A config of the declared types skips the way through plain data; one of other types doesn't."""
    shape = {"depth": 2, "width": 16, "heads": 4, "ffn_dim": 48, "vocab": 16, "context": 32}
    given: dict[str, Any] = {"tokens": 640, "corpus": "automaton", "seed": 1}
    exact = RunConfig(shape=ShapeSpec(**shape), lr=1.0, init_std=1.0, perturb={"matrix.branch.lr": {"depth": 1.0}},
                      base=base(), parametrization="mup", **given)  # fmt: skip
    loose = RunConfig(
        shape=ShapeSpec(**{k: np.int64(v) for k, v in shape.items()}), lr=1, init_std=np.float64(1),
        perturb={"matrix.branch.lr": {"depth": 1}}, base=base(), parametrization="mup",
        **{k: np.int64(v) if isinstance(v, int) else v for k, v in given.items()},
    )  # fmt: skip
    assert repr(canonical(exact)) == repr(canonical(loose))
    assert exact.run_id == loose.run_id


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", "fast"), ("lr", True), ("seed", 1.5), ("seed", True), ("batch", None), ("precision", "fp8"), ("corpus", 3),
     ("options", []), ("optimizer", {}), ("positions", None), ("perturb", {"a": 1})],
)  # fmt: skip
def test_a_wrong_type_is_refused_as_before(field: str, value: object) -> None:
    shape = ShapeSpec(depth=2, width=16, heads=4, ffn_dim=48, vocab=16, context=32)
    with pytest.raises(ConfigError, match=rf"{field}(\[\.\.\.\])?: (Expected|Invalid enum value)"):
        RunConfig(**{"shape": shape, "lr": 0.1, "tokens": 640, "corpus": "automaton", field: value})


def test_a_bad_rate_among_good_ones_is_named_as_when_it_comes_first() -> None:
    with pytest.raises(ConfigError) as first:
        expand(wide_sweep(lrs=[-1.0]))
    with pytest.raises(ConfigError) as later:
        expand(wide_sweep(lrs=[0.1, -1.0]))
    assert str(first.value) == str(later.value)


# ---- collect ---------------------------------------------------------------------------------------------------------------
def many_runs(folder: Path, count: int, *, every: int = 0) -> Path:
    """Finished runs of a few arms and many seeds; some diverged, so that columns have holes."""
    for number in range(count):
        run = config(width=8 * (1 + number % 3), seed=number // 3, lr=0.01 * (1 + number % 2), tokens=64 * 40)
        place = write_run(
            folder, run, 1 + number / count, status="diverged" if every and number % every == 1 else "finished"
        )
        assert place.is_dir()
    return folder


def test_each_file_of_a_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_runs(tmp_path, 12)
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    table = collect(tmp_path)
    assert sorted(read) == ["config.toml"] * 12 + ["summary.json"] * 12
    assert table.attrs["source"][0]["sha256"] == collecting.digest(tmp_path), "what is hashed is what was read"


def test_memory_of_collect_is_that_of_its_columns(tmp_path: Path) -> None:
    """A dict per row took 4 KB a run, and 3 KB a checkpoint."""
    small, large = many_runs(tmp_path / "small", 60), many_runs(tmp_path / "large", 360)
    collect(small)
    per_run = (peak(lambda: collect(large)) - peak(lambda: collect(small))) / 300
    assert per_run < 2_800
    per_row = (peak(lambda: collect(large, checkpoints=True)) - peak(lambda: collect(small, checkpoints=True))) / 600
    assert per_row < 1_700


def test_longer_logs_cost_collect_nothing(tmp_path: Path) -> None:
    many_runs(tmp_path, 40)
    collect(tmp_path)
    short = peak(lambda: collect(tmp_path))
    for log in tmp_path.glob("*/log.jsonl"):
        log.write_text(log.read_text() * 400)
    assert peak(lambda: collect(tmp_path)) < 1.1 * short


@pytest.mark.parametrize("checkpoints", [False, True])
def test_columns_make_the_table_that_rows_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: bool
) -> None:
    many_runs(tmp_path, 30, every=4)
    lines: list[dict[str, Any]] = []
    real = collecting._rows

    def rows(*given: Any, **options: Any) -> list[dict[str, Any]]:
        made = real(*given, **options)
        lines.extend(made)
        return made

    monkeypatch.setattr(collecting, "_rows", rows)
    table = collect(tmp_path, checkpoints=checkpoints)
    whole = pd.DataFrame(lines)
    assert len(table) == len(whole) == (60 if checkpoints else 30)
    shared = [c for c in table if c in whole]  # the declared count has a column of its own besides
    pd.testing.assert_frame_equal(pd.DataFrame(table)[shared], whole[shared], check_exact=True)
    assert all((whole[c].isna() | (whole[c] == "")).all() for c in whole if c not in shared)


# ---- fits ------------------------------------------------------------------------------------------------------------------
def checkpoints(runs: int, each: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    run = np.repeat(np.arange(runs), each)
    params = np.exp(rng.uniform(np.log(5e7), np.log(5e9), runs))[run]
    tokens = np.exp(rng.uniform(np.log(1e9), np.log(1e11), runs))[run] * np.tile(np.arange(1, each + 1) / each, runs)
    loss = (1.8 + 478 * params**-0.347 + 2143 * tokens**-0.367) * np.exp(0.003 * rng.standard_normal(len(run)))
    return pd.DataFrame({"run_id": [f"r{i}" for i in run], "params": params, "tokens": tokens, "loss": loss})


@pytest.fixture(scope="module")
def fitted() -> Fit:
    return fit("chinchilla", checkpoints(40, 12))


RESAMPLED: dict[str, Callable[[Fit, Any], uncertainty.Resampling]] = {
    "jackknife": lambda f, rng: uncertainty.jackknife(f),
    **{
        kind: lambda f, rng, kind=kind: uncertainty.bootstrap(f, draws=900, kind=kind, rng=rng)  # type: ignore[misc]
        for kind in ("pairs", "wild", "parametric", "residual")
    },
    "rows": lambda f, rng: uncertainty.bootstrap(f, draws=900, unit="row", rng=rng),
}


@pytest.mark.parametrize("kind", RESAMPLED)
def test_refits_in_parts_are_the_same_to_the_last_bit(fitted: Fit, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = np.random.default_rng(3), np.random.default_rng(3)
    whole = RESAMPLED[kind](fitted, one)
    if kind == "jackknife":
        monkeypatch.setattr(uncertainty, "BATCH_DOUBLES", 10 * len(fitted.runs))
    monkeypatch.setattr(uncertainty, "_HELD_DOUBLES", 10)  # as many replicates at a time as the solver takes
    sizes: list[int] = []
    real = Fit.refit

    def refit(self: Fit, **given: Any) -> Any:
        sizes.append(max(v.size for v in given.values()))
        return real(self, **given)

    monkeypatch.setattr(Fit, "refit", refit)
    parts = RESAMPLED[kind](fitted, other)
    assert len(sizes) > 1
    assert max(sizes) <= 200_000, "no more weights or losses are held than one part needs"
    assert (
        whole.params.equals(parts.params) if kind != "jackknife" else np.allclose(whole.params, parts.params, rtol=1e-9)
    )
    assert (whole.converged == parts.converged).all()
    assert one.bit_generator.state == other.bit_generator.state, "a generator that is shared goes on as before"


def test_a_jackknife_of_many_runs_holds_a_part_of_its_weights(fitted: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    many = fit("chinchilla", checkpoints(500, 4))
    uncertainty.jackknife(many)
    whole = peak(lambda: uncertainty.jackknife(many))
    monkeypatch.setattr(uncertainty, "_HELD_DOUBLES", 200_000)
    assert peak(lambda: uncertainty.jackknife(many)) < 0.75 * whole


def test_curvature_of_a_long_table_is_taken_slice_by_slice() -> None:
    table = checkpoints(50, 4_000)
    law = LAWS["chinchilla"]
    encoding = encode(law, table)
    theta = encoding.internal({"E": 1.8, "A": 478.0, "alpha": 0.347, "B": 2143.0, "beta": 0.367})
    e = np.log(table["loss"].to_numpy()) - encoding.problem.log_loss(theta)[0]
    free = np.arange(len(theta))
    given = theta, free, np.ones(len(e)), e
    assert len(encoding.problem.parts) > 1
    whole = encode(law, table)
    whole.problem._cache["parts"] = ((slice(None), whole.problem),)
    made: list[diagnostics.Check] = []
    sliced, at_once = (peak(lambda at=at: made.append(diagnostics._curvature(at, *given))) for at in (encoding, whole))
    assert made[0].value == pytest.approx(made[1].value, rel=1e-9)
    assert sliced < 0.5 * at_once


def test_the_upper_end_is_that_of_looking_at_every_level() -> None:
    def looked(values: np.ndarray) -> np.ndarray:
        levels = np.unique(values)
        held = values >= levels[-1]
        for level in levels[::-1]:
            if (values >= level).mean() > 0.2:
                break
            held = values >= level
        return held

    rng = np.random.default_rng(0)
    for count in (2, 3, 5, 9, 10, 11, 100):
        for distinct in (2, 3, 7, 10**6):
            values = rng.integers(0, distinct, count).astype(float)
            found, _ = comparison._upper_end(values, tiers=False)
            if found is not None:
                assert (found == looked(values)).all()
    assert (
        comparison._upper_end(np.arange(200_000.0), tiers=False)[0].sum() == 40_000
    )  # minutes, were every level looked at


# ---- the benchmark ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def scale() -> ModuleType:
    sys.path.insert(0, str(BENCHMARK.parent))
    try:
        spec = importlib.util.spec_from_file_location("scale_benchmark", BENCHMARK)
        module = importlib.util.module_from_spec(spec)
        sys.modules["scale_benchmark"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARK.parent))
    return module


def test_the_exponent_of_a_power_law_is_found(scale: ModuleType) -> None:
    sizes = np.array([1_000, 3_000, 10_000, 30_000])
    table = pd.DataFrame({"task": "t", "size": sizes, "cpu_s": 1e-6 * sizes**1.5, "peak_mib": 100 + sizes / 1024})
    found = scale.growth(table).iloc[0]
    assert found["exponent"] == pytest.approx(1.5)
    assert found["se"] == pytest.approx(0, abs=1e-9)
    assert found["tenfold_cpu_s"] == pytest.approx(table["cpu_s"].iloc[-1] * 10**1.5)
    assert found["kib_per_item"] == pytest.approx(1.0)
    rng = np.random.default_rng(0)
    x, y = np.log(sizes), rng.standard_normal(4)
    X = np.stack([np.ones(4), x], 1)
    theta, rss, *_ = np.linalg.lstsq(X, y, rcond=None)
    se = math.sqrt(rss[0] / 2 * np.linalg.inv(X.T @ X)[1, 1])
    assert scale.slope(x, y) == pytest.approx((theta[1], se))


def test_the_fake_folders_are_runs_that_collect_takes(scale: ModuleType, tmp_path: Path) -> None:
    table = collect(scale.run_folders(7, tmp_path / "runs"))
    assert len(table) == 7
    assert not table.attrs["notes"]
    assert len(collect(tmp_path / "runs", checkpoints=True)) == 70
    assert scale.sizes((1, 3, 10), 3) == [1, 3]
    assert scale.sizes((1, 3, 10), 30) == [1, 3, 10, 30]


def test_the_table_of_the_benchmark_is_as_its_page_says() -> None:
    """docs/scale.md prints sizes and exponents of benchmarks/scale.csv."""
    page = (Path(__file__).parents[1] / "docs" / "scale.md").read_text()
    table = pd.read_csv(BENCHMARK.with_suffix(".csv"))
    for task, own in table.groupby("task"):
        last = own.iloc[-1]
        assert f"| {task} | {last['size']:,} | {last['cpu_s']:.1f} |" in page, task


# ---- versions --------------------------------------------------------------------------------------------------------------
def test_constraints_name_what_pyproject_promises() -> None:
    """Each bound is the version of constraints-lowest.txt, and constraints.txt has every dependency of its own, no lower."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    bounds = dict(
        re.fullmatch(r"([\w-]+)(?:\[\w+\])?(?:>=([\d.]+))?", d).groups() for d in asked if "scalinglab[" not in d
    )
    lowest, newest = (pinned(root / f"constraints{which}.txt") for which in ("-lowest", ""))
    assert set(newest) == set(bounds)
    for name, low in bounds.items():
        assert low is None or version(newest[name]) >= version(low), name
        if name in lowest:
            assert version(lowest[name])[: low.count(".") + 1] == version(low), name
    core = [re.split(">=", d)[0] for d in project["dependencies"]]
    assert set(core) <= set(lowest)


def pinned(path: Path) -> dict[str, str]:
    """Names and versions of a constraints file."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def base() -> Any:
    from scalinglab.config import Base

    return Base(**BASE)


def peak(work: Callable[[], Any]) -> int:
    """Peak of traced memory over what there was before, bytes."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def calls(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> Callable[[], int]:
    """How often a function of a module has been called so far."""
    made = [0]
    real = getattr(module, name)

    def counted(*given: Any, **options: Any) -> Any:
        made[0] += 1
        return real(*given, **options)

    monkeypatch.setattr(module, name, counted)
    return lambda: made[0]
