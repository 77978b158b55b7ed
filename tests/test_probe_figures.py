"""Probe reports as data, and their figures; nothing here needs torch. Figures are tested on their artists."""

import json
import re
from dataclasses import replace

import matplotlib
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.probe_report import Measure, ProbeReport
from scalinglab.report import style
from scalinglab.report.figures.depth import PANELS, depth_profile, layer_removal
from scalinglab.report.registry import FIGURES, save_figure


def measure(name, value, by="block", *, at=None, other=None, probe="removal", spread=0.2):
    value = np.asarray(value, dtype=float)
    return Measure(
        probe, name, by, f"{name} in words", value, value - spread * abs(value), value + spread * abs(value),
        np.arange(len(value)) if at is None else at, np.zeros(len(value), int) if other is None else other, "95 % bootstrap",
    )  # fmt: skip


def report(label="pre_ln", depth=6, *, scale=1.0, leave_out=()):
    first, second = np.triu_indices(depth + 1, 1)
    measures = [
        measure("rms", scale * np.linspace(0.02, 2, depth + 1), "state"),
        measure("block_influence", scale * np.geomspace(0.5, 0.01, depth)),
        measure("angular_distance", 0.05 * (second - first), "pair", at=first, other=second),
        measure("block_contribution", scale * np.geomspace(3, 0.2, depth)),
        measure("lens_kl", np.append(np.geomspace(2, 0.01, depth), 0.0), "state"),
        measure("removal_loss", scale * np.append(3.0, np.append(-0.001, np.linspace(0.01, 0.05, depth - 2)))),
        measure("pruning_loss", scale * np.linspace(0.01, 0.4, depth - 1), "size", at=np.arange(1, depth)),
        measure("effective_depth", [3.2], "scalar"),
        Measure("gradients", "gradient_ratio", "scalar", "no interval", np.array([3.3]), np.array([np.nan]),
                np.array([np.nan]), np.array([0]), np.array([0])),
    ]  # fmt: skip
    kept = tuple(m for m in measures if m.name not in leave_out)
    settings = {"sequences": 64, "level": 0.95, "context": 128, "passes": 30}
    return ProbeReport(label, depth, 2.5, kept, {"paths": "a norm stands on the stream"}, settings)


def words(made):
    return " ".join(t.get_text() for t in made.findobj(matplotlib.text.Text))


def axes(made):
    return [ax for ax in made.axes if ax.get_visible()]


# ---- the report --------------------------------------------------------------------------------------------------------
def test_frames_are_tidy():
    made = report(depth=4)
    frame = made.to_frame()
    assert list(frame.columns) == ["probe", "measure", "by", "at", "other", "value", "low", "high"]
    assert len(frame) == sum(len(m.value) for m in made.measures)
    assert set(made.pairs["measure"]) == {"angular_distance"}
    assert made.scalars.loc["effective_depth", "low"] == pytest.approx(3.2 * 0.8)
    assert made.scalar("gradient_ratio") == 3.3
    assert set(made.blocks["by"]) == {"state", "block", "size"}
    assert made.blocks["at"].notna().all()
    assert frame["other"].isna().sum() == len(frame) - 10
    assert list(made.measure("pruning_loss").to_frame().columns) == ["size", "value", "low", "high"]
    assert list(made.measure("angular_distance").to_frame().columns) == ["at", "other", "value", "low", "high"]
    assert list(made.measure("effective_depth").to_frame().columns) == ["value", "low", "high"]
    assert "rms" in made
    assert "rmse" not in made


def test_a_report_is_read_back_to_the_bit(tmp_path):
    made = report()
    path = made.save(tmp_path)
    assert path == tmp_path / "probes.json"
    assert [p.name for p in tmp_path.iterdir()] == ["probes.json"]
    again = ProbeReport.load(tmp_path)
    pd.testing.assert_frame_equal(again.to_frame(), made.to_frame(), check_exact=True)
    assert (again.label, again.depth, again.loss) == (made.label, made.depth, made.loss)
    assert (again.skipped, again.settings) == (made.skipped, made.settings)
    assert [m.definition for m in again.measures] == [m.definition for m in made.measures]
    assert made.save(tmp_path / "other.json").read_bytes() == path.read_bytes()


