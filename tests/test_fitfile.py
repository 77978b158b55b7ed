"""Fit records: a round trip loses nothing, damage is told, nothing is half written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from scalinglab import Fit, SchemaError, fit, read_runs
from scalinglab.errors import ConfigError
from scalinglab.tables import write_atomically


@pytest.fixture(scope="module")
def made() -> Fit:
    runs = read_runs("embedded:simulated_shapes")
    return fit("shape", runs[runs["architecture"] == "pre_ln"])


def test_round_trip_keeps_params_intervals_and_predictions(made: Fit, tmp_path: Path) -> None:
    back = Fit.load(made.save(tmp_path / "deep" / "fit.json"))
    assert back.params.equals(made.params)
    np.testing.assert_array_equal(back.predict(back.runs), made.predict(made.runs))
    np.testing.assert_array_equal(back.conf_int().to_numpy(), made.conf_int().to_numpy())
    assert back.summary() == made.summary()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["fit.json"]  # no temporary file is left


def test_round_trip_of_a_crossed_and_a_bounded_fit(tmp_path: Path) -> None:
    from scalinglab import LAWS

    runs = read_runs("embedded:simulated_shapes")
    crossed = fit(
        LAWS["shape"].with_(bounds={"alpha": (0.1, 1.0)}), runs, by="architecture", share="H2", fixed={"beta": 0.28}
    )
    back = Fit.load(crossed.save(tmp_path / "f.json"))
    assert back.law == crossed.law
    assert back.params.equals(crossed.params)


def test_same_fit_is_the_same_file(made: Fit, tmp_path: Path) -> None:
    assert made.save(tmp_path / "a.json").read_bytes() == made.save(tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d | {"schema": "other/1"}, "schema is 'other/1'"),
        (lambda d: {k: v for k, v in d.items() if k != "theta"}, "damaged"),
        (lambda d: [1, 2], "schema is 'list'"),
    ],
)
def test_damaged_records_are_refused(made: Fit, tmp_path: Path, change: object, told: str) -> None:
    path = made.save(tmp_path / "f.json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))  # type: ignore[operator]
    with pytest.raises(SchemaError, match=told):
        Fit.load(path)


def test_truncated_and_missing_records_are_refused(made: Fit, tmp_path: Path) -> None:
    path = made.save(tmp_path / "f.json")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(SchemaError, match="not a fit record"):
        Fit.load(path)
    with pytest.raises(SchemaError, match="can't be read"):
        Fit.load(tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_a_python_function_is_not_saved(tmp_path: Path) -> None:
    runs = read_runs("embedded:simulated_shapes")

    def law(runs: dict, E: float = 1.7, A: float = 400.0, alpha: float = 0.34) -> object:
        return E + A * runs["params"] ** -alpha

    with pytest.raises(ConfigError, match="Python function"):
        fit(law, runs).save(tmp_path / "f.json")
    assert not list(tmp_path.iterdir())
