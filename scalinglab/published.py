"""Published numbers as small tables, each with its source and whether we checked it there.

`depthbench()` holds the losses of ten residual topologies over depth; `published_fits()` the parameters of published
scaling laws, one row per parameter. Nothing here is refitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pandas as pd

from scalinglab.errors import ConfigError
from scalinglab.tables import table_meta, table_path

DEPTHBENCH_READING_ERROR = 0.002  # nats; the losses were read from charts with three decimals


@dataclass(frozen=True)
class _Fit:
    key: str
    law: str  # key of LAWS, whose parameter names are used
    params: dict[str, float]
    n: str  # which N the law means
    source: str
    verified: bool  # the values were read in the source's own data or code
    note: str = ""


_MEMORY = "quoted from memory, not checked against the paper"
_GEMSTONES = "McLeish et al. 2025, arXiv:2502.06857, repository values"
_GEMSTONES_N = "total (untied embedding and readout)"

_FITS = (
    _Fit("kaplan2020_n", "kaplan_n", {"A": 8.8e13**0.076, "alpha": 0.076}, "backbone",
         "Kaplan et al. 2020, arXiv:2001.08361", False, f"N_c = 8.8e13; {_MEMORY}"),
    _Fit("kaplan2020", "kaplan", {"A": 6.4e13**0.076, "alpha": 0.076, "B": 1.8e13**0.103, "delta": 0.103}, "backbone",
         "Kaplan et al. 2020, arXiv:2001.08361", False, f"N_c = 6.4e13, D_c = 1.8e13; {_MEMORY}"),
    _Fit("hoffmann2022", "chinchilla",
         {"E": 1.6933736809989528, "A": 406.4010175194737, "B": 410.7228269450398, "alpha": 0.33917084,
          "beta": 0.2849083}, "total", "Hoffmann et al. 2022, arXiv:2203.15556, approach 3 (digits of the TeX source)",
         True, "printed as 1.69, 406.4, 410.7, 0.34, 0.28; does not fit the points read from its own figure"),
    _Fit("besiroglu2024", "chinchilla",
         {"E": 1.817235504463726, "A": 477.84171252965143, "B": 2143.8637880335505, "alpha": 0.34731265761033453,
          "beta": 0.3671826173946711}, "total", "Besiroglu et al. 2024, arXiv:2404.10102, grid fit of the notebook",
         True, "240 points, Huber(1e-3) on log loss, objective 1.0182740346e-3: the optimum"),
    _Fit("besiroglu2024_quoted", "chinchilla",
         {"E": 1.81686, "A": 482.00572, "B": 2085.4342, "alpha": 0.34781303, "beta": 0.36585412}, "total",
         "Besiroglu et al. 2024, arXiv:2404.10102, values quoted in the paper", True,
         "a BFGS stop with objective 1.018645e-3, not the optimum; the paper prints E = 1.8172"),
    _Fit("muennighoff2023", "data_constrained",
         {"E": math.exp(0.62548), "A": math.exp(6.2554), "B": math.exp(7.3050), "alpha": 0.35266, "beta": 0.35266,
          "Rd": 15.3878}, "as given", "Muennighoff et al. 2023, arXiv:2305.16264, repository README", True,
         "repetition of data decays with Rd; their R_N* for excess parameters is 5.3097"),
    _Fit("gemstones2025_hot_100b", "chinchilla",
         {"E": math.exp(0.6681624725), "A": math.exp(4.9008415415), "B": math.exp(12.850969215),
          "alpha": 0.2591125694, "beta": 0.5972679073}, _GEMSTONES_N, _GEMSTONES, True,
         "770 checkpoints of 22 runs without decay, Huber(1e-3), objective 6.5925344e-3"),
    _Fit("gemstones2025_cool_end", "chinchilla",
         {"E": math.exp(0.7297863295), "A": math.exp(5.4197160371), "B": math.exp(12.5138998709),
          "alpha": 0.3002728205, "beta": 0.580241077}, _GEMSTONES_N, _GEMSTONES, True,
         "199 cooled-down checkpoints, Huber(1e-3), objective 1.9640865e-3"),
    _Fit("gemstones2025_width_depth_hot_100b", "width_depth",
         {"E": 0.0, "A": math.exp(2.1144598737), "a": 0.2606504897, "B": math.exp(0.7307645279), "b": 0.1416453973,
          "C": math.exp(11.2841184982), "c": 0.530963438}, "none", _GEMSTONES, True,
         "width A d^-a, depth B L^-b, data C D^-c; the floor collapsed (published ln E = -4555)"),
    _Fit("gemstones2025_width_depth_params_hot_100b", "width_depth_params",
         {"E": math.exp(0.3966401522), "A": math.exp(1.0738807871), "a": 0.205280776, "B": math.exp(-0.2097602665),
          "b": 0.4741415976, "C": math.exp(10.9040518165), "c": 0.5116481093, "P": math.exp(6.2174536361),
          "p": 0.372096494}, _GEMSTONES_N, _GEMSTONES, True, "adds P N^-p; Huber(1e-3), objective 2.64277e-3"),
    _Fit("levine2020", "levine", {"a_th": 5.039, "b_th": 0.0555}, "none",
         "Levine et al. 2020, arXiv:2006.12467", False,
         f"depth helps below (ln width - a_th) / b_th; {_MEMORY}"),
)  # fmt: skip


def published_fits(law: str | None = None) -> pd.DataFrame:
    """Published scaling-law parameters, one row per parameter.

    Parameters
    ----------
    law
        Keep only fits of this law key, e.g. "chinchilla".

    Returns
    -------
    DataFrame
        Columns key, law, parameter, value, n (which N it means), source, verified, note. Values are on the natural
        scale, in nats per token, parameters and tokens. `verified` is False for values quoted from memory.

    Raises
    ------
    ConfigError
        No published fit of that law; lists those there are.
    """
    known = sorted({fit.law for fit in _FITS})
    if law is not None and law not in known:
        raise ConfigError(f"there is no published fit of the law {law!r}; known: {', '.join(known)}")
    rows = [
        (fit.key, fit.law, name, value, fit.n, fit.source, fit.verified, fit.note)
        for fit in _FITS
        if law is None or fit.law == law
        for name, value in fit.params.items()
    ]
    return pd.DataFrame(rows, columns=["key", "law", "parameter", "value", "n", "source", "verified", "note"])


def published_params(key: str) -> pd.Series:
    """Parameters of one published fit, indexed by name.

    Raises
    ------
    ConfigError
        Unknown key; lists the known ones.
    """
    for fit in _FITS:
        if fit.key == key:
            return pd.Series(fit.params, name=key, dtype=float)
    raise ConfigError(f"there is no published fit {key!r}; known: {', '.join(fit.key for fit in _FITS)}")


def depthbench() -> pd.DataFrame:
    """Validation losses of DepthBench: 69 configurations of ten residual topologies, one row each.

    Two grids (`match_group`): "400M" is matched on total, "300M" on backbone parameters. Each configuration stands at
    its best learning rate; losses were read from the authors' charts (good to about 0.002 nats), one seed. Counts are
    those of the Pre-LN backbone of the shape; params_backbone leaves out the final norm (width), params_total has it.
    attrs["meta"] carries the source.
    """
    table = pd.read_csv(table_path("depthbench"))
    counts = ["params_backbone", "params_total", "flops_per_token", "tokens"]
    table[counts] = table[counts].astype(float)  # their products overflow 64-bit integers
    table.attrs["meta"] = table_meta("depthbench")
    return table


Kind: TypeAlias = Literal["printed", "earlier refit", "implied", "second hand"]

KINDS: dict[Kind, str] = {  # where a number to compare with stands, and what many of them are called
    "printed": "printed numbers",  # in the source itself: paper, repository or site
    "earlier refit": "earlier refits",  # of the source's data by us: the source doesn't print it
    "implied": "implications",  # our reading of a sentence of the source, or our arithmetic on its numbers
    "second hand": "second-hand numbers",  # as others tell it, not checked in the source
}


# ---- single numbers ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Number:
    study: str
    quantity: str
    value: float
    unit: str
    source: str
    low: float = math.nan
    high: float = math.nan
    kind: Kind = "printed"


_BESIROGLU = "Besiroglu et al. 2024, arXiv:2404.10102, notebook"
_PORIAN = "Porian et al. 2024, arXiv:2406.19146, repository: exponent of N* with its 95 % bootstrap interval"
_CHARTS = "earlier least squares on the charts of DepthBench (Wang et al. 2026, arXiv:2609.32534); not in the paper"
_EARLIER = "earlier refit of the Gemstones logs (McLeish et al. 2025, arXiv:2502.06857); not in the paper"
_SITE = "DepthBench, Wang et al. 2026, arXiv:2609.32534, website"
_KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"

_NUMBERS = (
    _Number("besiroglu2024", "objective", 1.0182740346154362e-3, "sum of Huber(1e-3)", _BESIROGLU),
    *(
        _Number("besiroglu2024", f"se of {name}", value, unit, _BESIROGLU)
        for name, value, unit in (("A", 124.52232, ""), ("B", 1293.2841, ""), ("E", 0.02566, "nats"), ("alpha", 0.0154, ""),
                                  ("beta", 0.0206, ""))
    ),
    _Number("besiroglu2024", "alpha", 0.34781, "", _BESIROGLU, 0.317, 0.373),
    _Number("besiroglu2024", "beta", 0.36585, "", _BESIROGLU, 0.331, 0.415),
    _Number("besiroglu2024", "likelihood ratio, 240 points", 84.0, "chi-square", _BESIROGLU),
    _Number("besiroglu2024", "likelihood ratio, 245 points", 86.75, "chi-square", _BESIROGLU),
    *(
        _Number("besiroglu2024", f"least squares {name}", value, unit, "earlier refit of the same 240 points; not in the paper",
                kind="earlier refit")
        for name, value, unit in (("E", 1.8646, "nats"), ("A", 593.0, ""), ("B", 4876.0, ""), ("alpha", 0.3603, ""),
                                  ("beta", 0.4059, ""), ("sigma", 0.00698, "ln loss"))
    ),
    *(
        _Number("porian2024", f"{data}: {step}", value, "", _PORIAN, low, high)
        for data, step, value, low, high in (
            ("RefinedWeb", "as Kaplan", 0.8353, 0.8235, 0.846), ("RefinedWeb", "last layer counted", 0.70647, 0.6915, 0.7169),
            ("RefinedWeb", "warm-up corrected", 0.60204, 0.5914, 0.6173),
            ("RefinedWeb", "cosine to the budget", 0.57149, 0.5598, 0.5885), ("RefinedWeb", "tuned", 0.49690, 0.4907, 0.5045),
            ("OpenWebText2", "as Kaplan", 0.86351, 0.8186, 0.8974),
            ("OpenWebText2", "last layer counted", 0.69850, 0.6644, 0.7245),
            ("OpenWebText2", "warm-up corrected", 0.60320, 0.5702, 0.6287),
            ("OpenWebText2", "cosine to the budget", 0.57430, 0.5423, 0.6056),
            ("OpenWebText2", "tuned", 0.51845, 0.4931, 0.5414),
        )
    ),
    *(
        _Number("depthbench", f"slope {name}", value, "nats per ln(L/d)", _CHARTS, value - 3.182446 * se, value + 3.182446 * se,
                kind="earlier refit")
        for name, value, se in (
            ("pre_ln", 0.0237, 0.0052), ("attnres_full", -0.0298, 0.0077), ("hc", -0.0248, 0.0095), ("lns", -0.0074, 0.0053),
            ("keel", -0.0048, 0.0079), ("attnres_block", -0.0007, 0.0109), ("sandwich_ln", 0.0009, 0.0078),
            ("mhc", 0.0030, 0.0088), ("deepnorm", 0.0112, 0.0087), ("moda", 0.0267, 0.0107),
        )
    ),
    *(
        _Number("depthbench", f"contrast {name}", value, "nats per ln(L/d)", _CHARTS, kind="earlier refit")
        for name, value in (("attnres_full", -0.0536), ("hc", -0.0486), ("lns", -0.0311), ("keel", -0.0285),
                            ("attnres_block", -0.0244), ("sandwich_ln", -0.0228), ("mhc", -0.0207), ("deepnorm", -0.0125),
                            ("moda", 0.0030))
    ),
    _Number("depthbench", "best d/L of Pre-LN-type architectures", 59.4, "d/L", _SITE, 42.7, 76.0),
    _Number("depthbench", "best d/L of hc and attnres_full, 400M", 9.1, "d/L", _SITE),
    *(
        _Number("gemstones2025", f"LORO {law}, {n}", value, "ln loss", _EARLIER, kind="earlier refit")
        for law, n, value in (("chinchilla", "total", 0.01553), ("chinchilla", "one matrix", 0.01156),
                              ("shape", "one matrix", 0.00640), ("shape", "total", 0.00804), ("width_depth", "total", 0.00746),
                              ("width_depth_params", "total", 0.00520))
    ),
    _Number("gemstones2025", "r_star, one matrix", 17.5, "d/L", _EARLIER, kind="earlier refit"),
    _Number("gemstones2025", "r_star, total", 9.3, "d/L", _EARLIER, kind="earlier refit"),
    _Number("gemstones2025", "gamma2, one matrix", 0.0137, "per (ln r)^2", _EARLIER, kind="earlier refit"),
    _Number("kaplan2020", "largest cost of shape", 3.0, "% of loss", f"{_KAPLAN}, fig. 5: (6, 4288) within 3 % of (48, 1600)"),
    _Number("kaplan2020", "compute for 1 % of loss", 22.0, "% of compute", f"{_KAPLAN}, fig. 5"),
    _Number("kaplan2020", "range of aspect ratios", 40.0, "fold", f"{_KAPLAN}, fig. 5"),
    _Number("levine2020", "width for 1e12 parameters", 30e3, "width",
            "Levine et al. 2020, arXiv:2006.12467, abstract: a width of 30K for a trillion parameters"),
    _Number("levine2020", "depth for 1e12 parameters", 92.0, "blocks",
            "summaries of Levine et al. 2020, arXiv:2006.12467; not checked against the paper", kind="second hand"),
    _Number("steplaw2025", "median curvature", 0.0155, "nats per (ln lr)^2",
            "earlier surfaces through the grids of Li et al. 2025, arXiv:2503.04715; not in the paper", kind="earlier refit"),
    _Number("steplaw2025", "vertex bias of the parabola", -0.125, "ln lr",
            "earlier fits to the grids of Li et al. 2025, arXiv:2503.04715; not in the paper", -0.14, -0.11, kind="earlier refit"),
    _Number("steplaw2025", "lr exponent of N", -0.713, "", "Li et al. 2025, arXiv:2503.04715", -0.7744, -0.6554),
    _Number("steplaw2025", "lr exponent of D", 0.307, "", "Li et al. 2025, arXiv:2503.04715", 0.2712, 0.3451),
    _Number("attnres2026", "best d/L of the baseline", 60.0, "d/L", "arXiv:2603.15031, sweep of shapes at 6.5e19 FLOPs"),
    _Number("attnres2026", "best d/L of AttnRes", 45.0, "d/L", "arXiv:2603.15031, sweep of shapes at 6.5e19 FLOPs"),
)  # fmt: skip


def published_numbers(study: str | None = None) -> pd.DataFrame:
    """Single published numbers to compare with: columns study, quantity, value, low, high, unit, source, kind, printed.

    `printed` is False where the source does not print the number itself; `kind` says what stands in (`KINDS`).

    Raises
    ------
    ConfigError
        No such study; lists those there are.
    """
    known = sorted({n.study for n in _NUMBERS})
    if study is not None and study not in known:
        raise ConfigError(f"there are no published numbers of {study!r}; known: {', '.join(known)}")
    rows = [
        (n.study, n.quantity, n.value, n.low, n.high, n.unit, n.source, n.kind, n.kind == "printed")
        for n in _NUMBERS
        if study is None or n.study == study
    ]
    return pd.DataFrame(
        rows, columns=["study", "quantity", "value", "low", "high", "unit", "source", "kind", "printed"]
    )
