"""A mis-scaling report as one page of HTML, in the house of the depth report: no scripts, no requests, figures inside.

from scalinglab.report.html.misscaling import html_page, save_page
save_page(misscaling(runs), "report")
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from scalinglab import __version__
from scalinglab.errors import ConfigError
from scalinglab.misscaling.report import MisscalingReport
from scalinglab.misscaling.rules import MEANING, TABLE
from scalinglab.misscaling.saving import CAPTIONS, report_tables
from scalinglab.report.figures import FIGURES, save_figure
from scalinglab.report.html.elements import Child, add, el, page, table
from scalinglab.report.html.graphics import check_formats, file_of, inline_svg
from scalinglab.report.html.sections import details, section, signed
from scalinglab.report.tables import to_latex, to_markdown
from scalinglab.tables import write_atomically

NAMES = ("lr_envelope", "lr_drift", "decomposition")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the page asks for nothing from anywhere
_SHOWN = {
    "envelopes": ("architecture", "parametrization", "ladder", "depth", "width", "status", "optimum_lr", "low", "high", "minimum",
                  "minimum_se", "curvature", "fixed", "rates", "runs", "diverged"),
    "drift": ("architecture", "parametrization", "axis", "slope", "se", "df", "low", "high", "p", "p_equivalent", "shapes", "held"),
    "decomposition": ("name", "meaning", "estimate", "se", "df", "low", "high", "p", "p_adj", "p_equivalent", "state"),
    "sensitivity": ("architecture", "parametrization", "ladder", "depth", "width", "absolute", "relative", "rates", "cap"),
    "suspects": ("entry", "exponent", "tried", "needed", "needed_se", "misfit", "df", "p", "check"),
    "hierarchy": ("architecture", "parametrization", "drift", "drift_se", "gain", "gain_se", "curvature", "sigma", "tau", "seed"),
}  # fmt: skip

Drawn = dict[str, dict[str, Figure] | str]


def html_page(report: MisscalingReport) -> str:
    """The page as text.

    Raises
    ------
    ConfigError
        Not a mis-scaling report.
    """
    return _page(report, _drawn(report))


def save_page(
    report: MisscalingReport, folder: str | Path, *, formats: Sequence[str] = ("png", "svg")
) -> tuple[list[Path], dict[str, str]]:
    """Write report.html, figures/, the tables as Markdown and LaTeX too, and what `MisscalingReport.save` writes (tables/, summary.txt, result.json last).

    Returns the figures and the page, and for each figure that this report can't have the reason.

    Raises
    ------
    ConfigError
        Not a mis-scaling report, or a format that figures don't have.
    """
    check_formats(formats)
    drawn = _drawn(report)
    text = _page(report, drawn)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = [
        save_figure(found["page" if name == "lr_envelope" else "column"], folder / "figures" / f"{name}.{kind}")
        for name, found in drawn.items()
        if not isinstance(found, str)
        for kind in formats
    ]
    for name, frame in report_tables(report).items():
        base = folder / "tables" / name
        write_atomically(base.with_suffix(".md"), to_markdown(frame).encode())
        made = to_latex(frame, caption=CAPTIONS[name], label=f"tab:{name}")
        write_atomically(base.with_suffix(".tex"), made.encode())
    written.append(write_atomically(folder / "report.html", text.encode()))
    report.save(folder)
    return written, {name: found for name, found in drawn.items() if isinstance(found, str)}


def _drawn(report: MisscalingReport) -> Drawn:
    """Each figure for wide and for narrow pages, or the reason why this report can't have it."""
    if not isinstance(report, MisscalingReport):
        raise ConfigError(
            "this page shows a mis-scaling report: make one with `scalinglab misscaling` or misscaling(runs)"
        )
    out: Drawn = {}
    for name in NAMES:
        try:
            out[name] = {width: FIGURES[name](report, width=width) for width in ("page", "column")}
        except ConfigError as error:
            out[name] = str(error)
    return out


