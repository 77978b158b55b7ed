"""Token streams to train on: deterministic, fingerprinted, and (the synthetic ones) with a known entropy floor.

| key | class | difficulty label |
|---|---|---|
| automaton (default) | `Automaton` | k, the steps between rows |
| hierarchy | `Hierarchy` | tree level |
| markov | `Markov` | symbols looked back at |
| boolean | `Boolean` | nesting depth to evaluate |
| pointer | `Pointer` | hops |
| wordproblem | `WordProblem` | word length |

Real text: `ByteText` for a file, `kjv` for the King James Bible. Nothing here needs torch.
"""

from __future__ import annotations

from scalinglab.train.corpora.automaton import Automaton
from scalinglab.train.corpora.base import (
    NO_DIFFICULTY,
    Corpus,
    Evaluation,
    Synthetic,
    by_difficulty,
    training_stream,
)
from scalinglab.train.corpora.boolean import Boolean
from scalinglab.train.corpora.hierarchy import Hierarchy
from scalinglab.train.corpora.markov import Markov
from scalinglab.train.corpora.pointer import Pointer
from scalinglab.train.corpora.source import CORPORA, open_corpus
from scalinglab.train.corpora.text import ByteText, TokenText, kjv
from scalinglab.train.corpora.wordproblem import WordProblem

__all__ = [
    "CORPORA",
    "NO_DIFFICULTY",
    "Automaton",
    "Boolean",
    "ByteText",
    "Corpus",
    "Evaluation",
    "Hierarchy",
    "Markov",
    "Pointer",
    "Synthetic",
    "TokenText",
    "WordProblem",
    "by_difficulty",
    "kjv",
    "open_corpus",
    "training_stream",
]
