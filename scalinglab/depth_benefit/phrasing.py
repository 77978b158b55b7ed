"""How advice names an option: as Python writes it and as the command line does."""

from __future__ import annotations


def both(option: str, value: object) -> str:
    """An option as it is written in Python and on the command line: rates='published' (--rates published)."""
    name = "--" + option.replace("_", "-")
    if value is ...:
        return f"{option}= ({name})"
    text = str(value)
    word = "" if value is True else f' "{text}"' if " " in text else f" {text}"
    return f"{option}={value!r} ({name}{word})"
