"""A depth report as one page of HTML: no scripts, no requests, figures inside; for phones, desktops and paper.

    from scalinglab.report.html import html_report, save_report
    save_report(depth_benefit(runs), "report")

All that comes from the runs passes through `elements.el`, which writes text as text.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.report.depth_curves import ShapeCurve, shape_curves
from scalinglab.report.figures import FIGURES, save_figure
from scalinglab.report.figures.benefit import primary
from scalinglab.report.figures.power import power_of
from scalinglab.report.html import alt
from scalinglab.report.html import sections as s
from scalinglab.report.html.elements import Child, add, el, page
from scalinglab.report.html.graphics import check_formats, file_of, inline_svg
from scalinglab.tables import write_atomically

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.effects import Effect

DEPTH_FIGURES = ("depth_forest", "depth_interaction", "depth_equivalence", "depth_specifications", "depth_power")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the page asks for nothing from anywhere


def html_report(report: DepthReport) -> str:
    """The page as text.

    Raises
    ------
    ConfigError
        Not a depth report.
    """
    curves = _curves(report)
    return _page(report, curves, _drawn(report, curves))


def save_report(
    report: DepthReport, folder: str | Path, *, formats: Sequence[str] = ("png", "svg")
) -> tuple[list[Path], dict[str, str]]:
    """Write report.html, figures/, and what `DepthReport.save` writes (tables/, summary.txt, result.json last).

    Returns the figures and the page, and for each figure that this report can't have the reason.

    Raises
    ------
    ConfigError
        Not a depth report, or a format that figures don't have.
    """
    check_formats(formats)
    curves = _curves(report)
    drawn = _drawn(report, curves)
    text = _page(report, curves, drawn)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    written = [
        found.save(folder / "figures" / f"{name}.{kind}")
        for name, found in drawn.items()
        if not isinstance(found, str)
        for kind in formats
    ]
    written.append(write_atomically(folder / "report.html", text.encode()))
    report.save(folder)
    return written, {name: found for name, found in drawn.items() if isinstance(found, str)}


@dataclass(frozen=True)
class _Figure:
    """A figure of the report: drawn for the width of a page, and as SVG for wide and for narrow pages."""

    page: Figure
    svg: Mapping[str, bytes]

    def save(self, path: Path) -> Path:
        """Write the page's figure; its SVG is there already."""
        if path.suffix == ".pdf":
            return save_figure(self.page, path)
        return write_atomically(path, self.svg["page"] if path.suffix == ".svg" else file_of(self.page, "png"))


Drawn = dict[str, _Figure | str]


def _drawn(report: DepthReport, curves: list[ShapeCurve]) -> Drawn:
    """Each figure for wide and for narrow pages, or the reason why this report can't have it."""
    sources: dict[str, Any] = dict.fromkeys(DEPTH_FIGURES, report)
    if report.outcome is not None and report.outcome.fit is not None:
        sources["shape_valley"] = report.outcome.fit
    out: Drawn = {}
    for name, source in sources.items():
        given = {"curves": curves} if name in ("depth_interaction", "depth_equivalence") and curves else {}
        try:
            made = {width: FIGURES[name](source, width=width, **given) for width in ("page", "column")}
        except ConfigError as error:
            out[name] = str(error)
        else:
            out[name] = _Figure(made["page"], {width: file_of(figure, "svg") for width, figure in made.items()})
    return out


def _curves(report: DepthReport) -> list[ShapeCurve]:
    """Loss against shape of each architecture; none where the design has no contrast.

    Raises
    ------
    ConfigError
        Not a depth report.
    """
    from scalinglab.depth_benefit.result import DepthReport as Report

    if not isinstance(report, Report):
        raise ConfigError("an HTML report shows a depth report: make one with `scalinglab depth` or depth_benefit")
    try:
        return shape_curves(report)
    except ConfigError:
        return []


