"""From the name of a corpus in a run file to the corpus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.automaton import Automaton
from scalinglab.train.corpora.base import Corpus, Synthetic
from scalinglab.train.corpora.boolean import Boolean
from scalinglab.train.corpora.hierarchy import Hierarchy
from scalinglab.train.corpora.markov import Markov
from scalinglab.train.corpora.pointer import Pointer
from scalinglab.train.corpora.text import ByteText, kjv
from scalinglab.train.corpora.wordproblem import WordProblem

CORPORA: dict[str, type[Synthetic]] = {c.name: c for c in (Automaton, Hierarchy, Markov, Boolean, Pointer, WordProblem)}
_TEXTS: dict[str, Any] = {"text": ByteText, "kjv": kjv}
_TEXT_OPTIONS = {"text": ("path", "packing", "eval_fraction"), "kjv": ("eval_fraction",)}


def open_corpus(name: str, options: Mapping[str, Any] | None = None, *, context: int | None = None) -> Corpus:
    """The corpus of a run.

    Parameters
    ----------
    name : str
        Key of `CORPORA`, "kjv", or "text" (with the option `path`: any file, or packed token ids).
    options : mapping
        Parameters of the corpus; lists stand for tuples.
    context : int, optional
        Targets per sequence, for synthetic corpora whose options don't say it.

    Raises
    ------
    ConfigError
        Unknown name or option, or a value out of range.
    """
    options = dict(options or {})
    if name not in CORPORA and name not in _TEXTS:
        raise ConfigError(f"corpus={name!r} is unknown; choose one of {', '.join([*CORPORA, *_TEXTS])}")
    known = _TEXT_OPTIONS[name] if name in _TEXTS else [f.name for f in fields(CORPORA[name])]  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(f"corpus_options.{unknown[0]} is unknown for corpus {name!r}; options are {', '.join(known)}")
    if name in _TEXTS:
        if name == "text" and "path" not in options:
            raise ConfigError("corpus 'text' needs corpus_options.path, the file to read")
        corpus: Corpus = _TEXTS[name](**options)
        return corpus
    if context is not None and "context" in known:
        options.setdefault("context", context)
    try:
        return CORPORA[name](**{option: _tuples(value) for option, value in options.items()})
    except TypeError as error:
        raise ConfigError(f"corpus_options of {name!r} have a wrong type: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