def _page(report: MisscalingReport, drawn: Drawn) -> str:
    tables = report_tables(report)
    parts = [
        _reasons(report),
        section(
            "envelopes", "Loss against learning rate", _figure(drawn, "lr_envelope", _told_envelopes(report)),
            _table(tables, "envelopes", folded=True),
            lead=f"Fitted within {report.method.window:g} nats of the best; an optimum at the edge of its grid is refused.",
        ),
        section(
            "drift", "Does the optimum move?", _figure(drawn, "lr_drift", _told_drift(report)), _table(tables, "drift"),
            lead=f"Slopes of ln optimal learning rate; within ±{report.margins.drift:g} counts as no drift (two one-sided tests).",
        ),
        section(
            "decomposition", "What the gap is made of", _figure(drawn, "decomposition", _told_gains(report)),
            _table(tables, "decomposition"),
            lead="U: tuning the learning rate at each depth. V: parametrization beyond that. M = U + V: mis-scaling. "
            "W: the architecture, each at its best. Nats per e-fold of depth.",
        ),
        section("suspects", "Which entry would have to be wrong", _table(tables, "suspects"),
                lead="By how much an exponent would have to be off to make the scaled arm look like the naive one; best first. "
                "A hint, no test.") if len(report.suspects) else None,
        section("robustness", "What would change it", _table(tables, "by_tau"), _table(tables, "by_curve"), _table(tables, "hierarchy"),
                _table(tables, "sensitivity", folded=True)) if tables else None,
        _rules(report),
        _provenance(report),
    ]  # fmt: skip
    shown = [p for p in parts if p is not None]
    links = [el("a", str(part.findtext("h2")), href=f"#{part.get('id')}") for part in shown]
    style = add(ET.Element("style"), files("scalinglab.report.html").joinpath("page.css").read_text("utf-8"))
    root = el(
        "html",
        el(
            "head", el("meta", charset="utf-8"), el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"), el("title", "Mis-scaling report"),
            el("link", rel="icon", href="data:,"), style,
        ),
        el(
            "body", el("a", "Skip to the reasons", href="#reasons", class_="skip"), _masthead(report),
            el("nav", links, aria_label="Sections"), el("main", shown),
            el("footer", el("p", f"Made by scalinglab {__version__}. Verdicts follow fixed rules; the first that holds decides.")),
        ),
        lang="en",
    )  # fmt: skip
    return page(root)


def _masthead(report: MisscalingReport) -> ET.Element:
    grids, answers = report.grids, [f"{report.verdict}: {MEANING[report.verdict]}."]
    if len(report.verdicts) > 1:
        answers += [f"{name}: {v}" for name, v in report.verdicts.items()]
    facts = [(len(grids.arms), "arms"), (len(grids.cells), "arms by shape"), (len(grids.seeds), "seeds"),
             (int(grids.tried.sum()), "runs"), (int(math.fsum(report.envelopes.get("diverged", ()))), "diverged")]  # fmt: skip
    return el(
        "header", el("p", "Mis-scaling report", class_="kicker"), el("h1", "Are deep models merely mis-scaled?"),
        el("p", "What depth gives, with one learning rate for all depths, tuned at each, and with a parametrization that scales.", class_="question"),
        el("ul", [el("li", a) for a in answers], class_="answers"),
        el("dl", [el("div", el("dt", k), el("dd", str(v))) for v, k in facts if v], class_="facts"),
    )  # fmt: skip


def _reasons(report: MisscalingReport) -> ET.Element:
    names = tuple({a for arm in report.grids.arms for a in arm if a})
    items = [el("li", (r if r.startswith(names) else r[:1].upper() + r[1:]) + ".") for r in report.reasons]
    return section("reasons", "Why, and what is missing", el("ul", items, class_="notes"), lead=report.basis)