def _page(report: DepthReport, curves: list[ShapeCurve], drawn: Drawn) -> str:
    effects = _primary(report)
    parts: list[ET.Element | None] = [
        s.section("verdicts", "Verdicts", s.cards(report, effects), lead=_scale(report)),
        s.section(
            "effects", "The depth benefit of each architecture", _figure(drawn, "depth_forest", alt.forest(report, effects)),
            s.effects_table(report),
        ) if effects else None,
        s.cautions(report),
        s.interaction(report, _figure(drawn, "depth_interaction", alt.interaction(curves))) if effects else None,
        _valley(drawn),
        _equivalence(report, curves, drawn),
        s.robustness(report, _figure(drawn, "depth_specifications", alt.specifications(report)) if effects else None),
        s.change(report, _figure(drawn, "depth_power", alt.power(report)) if effects else None, _power(report)),
        s.words(report),
        s.laws(report),
        s.audit(report),
        s.provenance(report),
    ]  # fmt: skip
    shown = [p for p in parts if p is not None]
    links = [el("a", _short(part), href=f"#{part.get('id')}") for part in shown]
    root = el(
        "html",
        el(
            "head", el("meta", charset="utf-8"), el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="color-scheme", content="light dark"), el("title", "Does depth help? Depth report"),
            el("link", rel="icon", href="data:,"), _style(),
        ),
        el(
            "body", el("a", "Skip to the verdicts", href="#verdicts", class_="skip"), s.masthead(report, effects),
            el("nav", links, aria_label="Sections"), el("main", shown),
            el("footer", el("p", f"Made by scalinglab {report.result['code_version']}. Labels follow fixed rules; the first that holds decides.")),
        ),
        lang="en",
    )  # fmt: skip
    return page(root)


def _primary(report: DepthReport) -> list[Effect]:
    try:
        return primary(report)
    except ConfigError:
        return []


def _figure(drawn: Drawn, name: str, alt: str) -> Child:
    found = drawn[name]
    if isinstance(found, str):
        return el("p", f"No figure: {found}.", class_="small")
    return el("figure", [el("div", inline_svg(svg, f"{name}-{w}", alt), class_=w) for w, svg in found.svg.items()])


def _valley(drawn: Drawn) -> ET.Element | None:
    """The shape valley of a fitted law; of cell means the curves of the interaction are the valleys."""
    if "shape_valley" not in drawn:
        return None
    shown = _figure(drawn, "shape_valley", "Loss above the optimum against aspect ratio, a panel per architecture.")
    return s.section("valley", "Shape valleys of the law", shown)


def _equivalence(report: DepthReport, curves: list[ShapeCurve], drawn: Drawn) -> ET.Element | None:
    if report.outcome is None:
        return None
    margin = report.outcome.margin
    lead = f"Shapes that cost less than {margin:.2g} nats ({100 * report.options.margin:g} % compute) against the best are equivalent to it in practice."
    shown = _figure(drawn, "depth_equivalence", alt.equivalence(curves, margin))
    return s.section("equivalence", "How much of the range is good enough", shown, lead=lead)


def _scale(report: DepthReport) -> str:
    if report.outcome is None:
        return "No estimate; each label says what the design lacks."
    rules = "A label is a claim only if the design bears one."
    unit = "nats per e-fold of depth" if report.options.estimand == "E1s" else "nats"
    return f"{rules} In the strips: 95 % (thin) and 90 % (thick) intervals over the margin of ±{s.margin_of(report):.2g} {unit}."


def _power(report: DepthReport) -> str:
    try:
        found = power_of(report)
    except ConfigError:
        return ""
    more = f"with {found.shapes_now + 3} shapes about {_at(found.shapes, found.by_shapes, found.shapes_now + 3):.2g}"
    triple = f"{_at(found.seeds, found.by_seeds, 3 * found.seeds_now):.2g}"
    seeds = (
        f"three times the seeds bring it to {triple} at best, and to nothing less than now where shapes, not seeds, scatter"
        if math.isnan(found.share)
        else f"three times the seeds bring it to {triple}"
    )
    return f"A gap below {found.now:.2g} nats can be missed by these runs (power .8); {more}; {seeds}."


def _at(x: Any, y: Any, where: float) -> float:
    return float(np.interp(where, x, y))


_NAMES = {
    "verdicts": "Verdicts", "effects": "Effects", "cautions": "Cautions", "interaction": "Architectures", "valley": "Valleys",
    "equivalence": "Equivalence", "robustness": "Robustness", "change": "What would change it", "words": "Sentences",
    "laws": "Laws", "audit": "Data", "provenance": "Provenance",
}  # fmt: skip


def _short(part: ET.Element) -> str:
    return _NAMES[str(part.get("id"))]


def _style() -> ET.Element:
    return add(ET.Element("style"), files("scalinglab.report.html").joinpath("page.css").read_text("utf-8"))


__all__ = ["DEPTH_FIGURES", "html_report", "save_report"]
