"""The embedded numbers against independent statements of them."""

import hashlib
import json

import numpy as np
import pytest

from scalinglab.errors import ConfigError
from scalinglab.published import DEPTHBENCH_READING_ERROR, depthbench, published_fits, published_params
from scalinglab.readers import read_runs
from scalinglab.tables import table_meta, table_names, table_path


def test_depthbench_is_the_published_grid():
    table = depthbench()
    assert table.shape[0] == 69
    assert table.groupby("match_group").size().to_dict() == {"300M": 15, "400M": 54}
    assert table.architecture.nunique() == 10
    assert table.run_id.is_unique
    at = table.set_index(["match_group", "architecture", "depth"]).loss
    # the headline of the paper: Pre-LN gets worse with depth, HC and full AttnRes better
    assert at["400M", "pre_ln", 16] == 2.759
    assert at["400M", "hc", 70] == 2.682
    assert at["300M", "pre_ln", 42] == 2.817
    gap = at["400M"].unstack()[16] - at["400M"].unstack()[32]
    assert gap["pre_ln"] == pytest.approx(-0.023)
    assert gap[["hc", "attnres_full"]].min() > 10 * DEPTHBENCH_READING_ERROR


def test_depthbench_flops_follow_its_stated_convention():
    t = depthbench()
    stated = 6 * (t.params_backbone + t.vocab * t.width) + 6 * t.depth * t.width * t.context
    assert (stated == t.flops_per_token).all()


def test_depthbench_meta_belongs_to_the_file():
    meta = table_meta("depthbench")
    assert meta["sha256"] == hashlib.sha256(table_path("depthbench").read_bytes()).hexdigest()
    assert meta["reading_error"] == DEPTHBENCH_READING_ERROR
    assert meta["seeds"] == 1
    assert "final norm" in meta["n_convention"]


def test_depthbench_through_the_reader():
    runs = read_runs("embedded:depthbench")
    assert runs.attrs["params"] == "backbone"
    assert (runs.params == depthbench().params_backbone).all()  # given counts stay as given
    assert runs.attrs["source"][0]["sha256"] == table_meta("depthbench")["sha256"]
    assert runs.flops_causal.to_numpy() == pytest.approx(runs.flops_per_token.astype(float) * runs.tokens, rel=1e-12)


def test_fits_are_tidy_and_say_what_is_verified():
    fits = published_fits()
    assert list(fits.columns) == ["key", "law", "parameter", "value", "n", "source", "verified", "note"]
    assert not fits.duplicated(["key", "parameter"]).any()
    assert np.isfinite(fits.value).all()
    unverified = set(fits.key[~fits.verified])
    assert unverified == {"kaplan2020", "kaplan2020_n", "levine2020"}
    assert fits.note[~fits.verified].str.contains("from memory").all()
    assert set(published_fits("chinchilla").law) == {"chinchilla"}


def test_fits_give_the_losses_that_their_papers_state():
    n, d = 70e9, 1.4e12  # Chinchilla itself; the two published fits agree near the frontier
    losses = {}
    for key in ("hoffmann2022", "besiroglu2024", "besiroglu2024_quoted"):
        p = published_params(key)
        losses[key] = p.E + p.A * n**-p.alpha + p.B * d**-p.beta
    assert losses["hoffmann2022"] == pytest.approx(1.93, abs=0.02)
    assert losses["besiroglu2024"] == pytest.approx(losses["besiroglu2024_quoted"], abs=2e-3)
    k = published_params("kaplan2020")
    n, d = 3e8, 8e9
    loss = ((k.A * n**-k.alpha) ** (1 / k.delta) + (k.B * d**-k.delta) ** (1 / k.delta)) ** k.delta
    assert loss == pytest.approx(((6.4e13 / n) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103, rel=1e-12)
    assert loss == pytest.approx(2.6028867739, abs=1e-9)
    b = published_params("besiroglu2024")
    assert b.beta / (b.alpha + b.beta) == pytest.approx(0.5139, abs=1e-4)


def test_unknown_names_list_what_there_is():
    with pytest.raises(ConfigError, match="no published fit 'kaplan'; known: kaplan2020_n"):
        published_params("kaplan")
    with pytest.raises(ConfigError, match="no published fit of the law 'nope'; known: chinchilla"):
        published_fits("nope")
    with pytest.raises(ConfigError, match="no embedded table 'dephbench'; did you mean 'depthbench'"):
        table_path("dephbench")
    assert "depthbench" in table_names()


def test_meta_is_json_with_a_source():
    for name in table_names():
        meta = table_path(name).with_name(f"{name}.meta.json")
        assert json.loads(meta.read_text())["source"]
