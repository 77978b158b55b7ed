"""references.bib as data, and entries as lines of HTML: @type{key, field = {text}, ...}, names joined by "and"."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from scalinglab.errors import ConfigError
from scalinglab.report.html.elements import el

_ENTRY = re.compile(r"@(\w+)\s*\{\s*([^,\s]+)\s*,")
_TYPED = {"{": "", "}": "", "\\&": "&", "--": "–", "$\\mu$": "μ"}
_FIELD = re.compile(r"\s*(\w+)\s*=\s*")


@dataclass(frozen=True)
class Reference:
    """One entry; `fields` have lower-case names."""

    key: str
    kind: str
    fields: dict[str, str]

    @property
    def authors(self) -> list[str]:
        """Names as "Given Family", the last "others" where there are more."""
        names = re.split(r"\s+and\s+", self.fields.get("author", ""))
        return [" ".join(reversed([p.strip() for p in n.split(",", 1)])) if "," in n else n for n in names if n]


def read_references(path: Path) -> dict[str, Reference]:
    """Entries by key.

    Raises
    ------
    ConfigError
        Two entries of one key, a field that isn't closed, an entry without author, title or year: file and line.
    """
    text = path.read_text(encoding="utf-8")
    out: dict[str, Reference] = {}
    for match in _ENTRY.finditer(text):
        at = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        kind, key = match[1].lower(), match[2]
        if kind == "comment":
            continue
        if key in out:
            raise ConfigError(f"{at}: the key {key} is taken by an entry above")
        fields = _fields(text, match.end(), at)
        missing = [f for f in ("author", "title", "year") if not fields.get(f)]
        if missing:
            raise ConfigError(f"{at}: {key} has no {missing[0]}")
        out[key] = Reference(key, kind, fields)
    return out


def _fields(text: str, place: int, at: str) -> dict[str, str]:
    out: dict[str, str] = {}
    while found := _FIELD.match(text, place):
        place = found.end()
        if text[place : place + 1] == "{":
            value, place = _braced(text, place, at)
        else:
            plain = re.compile(r'"([^"]*)"|(\w+)').match(text, place)
            if plain is None:
                raise ConfigError(f"{at}: field {found[1]} has no value")
            value, place = plain[1] or plain[2] or "", plain.end()
        for tex, plain_text in _TYPED.items():
            value = value.replace(tex, plain_text)
        out[found[1].lower()] = " ".join(value.split())
        comma = re.compile(r"\s*,").match(text, place)
        place = comma.end() if comma else place
    return out


def _braced(text: str, place: int, at: str) -> tuple[str, int]:
    depth = 0
    for i in range(place, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[place + 1 : i], i + 1
    raise ConfigError(f"{at}: a brace is not closed")


def as_html(reference: Reference) -> list[ET.Element | str]:
    """Authors. Title. Where, year. With a link to arXiv or the DOI."""
    f = reference.fields
    names = reference.authors
    more = names[-1:] == ["others"]
    names = names[:-1] if more else names
    who = (
        ", ".join(names) + (" et al" if more else "")
        if more or len(names) < 3
        else f"{', '.join(names[:-1])}, and {names[-1]}"
    )
    who = " and ".join(names) if len(names) == 2 and not more else who
    where = f.get("journal") or f.get("booktitle") or f.get("publisher") or f.get("howpublished") or ""
    volume = f" {f['volume']}" + (f"({f['number']})" if "number" in f else "") if "volume" in f else ""
    pages = f":{f['pages']}" if "pages" in f and volume else f", pages {f['pages']}" if "pages" in f else ""
    out: list[ET.Element | str] = [f"{who}. ", f"{f['title']}{'' if f['title'][-1] in '?!.' else '.'} "]
    if where and not where.startswith("arXiv:"):
        out += [el("em", where), f"{volume}{pages}, "]
    out.append(f"{f['year']}.")
    if "eprint" in f:
        out += [" ", el("a", f"arXiv:{f['eprint']}", href=f"https://arxiv.org/abs/{f['eprint']}"), "."]
    elif "doi" in f:
        out += [" ", el("a", f"doi:{f['doi']}", href=f"https://doi.org/{f['doi']}"), "."]
    return out