@settings(max_examples=30)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=False), min_size=1, max_size=5))
def test_any_numbers_survive_the_file(tmp_path_factory, values):
    made = ProbeReport("x", 1, 0.0, (measure("m", values, "state", spread=0.0),))
    path = made.save(tmp_path_factory.mktemp("probes"))
    np.testing.assert_array_equal(ProbeReport.load(path).measure("m").value, made.measure("m").value)


def test_the_file_is_json_with_definitions_and_nulls(tmp_path):
    raw = json.loads(report().save(tmp_path).read_text())
    assert raw["schema"] == "scalinglab/probes-1"
    by_name = {m["name"]: m for m in raw["measures"]}
    assert by_name["rms"]["definition"] == "rms in words"
    assert "low" not in by_name["gradient_ratio"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no probe report"),
        ("[]", "schema is 'list'"),
        ('{"schema": "scalinglab/fit-1"}', "schema is 'scalinglab/fit-1'"),
        ('{"schema": "scalinglab/probes-1", "label": ""}', "damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, message):
    (tmp_path / "probes.json").write_text(text)
    with pytest.raises(SchemaError, match=message):
        ProbeReport.load(tmp_path)
    with pytest.raises(SchemaError, match="can't be read"):
        ProbeReport.load(tmp_path / "elsewhere")


def test_the_summary_names_what_is_there_and_what_is_not():
    text = report().summary()
    assert max(map(len, text.splitlines())) <= 96
    for part in (
        "Depth probes: pre_ln",
        "loss: 2.5",
        "effective_depth",
        "[2.56, 3.84]",
        "removal_loss",
        "skipped  paths",
    ):
        assert part in text


def test_wrong_measures_and_names():
    with pytest.raises(ConfigError, match="by 'layer'"):
        measure("m", [1.0], "layer")
    with pytest.raises(ConfigError, match="at has shape"):
        measure("m", [1.0, 2.0], at=np.array([0]))
    with pytest.raises(ConfigError, match="'m' stands twice"):
        ProbeReport("x", 1, 0.0, (measure("m", [1.0]), measure("m", [1.0])))
    with pytest.raises(ConfigError, match="no measure 'path_weight'.*paths was skipped: a norm"):
        report().measure("path_weight")
    with pytest.raises(ConfigError, match="not one number"):
        report().scalar("rms")
    with pytest.raises(ValueError, match="read-only"):
        report().measure("rms").value[0] = 1.0


# ---- depth_profile -----------------------------------------------------------------------------------------------------
def test_depth_profile_draws_each_measure_of_each_model():
    given_ = [report(), report("attn_res", scale=2.0)]
    made = depth_profile(given_)
    shown = axes(made)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in shown] == [
        PANELS[p].label for p in ("rms", "influence", "angle", "contribution", "lens", "removal")
    ]
    lines = [line for line in shown[0].lines if line.get_linestyle() != "None"]
    assert len(lines) == 2
    np.testing.assert_allclose(lines[1].get_ydata(), given_[1].measure("rms").value)
    np.testing.assert_allclose(lines[0].get_xdata(), range(7))  # states stand at the ends of blocks
    np.testing.assert_allclose(shown[1].lines[0].get_xdata(), np.arange(6) + 0.5)  # blocks between them
    np.testing.assert_allclose(shown[2].lines[0].get_ydata(), 0.05)  # neighbours only
    assert len(shown[1].collections) == 2  # a band each
    assert {t.get_text() for t in made.legends[0].get_texts()} == {"pre_ln", "attn_res"}
    assert "bootstrap over 64 sequences" in words(made).replace("\n", " ")


def test_depths_that_differ_share_a_relative_axis():
    made = depth_profile([report(depth=4), report("deep", depth=12)])
    for ax in axes(made):
        assert all(np.nanmax(line.get_xdata()) <= 1 for line in ax.lines if len(line.get_xdata()))
    assert "Depth / number of blocks" in words(made)


def test_values_below_a_logarithmic_axis_are_hollow_and_said():
    made = depth_profile(report(), panels=["removal"])
    (ax,) = axes(made)
    assert ax.get_yscale() == "log"
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [list(line.get_xdata()) for line in hollow] == [[1.5]]  # the negative one
    assert "hollow" in words(made)
    assert np.isfinite(ax.get_ylim()).all()


def test_a_measure_that_a_model_lacks_is_said():
    made = depth_profile([report(), report("keel", leave_out=("lens_kl",))])
    assert "not defined for keel" in words(made).replace("\n", " ")
    made = depth_profile(report(leave_out=("lens_kl",)))
    assert len(axes(made)) == 5
    assert "Not measured: KL" in words(made).replace("\n", " ")


@pytest.mark.parametrize("width", ["column", "page"])
def test_no_two_tick_labels_overlap(width):
    for made in (
        depth_profile([report(), report("b")], width=width),
        layer_removal([report(), report("b")], width=width),
    ):
        for ax in axes(made):
            for labels in (ax.get_xticklabels(), ax.get_yticklabels()):
                boxes = [t.get_window_extent() for t in labels if t.get_text() and t.get_visible()]
                assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[k + 1 :])
        assert made.get_figwidth() == style.inches(width)


