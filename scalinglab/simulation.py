"""Run tables drawn from a known law and a known noise model: the ground truth of tests, power and coverage studies.

    log loss = log f(params; run) + shape effect + run effect + e,    e ~ AR(1) over the checkpoints of a run

with SDs `cell_sd` (lack of fit of a shape, which more seeds don't average out), `tau` and `sigma`. A design is a run table
without losses; the builders below make full ones, with every parameter and FLOP count. What `simulate` returns says in
`attrs` that it is simulated, and from which truth.

`python -m scalinglab.simulation OUT` writes the embedded study `simulated_shapes` to the folder OUT.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.features import R0
from scalinglab.laws import Law, law_from
from scalinglab.runs import complete, declare_params
from scalinglab.schema import ordered
from scalinglab.tables import write_atomically

Array = NDArray[np.float64]

SOURCE = "simulated"
_BATCH = 2**20  # tokens per step of a design that doesn't say

# depth, width, query heads, key/value heads (head_dim 128, ffn_dim 4 width, GEGLU, vocabulary 50,304, context 2,048, untied):
# the 22 shapes of McLeish et al. 2025 (Gemstones), arXiv:2502.06857; their published totals follow from these exactly.
GEMSTONES_SHAPES = (
    (23, 256, 2, 1), (27, 256, 2, 1), (71, 256, 2, 1), (80, 256, 2, 1), (13, 384, 3, 1), (36, 384, 3, 1),
    (11, 512, 4, 2), (12, 512, 4, 2), (13, 512, 4, 2), (14, 512, 4, 2), (16, 512, 4, 2), (3, 768, 6, 3),
    (45, 768, 6, 3), (28, 1024, 8, 4), (15, 1280, 10, 5), (36, 1280, 10, 5), (50, 1536, 12, 6), (7, 1792, 14, 7),
    (18, 1792, 14, 7), (27, 2048, 16, 8), (8, 2560, 20, 10), (12, 3072, 24, 12),
)  # fmt: skip


def simulate(
    law: str | Law,
    params: Mapping[str, float],
    design: pd.DataFrame,
    *,
    sigma: float,
    tau: float = 0.0,
    rho: float = 0.0,
    seeds: int = 1,
    cell_sd: float = 0.0,
    rng: int | np.random.Generator = 0,
) -> pd.DataFrame:
    """Run table with losses drawn from a law.

    Parameters
    ----------
    law, params : the truth; for a crossed law (`Law.crossed`) names are like `gamma1[pre_ln]`.
    design : run table without losses; rows with one run_id are the checkpoints of a run, in order of tokens.
    sigma : SD of the row noise on log loss (the marginal SD if rho is not 0).
    tau : SD of an effect common to all checkpoints of a run. rho : lag-1 correlation of the row noise along a run, abs(rho) < 1.
    seeds : independent repeats of every run of the design; run_id gains "/s0", "/s1", ...
    cell_sd : SD of an effect common to all runs of one shape (architecture, depth, width), whatever the seed and budget.
    rng : seed or generator. Draws are made in a fixed order, so a table is reproduced by its seed.

    Raises
    ------
    ConfigError
        A negative SD, abs(rho) >= 1, fewer than one seed, a parameter of the law without a value, or one that it hasn't.
    SchemaError
        The design lacks run_id or a column that the law reads.
    """
    truth = law_from(law, design.columns)
    _check(truth, params, design, sigma, tau, rho, seeds, cell_sd)
    generator = np.random.default_rng(rng)
    origin, design = design, design.copy()
    design.attrs = {}  # pandas would copy them at every step
    parts = [design.assign(seed=s, run_id=design["run_id"].astype(str) + f"/s{s}") for s in range(seeds)]
    table = pd.concat(parts, ignore_index=True) if seeds > 1 else design.reset_index(drop=True).copy()
    if seeds == 1 and "seed" not in table:
        table["seed"] = 0
    mean = np.log(truth.loss(params, table))
    shapes = [c for c in ("architecture", "depth", "width") if c in table] or ["run_id"]
    cell = table.groupby(shapes, dropna=False, sort=False).ngroup().to_numpy()
    run = np.asarray(pd.factorize(table["run_id"])[0], dtype=np.intp)
    # every effect is drawn whatever its SD, so that two noise models at one seed differ in scale only
    log_loss = mean + cell_sd * generator.standard_normal(cell.max() + 1)[cell]
    log_loss += tau * generator.standard_normal(run.max() + 1)[run]
    log_loss += sigma * _autoregressive(table, run, rho, generator)
    table["loss"] = np.exp(log_loss)
    table["status"] = "finished"
    table = table[ordered(table.columns)]
    noise = {"sigma": sigma, "tau": tau, "rho": rho, "cell_sd": cell_sd, "scale": "log loss"}
    table.attrs = {
        **origin.attrs,
        "simulated": {
            "law": truth.key,
            "formula": truth.formula,
            "constants": dict(truth.constants),
            "params": {str(k): float(v) for k, v in params.items()},
            "noise": noise,
            "seeds": seeds,
            "rng": rng if isinstance(rng, int) else "generator",
        },
        "source": [{"path": SOURCE, "sha256": ""}],
        "notes": [*origin.attrs.get("notes", []), f"simulated from law {truth.key!r}: no run was trained"],
    }
    return table


def grid_design(
    sizes: Sequence[float],
    tokens: Sequence[float],
    *,
    aspects: Sequence[float] = (R0,),
    per_param: bool = False,
    architectures: Sequence[str] = ("pre_ln",),
    vocab: int = 50_304,
    context: int = 2_048,
) -> pd.DataFrame:
    """Every size x aspect ratio x token budget x architecture, one run each, with realisable shapes.

    sizes : backbone parameters; each is met within about 1 % by a whole depth and a width and ffn_dim in steps of 16.
    tokens : training tokens, or tokens per backbone parameter of the size when `per_param`.

    Raises
    ------
    ConfigError
        No or non-positive sizes, tokens or aspects; a size too small for its aspect ratio.
    """
    for what, values in (("sizes", sizes), ("tokens", tokens), ("aspects", aspects)):
        if not len(values) or not all(np.isfinite(v) and v > 0 for v in values):
            raise ConfigError(f"{what}={list(values)} must hold positive numbers")
    rows = []
    for architecture in architectures:
        for size in sizes:
            for aspect in aspects:
                depth, width, ffn_dim = _shape_of(size, aspect)
                for budget in tokens:
                    count = budget * size if per_param else budget
                    rows.append(
                        {
                            "run_id": f"{architecture}/{_short(size)}/{depth}x{width}/{_short(count)}",
                            "sweep": SOURCE,
                            "match_group": f"{_short(size)}/{_short(count)}",
                            "architecture": architecture,
                            "depth": depth,
                            "width": width,
                            "ffn_dim": ffn_dim,
                            "tokens": float(count),
                        }
                    )
    return _completed(pd.DataFrame(rows), vocab, context)


def gemstones_design(
    *, checkpoints: int = 10, tokens: tuple[float, float] = (1e10, 1e11), shapes: int | Sequence[int] = 22
) -> pd.DataFrame:
    """The 22 Gemstones shapes with equally spaced checkpoints: the design of our coverage studies.

    checkpoints : rows per run, from tokens[0] to tokens[1].
    shapes : how many of the shapes (spread over the list), or their numbers.

    Raises
    ------
    ConfigError
        No checkpoint, or a number of shapes outside 1..22.
    """
    if checkpoints < 1:
        raise ConfigError(f"checkpoints={checkpoints}: at least one is needed")
    chosen = np.linspace(0, 21, shapes).round().astype(int) if isinstance(shapes, int) else np.asarray(shapes)
    if not len(chosen) or chosen.min() < 0 or chosen.max() > 21:
        raise ConfigError(f"shapes={shapes!r}: choose from the 22 shapes (numbers 0 to 21)")
    budget = np.linspace(*tokens, checkpoints) if checkpoints > 1 else np.array([tokens[1]])
    rows = [
        {
            "run_id": f"{depth}x{width}", "sweep": SOURCE, "architecture": "pre_ln", "depth": depth, "width": width,
            "heads": heads, "kv_heads": kv, "head_dim": 128, "ffn_dim": 4 * width, "tokens": float(t),
        }
        for depth, width, heads, kv in (GEMSTONES_SHAPES[i] for i in chosen)
        for t in budget
    ]  # fmt: skip
    return _completed(pd.DataFrame(rows), 50_304, 2_048, batch=2**22)


def ladder_design(
    totals: Sequence[float] = (1.3e8, 2e8, 3e8, 4e8),
    *,
    depths: Sequence[int] = (16, 24, 32, 42, 70),
    tokens_per_param: float = 20.0,
    architectures: Sequence[str] = ("pre_ln",),
    vocab: int = 50_280,
    context: int = 2_048,
) -> pd.DataFrame:
    """A depth ladder at fixed total parameters and fixed tokens per total parameter, as published depth benchmarks have it.

    The backbone, and so tokens per backbone parameter, varies with depth: the design to show what it can't identify.

    Raises
    ------
    ConfigError
        A total that no width of at least 16 reaches at a depth.
    """
    rows = []
    for architecture in architectures:
        for total in totals:
            for depth in depths:
                # 12 L d^2 + 2 V d = total
                exact = (np.sqrt(vocab**2 + 12.0 * depth * total) - vocab) / (12.0 * depth)
                width = round(float(exact) / 16) * 16
                if width < 16:
                    raise ConfigError(f"a total of {total:g} parameters leaves no width at depth {depth}")
                rows.append(
                    {
                        "run_id": f"{architecture}/{_short(total)}/{depth}x{width}",
                        "sweep": SOURCE,
                        "match_group": _short(total),
                        "architecture": architecture,
                        "depth": depth,
                        "width": width,
                        "ffn_dim": round(8 * width / 3 / 16) * 16,
                        "tokens": tokens_per_param * total,
                    }
                )
    return _completed(pd.DataFrame(rows), vocab, context)


def shape_study(rng: int = 2026) -> pd.DataFrame:
    """The embedded study: 2 architectures x 4 sizes x 5 aspect ratios x 3 token budgets x 2 seeds under law `shape`.

    Size and data terms are of Chinchilla size; the second architecture has a 3 % smaller capacity term and likes deeper
    shapes. Seeds differ by .15 % of the loss and shapes deviate from the law by .1 %, as published replicates do.
    """
    design = grid_design(
        (5e7, 1e8, 2e8, 4e8),
        (10, 20, 80),
        aspects=(8, 16, 32, 64, 128),
        per_param=True,
        architectures=("pre_ln", "hyper_connections"),
    )
    law = law_from("shape").crossed("architecture", ("pre_ln", "hyper_connections"), "H2")
    return simulate(law, STUDY_TRUTH, design, sigma=0.0015, cell_sd=0.001, seeds=2, rng=rng)


STUDY_TRUTH = {
    "E": 1.69, "A[pre_ln]": 406.4, "A[hyper_connections]": 394.2, "alpha": 0.34,
    "gamma1[pre_ln]": 0.020, "gamma1[hyper_connections]": 0.035,
    "gamma2[pre_ln]": 0.016, "gamma2[hyper_connections]": 0.016, "B": 410.7, "beta": 0.28,
}  # fmt: skip


def write_study(folder: str | Path, *, rng: int = 2026) -> Path:
    """Write `simulated_shapes.csv` and its meta file (truth, noise, seed, sha256, command) to a folder; returns the table.

    Each file is written under a temporary name and renamed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = shape_study(rng)
    text = _csv(table)
    truth = table.attrs["simulated"]
    meta = {
        "name": "simulated_shapes",
        "what": "A simulated study of depth: two architectures over four sizes, five aspect ratios, three token budgets "
        "and two seeds. No run was trained; every row says so in its column sweep.",
        "source": SOURCE,
        "rows": len(table),
        "unit": "nats per token",
        "n_convention": "params = params_backbone of the Pre-LN shape, final norm included; "
        "what an architecture adds is not counted",
        "truth": truth,
        "r_star": {
            a: R0 * float(np.exp(-STUDY_TRUTH[f"gamma1[{a}]"] / (2 * STUDY_TRUTH[f"gamma2[{a}]"])))
            for a in ("pre_ln", "hyper_connections")
        },
        "seed": rng,
        "command": "python -m scalinglab.simulation data/tables",
        "licence": "MIT, as the package",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    path = folder / "simulated_shapes.csv"
    write_atomically(path, text.encode())
    write_atomically(
        folder / "simulated_shapes.meta.json", (json.dumps(meta, indent=1, ensure_ascii=False) + "\n").encode()
    )
    return path


def _check(
    law: Law,
    params: Mapping[str, float],
    design: pd.DataFrame,
    sigma: float,
    tau: float,
    rho: float,
    seeds: int,
    cell_sd: float,
) -> None:
    for name, value in (("sigma", sigma), ("tau", tau), ("cell_sd", cell_sd)):
        if not (np.isfinite(value) and value >= 0):
            raise ConfigError(f"{name}={value!r} is a standard deviation: give a number of at least 0")
    if not abs(rho) < 1:
        raise ConfigError(f"rho={rho!r} is a correlation between checkpoints: give a number between -1 and 1")
    if seeds < 1:
        raise ConfigError(f"seeds={seeds!r}: at least one is needed")
    if "run_id" not in design:
        raise SchemaError("the design has no column 'run_id': rows with one run_id are the checkpoints of a run")
    if not len(design):
        raise SchemaError("the design has no rows")
    missing = [n for n in law.param_names if n not in params]
    strange = [n for n in params if n not in law.param_names]
    if missing or strange:
        what = f"no value for {missing[0]!r}" if missing else f"a value for {strange[0]!r}, which the law hasn't"
        raise ConfigError(f"params has {what}; law {law.key!r} has {', '.join(law.param_names)}")


def _autoregressive(table: pd.DataFrame, run: NDArray[np.intp], rho: float, rng: np.random.Generator) -> Array:
    """Stationary AR(1) noise of unit variance along each run [n], in order of step or tokens."""
    z = rng.standard_normal(len(table))
    along = next((c for c in ("step", "tokens") if c in table and table[c].notna().all()), None)
    place = table[along].to_numpy(np.float64) if along else np.arange(len(table), dtype=np.float64)
    order = np.lexsort((place, run))
    fresh = np.diff(run[order], prepend=-1) != 0
    nth = np.arange(len(order)) - np.maximum.accumulate(np.where(fresh, np.arange(len(order)), 0))
    out = z[order]
    for k in range(1, int(nth.max()) + 1):  # checkpoint k of all runs at once
        at = np.flatnonzero(nth == k)
        out[at] = rho * out[at - 1] + np.sqrt(1 - rho * rho) * out[at]
    back = np.empty(len(order))
    back[order] = out
    return back


def _shape_of(size: float, aspect: float) -> tuple[int, int, int]:
    """Depth, width and ffn_dim with N = L (4 d^2 + 3 d f + 2 d) + d near `size` and width / depth near `aspect`."""
    depth = max(1, round(float(size / (12.0 * aspect**2)) ** (1 / 3)))
    width = 16 * round(float(size / (12.0 * depth)) ** 0.5 / 16)
    if width < 32:
        raise ConfigError(f"{size:g} parameters are too few for an aspect ratio of {aspect:g}")
    exact = (size - depth * (4 * width**2 + 2 * width) - width) / (3 * depth * width)
    return depth, width, max(16, 16 * round(exact / 16))


def _completed(rows: pd.DataFrame, vocab: int, context: int, batch: int = _BATCH) -> pd.DataFrame:
    rows = rows.assign(
        parametrization="sp", vocab=vocab, context=context, batch_tokens=float(batch),
        step=(rows["tokens"] / batch).round().astype("int64"),
    )  # fmt: skip
    if "heads" not in rows:
        size = np.where(rows["width"] % 64 == 0, 64, np.where(rows["width"] % 32 == 0, 32, 16))
        rows = rows.assign(heads=rows["width"] // size)
    return declare_params(complete(rows), "backbone")


def _short(count: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _csv(table: pd.DataFrame) -> str:
    """CSV with whole numbers as such and losses to ten digits, one newline style everywhere."""
    out = table.copy()
    for name in out.columns:
        column = out[name]
        if column.dtype.kind == "f" and bool((column.notna() & (column % 1 == 0) & (column.abs() < 2**53)).all()):
            out[name] = column.astype("int64")
    return out.to_csv(index=False, float_format="%.10g", lineterminator="\n")


def _main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        raise SystemExit("usage: python -m scalinglab.simulation OUT")
    write_study(arguments[0])
    return 0


if __name__ == "__main__":
    import sys

    raise SystemExit(_main(sys.argv[1:]))
