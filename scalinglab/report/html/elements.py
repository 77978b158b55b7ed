"""HTML as a tree: text and attributes are escaped when it is written, so data can't become markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import TypeAlias

import pandas as pd

from scalinglab.report import tables

Child: TypeAlias = "ET.Element | str | Iterable[Child] | None"

# not allowed in HTML: controls, surrogates; and what reorders the text around it (bidirectional overrides)
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff\u202a-\u202e\u2066-\u2069]")


def el(tag: str, *children: Child, **attributes: str | float | bool | None) -> ET.Element:
    """An element with children; strings are text. Attributes: class_ is class, aria_label is aria-label; None and False are left out."""
    made = ET.Element(tag)
    for name, value in attributes.items():
        if value is not None and value is not False:
            text = "" if value is True else f"{value:g}" if isinstance(value, float) else str(value)
            made.set(name.rstrip("_").replace("_", "-"), clean(text))
    add(made, *children)
    return made


def add(parent: ET.Element, *children: Child) -> ET.Element:
    """Append children to an element; returns it."""
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            text = clean(child)
            if len(parent):
                parent[-1].tail = (parent[-1].tail or "") + text
            else:
                parent.text = (parent.text or "") + text
        elif isinstance(child, ET.Element):
            parent.append(child)
        else:
            add(parent, *child)
    return parent


def clean(text: str) -> str:
    """Text without characters that HTML forbids or that reorder what stands around them."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


def page(root: ET.Element) -> str:
    """The document as text."""
    return "<!doctype html>\n" + ET.tostring(root, encoding="unicode", method="html") + "\n"


def table(frame: pd.DataFrame, caption: str, *, class_: str = "", row_headers: bool = True) -> ET.Element:
    """A data frame as a table with a caption, in a box that scrolls sideways; the first column heads the rows."""
    safe = frame.map(lambda v: clean(v) if isinstance(v, str) else v)
    made = ET.fromstring(tables.to_html(safe.rename(columns=lambda c: clean(str(c)))))
    for cell in made.iter():
        if cell.tag in ("td", "th") and "style" in cell.attrib:  # numbers are set to the right
            del cell.attrib["style"]
            cell.set("class", "n")
    for head in made.iter("th"):
        head.set("scope", "col")
    if row_headers:
        for row in made.iterfind("tbody/tr"):
            row[0].tag = "th"
            row[0].set("scope", "row")
    made.insert(0, el("caption", caption))
    made.set("class", class_)
    return el("div", made, class_="scroll", role="region", tabindex="0", aria_label=caption)