def _table(tables: dict[str, pd.DataFrame], name: str, *, folded: bool = False) -> Child:
    if name not in tables or not len(tables[name]):
        return None
    frame = tables[name]
    kept = [c for c in _SHOWN.get(name, tuple(frame)) if c in frame and not frame[c].isna().all()]
    shown = frame[kept].rename(columns=lambda c: str(c).replace("_", " "))
    made = table(shown, CAPTIONS[name])
    return details(f"{CAPTIONS[name]} ({len(frame)} rows)", made) if folded else made


def _rules(report: MisscalingReport) -> ET.Element:
    m = report.margins
    rows = [
        {
            "verdict": r.verdict,
            "if": "; ".join(f"{k} {' or '.join(v)}" for k, v in r.pattern.items()),
            "meaning": r.meaning,
        }
        for r in TABLE
    ]
    return section(
        "rules", "The rules", table(pd.DataFrame(rows), "The first pattern that holds decides", class_="rules"),
        lead=f"Superior: Holm-adjusted p ≤ {m.alpha:g} and above {m.gain:g} nats per e-fold of depth. Equivalent: "
        f"the {100 * (1 - 2 * m.alpha):g} % interval within ±{m.gain:g}. Beyond: the {100 * (1 - m.alpha):g} % interval of a drift outside ±{m.drift:g}.",
    )  # fmt: skip


def _provenance(report: MisscalingReport) -> ET.Element:
    made, grids = report.analysis, report.grids
    paired = {True: "yes: same seeds and data in all arms", False: "no", None: "not known from these logs"}[
        grids.paired
    ]
    entries = {
        "curve": f"{report.method.model}, window {report.method.window:g} nats, {report.method.sides} rates on each side",
        "errors": made.how.told if made is not None else "none", "paired": paired,
        **{f"refused {' / '.join(a)}": why for a, why in grids.refused.items()},
        **{f"coordinate check of {' / '.join(a)}": v for a, v in grids.checked.items()},
    }  # fmt: skip
    return section(
        "provenance", "How it was done",
        el("dl", [el("div", el("dt", k), el("dd", v)) for k, v in entries.items()], class_="entries"),
    )  # fmt: skip


def _figure(drawn: Drawn, name: str, alt: str) -> Child:
    found = drawn[name]
    if isinstance(found, str):
        return el("p", f"No figure: {found}.", class_="small")
    return el(
        "figure",
        [el("div", inline_svg(file_of(made, "svg"), f"{name}-{w}", alt), class_=w) for w, made in found.items()],
    )


# ---- text alternatives -------------------------------------------------------------------------------------------------
def _told_envelopes(report: MisscalingReport) -> str:
    rows = [
        f"{r.architecture} {r.parametrization} at depth {r.depth:g} " + (f"lowest {r.minimum:.4g} at {r.optimum_lr:.2g}" if math.isfinite(r.optimum_lr) else f"has no optimum ({r.status})")
        for r in report.envelopes.itertuples()
    ]  # fmt: skip
    return "Loss against learning rate, a panel per depth: " + "; ".join(rows) + "."


def _told_drift(report: MisscalingReport) -> str:
    rows = [
        f"{r.architecture} {r.parametrization}: slope {signed(r.slope, 2)} on ln {r.axis}, 95 % interval {signed(r.low, 2)} to {signed(r.high, 2)}"
        for r in report.drift.itertuples()
    ]
    return "Optimal learning rate against depth. " + "; ".join(rows) + "."


def _told_gains(report: MisscalingReport) -> str:
    rows = [
        f"{r.name} {signed(r.estimate, 3)}, 95 % interval {signed(r.low, 3)} to {signed(r.high, 3)}, {r.state or 'not judged'}"
        for r in report.decomposition.itertuples()
        if r.name in ("U", "V", "M") or r.name.startswith("W:")
    ]
    return "Differences of depth gains in nats per e-fold of depth: " + "; ".join(rows) + "."