def diverged(label="diverged", value=np.nan, keep=0):
    """A report whose measures are not finite from entry `keep` on."""
    sound = report(label)

    def spoil(values):
        return np.where(np.arange(len(values)) < keep, values, value)

    spoilt = (replace(m, value=spoil(m.value), low=spoil(m.low), high=spoil(m.high)) for m in sound.measures)
    return replace(sound, loss=value, measures=tuple(spoilt))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("draw", [depth_profile, layer_removal])
def test_a_diverged_model_is_said_to_be_not_finite(tmp_path, draw, value):
    """Warnings are errors here; where nothing can be drawn the panel says why."""
    made = draw(diverged(value=value))
    for ax in axes(made):
        assert [t.get_text() for t in ax.texts] == ["not finite"]
        assert not ax.lines
    save_figure(made, tmp_path / "one.png")
    for other in (diverged(value=value), diverged(value=value, keep=2)):
        both = draw([report(), other])
        save_figure(both, tmp_path / "two.png")
        assert "for diverged" in words(both).replace("\n", " ")
        for ax in axes(both):
            assert not [t for t in ax.texts if t.get_text() == "not finite"]
            assert np.isfinite(ax.get_ylim()).all()


@pytest.mark.parametrize("width", ["column", "page"])
@pytest.mark.parametrize("draw", [depth_profile, layer_removal])
def test_a_long_caption_stays_below_the_axes(draw, width):
    given_ = [report(), *(diverged(f"pre_ln-L6-d8-sp-lr3000-s{k}-0123456789", keep=2) for k in range(3))]
    made = draw(given_, width=width)
    made.draw_without_rendering()
    caption = made._supxlabel.get_window_extent()
    for ax in axes(made):
        assert caption.y1 <= ax.get_tightbbox().y0 + 1
        assert ax.bbox.height > 0.6 * made.dpi, "inches"


def test_the_caption_says_what_a_state_is_and_which_blocks_are_pruned():
    assert "attention residuals have none" in words(depth_profile(report())).replace("\n", " ")
    assert "attention residuals" not in words(depth_profile(report(), panels=["influence"]))
    start = measure("pruning_start", [4.0, 3.0, 2.0, 1.0, 1.0], "size", at=np.arange(1, 6))
    named = replace(report(), measures=(*report().measures, start))
    made = layer_removal(named)
    assert [t.get_text() for t in axes(made)[1].texts] == ["4", "3\u20134", "2\u20134", "1\u20134", "1\u20135"]
    assert "the angle is smallest" in words(made).replace("\n", " ")
    assert not axes(layer_removal([named, report("b")]))[1].texts


