"""Figures as inline SVG that follows the page: its colours in light and dark, ids of its own, a text alternative."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Literal

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from scalinglab.errors import ConfigError
from scalinglab.report.html.elements import clean, el
from scalinglab.report.style import GREY, INK, PALE, PALETTE, styled

_COLOURS = {
    INK: "--ink", "#000000": "--ink", GREY: "--muted", PALE: "--band", "#ffffff": "--paper",
    **{colour.lower(): f"--c{k}" for k, colour in enumerate(PALETTE[:-1])},
}  # fmt: skip
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def check_formats(formats: Sequence[str]) -> None:
    """Refuse what figures can't be saved as.

    Raises
    ------
    ConfigError
        A format that isn't png, svg or pdf.
    """
    bad = [f for f in formats if f not in ("png", "svg", "pdf")]
    if bad:
        raise ConfigError(f"format {bad[0]!r} is not known: figures are png, svg or pdf")


def file_of(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a PNG or SVG file, byte for byte that of `save_figure`, drawn once: savefig lays out what is laid out."""
    drawn = io.BytesIO()
    with styled():
        if kind == "svg":
            FigureCanvasSVG(figure).print_svg(drawn, metadata={"Creator": "scalinglab", "Date": None})
            FigureCanvasAgg(figure)
            return clean(drawn.getvalue().decode()).encode()  # a label with a control character is no XML
        else:
            screen = figure.get_dpi()
            figure.set_dpi(matplotlib.rcParams["savefig.dpi"])
            FigureCanvasAgg(figure).print_png(drawn, metadata={"Software": None})
            figure.set_dpi(screen)
    return drawn.getvalue()


def inline_svg(drawn: bytes, name: str, alt: str) -> ET.Element:
    """An SVG file as an <svg> element without a size of its own; `name` keeps its ids apart from those of other figures."""
    root = ET.fromstring(drawn)
    _strip(root)
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.attrib = {k.rpartition("}")[2]: v for k, v in node.attrib.items()}
        if "id" in node.attrib:
            node.set("id", f"{name}-{node.attrib['id']}")
        if "href" in node.attrib:
            node.set("href", f"#{name}-{node.attrib['href'].removeprefix('#')}")
        for key in ("style", "clip-path", "fill", "stroke"):
            if key in node.attrib:
                text = _REFERENCE.sub(rf"url(#{name}-\1)", node.attrib[key])
                node.set(key, _COLOUR.sub(_themed, text))
        if "d" in node.attrib:  # hundredths of a point are enough; transforms keep their digits
            node.set("d", _NUMBER.sub(lambda m: f"{float(m.group()):.2f}", node.attrib["d"]))
        if node.text is not None and not node.text.strip():
            node.text = None
        node.tail = None
    box = root.get("viewBox", "0 0 1 1")
    root.attrib = {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title", "class": "figure"}
    root.insert(0, el("title", clean(alt), id=f"{name}-title"))
    return root


def _themed(match: re.Match[str]) -> str:
    name = _COLOURS.get(match.group().lower())
    return match.group() if name is None else f"var({name})"


def _strip(root: ET.Element) -> None:
    """Drop metadata and the style sheet, which would reach the whole page."""
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)


def strip_chart(
    estimate: float, low: float, high: float, low90: float, high90: float, *, margin: float, reach: float, tone: str
) -> ET.Element:
    """An interval as a small chart: thin 95 %, thick 90 %, a point, over the margin; from -reach to reach."""
    half = 150.0

    def at(value: float) -> float:
        return round(half + half * max(-1.0, min(1.0, value / reach)), 1)

    marks = [
        el("rect", x=at(-margin), y="0", width=at(margin) - at(-margin), height="26", class_="band") if margin > 0 else None,
        el("line", x1=half, x2=half, y1="0", y2="26", class_="zero"),
        el("line", x1=at(low), x2=at(high), y1="13", y2="13", class_="thin"),
        el("line", x1=at(low90), x2=at(high90), y1="13", y2="13", class_="thick"),
        el("circle", cx=at(estimate), cy="13", r="5"),
    ]  # fmt: skip
    return el("svg", marks, viewBox="0 0 300 26", class_=f"strip {tone}", aria_hidden="true")