# ---- layer_removal -----------------------------------------------------------------------------------------------------
def test_layer_removal_draws_points_with_intervals_and_the_pruning_curve():
    made = layer_removal(report())
    removal, pruning = axes(made)
    assert removal.get_yscale() == "log"
    points = {
        float(x): float(y) for line in removal.lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    }
    assert points[0.0] == 3.0
    assert points[5.0] == pytest.approx(0.05)
    segments = removal.collections[0].get_segments()
    assert segments[0][:, 1] == pytest.approx([2.4, 3.6])
    np.testing.assert_allclose(pruning.lines[0].get_ydata(), np.linspace(0.01, 0.4, 5))
    np.testing.assert_allclose(pruning.lines[0].get_xdata(), range(1, 6))
    assert removal.get_ylabel() == "Loss increase (nats/token)"
    assert re.search("don't cover the variation between seeds", words(made).replace("\n", " "))


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        (["pre_ln-L4-d16-sp-lr0.003-s0-1b28ea1765", "hc-L8-d16-sp-lr1e-05-s0-1b28ea1765"], ["pre_ln, L = 4", "hc, L = 8"]),
        (["mix-ln-L4-d16-sp+1-lr0.003-s0-1b28ea1765", "mix-ln-L4-d16-sp+1-lr0.003-s12-2b28ea1765"],
         ["mix-ln, L = 4, seed 0", "mix-ln, L = 4, seed 12"]),
        (["pre_ln-L4-d16-sp-lr0.003-s0-1b28ea1765", "pre_ln-L4-d32-sp-lr0.003-s0-1b28ea1765", "pre_ln-L4-d32-sp-lr0.003-s1-1b28ea1765"],
         ["pre_ln, L = 4, d = 16", "pre_ln, L = 4, d = 32, seed 0", "pre_ln, L = 4, d = 32, seed 1"]),
        (["pre_ln-L4-d16-sp-lr0.003-s0-1b28ea1765", "pre_ln-L4-d16-sp-lr0.003-s0-2b28ea1765"],
         ["pre_ln-L4-d16-sp-lr0.003-s0-1b28ea1765", "pre_ln-L4-d16-sp-lr0.003-s0-2b28ea1765"]),
        (["a run", "pre_ln-L4"], ["a run", "pre_ln-L4"]),
    ],
)  # fmt: skip
def test_runs_are_named_by_what_tells_them_apart(ids, names):
    made = layer_removal([report(name) for name in ids])
    assert [t.get_text() for t in made.legends[0].get_texts()] == names


def test_one_of_the_two_is_enough():
    assert len(axes(layer_removal(report(leave_out=("pruning_loss",))))) == 1


def test_figures_are_registered_and_reproducible(tmp_path):
    assert {"depth_profile", "layer_removal"} <= set(FIGURES)
    files = [save_figure(layer_removal([report(), report("b")]), tmp_path / f"{k}.pdf").read_bytes() for k in range(2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("draw", [depth_profile, layer_removal])
def test_figures_refuse_what_they_cannot_draw(draw):
    with pytest.raises(ConfigError, match="draws probe reports"):
        draw("a fit")
    with pytest.raises(ConfigError, match="draws probe reports"):
        draw([])
    with pytest.raises(ConfigError, match="1 labels for 2 reports"):
        draw([report(), report("b")], labels=["a"])
    nothing = ProbeReport("x", 2, 1.0, (measure("effective_depth", [1.0], "scalar"),))
    with pytest.raises(ConfigError, match="no report has a"):
        draw(nothing)


def test_unknown_panel():
    with pytest.raises(ConfigError, match="panel 'rmse' is unknown"):
        depth_profile(report(), panels=["rmse"])
