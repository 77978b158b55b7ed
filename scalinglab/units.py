"""Columns whose numbers are probably not in the unit of the schema, found before a fit makes nonsense of them.

Nothing is converted: each suspicion is an error with the expression that would convert, and a column that the user
mapped explicitly is trusted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd

from scalinglab.errors import SchemaError
from scalinglab.schema import Place, identifier

_COUNTS = ("params", "params_backbone", "params_total")
_SMALL_MODEL = 3_000  # fewer parameters than this is a count in millions or billions, not a language model
_FEW_TOKENS = 1e5
_GAP = 1e2  # a jump this large inside one file is a change of unit
_MIXED_ROWS = 100_000  # enough to see two units mixed
# What makes losses of one size and budget differ by themselves: a sweep of learning rates easily spans 44 %.
_SAME_RUN = (
    "depth", "width", "architecture", "parametrization", "lr", "batch_tokens", "corpus", "eval_dataset", "split",
)  # fmt: skip
_SAME_RUN_BITS = (1.40, 1.485)  # 1 / ln 2 = 1.4427, with room for noise

OTHER_UNITS = {
    "bits": ("bits per token", "{} * log(2)"),
    "loss_bits": ("bits per token", "{} * log(2)"),
    "bits_per_token": ("bits per token", "{} * log(2)"),
    "val_bits": ("bits per token", "{} * log(2)"),
    "bpb": ("bits per byte", "{} * log(2) * BYTES_PER_TOKEN"),
    "val_bpb": ("bits per byte", "{} * log(2) * BYTES_PER_TOKEN"),
    "bits_per_byte": ("bits per byte", "{} * log(2) * BYTES_PER_TOKEN"),
    "bpc": ("bits per character", "{} * log(2) * CHARACTERS_PER_TOKEN"),
    "ppl": ("a perplexity", "log({})"),
    "val_ppl": ("a perplexity", "log({})"),
    "perplexity": ("a perplexity", "log({})"),
    "val_perplexity": ("a perplexity", "log({})"),
    "eval_perplexity": ("a perplexity", "log({})"),
}


def suggestion(canonical: str, expression: str) -> str:
    """How to write a mapping, in Python and on the command line."""
    short = expression.replace(" ", "")
    return f"columns={{'{canonical}': '{expression}'}} (command line: --columns '{canonical}={short}')"


def check_units(df: pd.DataFrame, *, source: str, place: Place, trusted: Collection[str] = ()) -> None:
    """Raise where the numbers of a canonical column look like another unit.

    Parameters
    ----------
    df
        Mapped run table of one file, with attrs["mapping"].
    source
        File name for the message.
    place
        Row position (0-based) -> "runs.csv, row 17".
    trusted
        Canonical columns that the user mapped explicitly.

    Raises
    ------
    SchemaError
        Parameters in millions or billions, tokens in millions or billions, a loss in bits or a perplexity, or two units
        within one column. Says the expression to write.
    """
    for column in _COUNTS:
        if column in df and column not in trusted and df[column].notna().any():
            _check_params(df, column, source, place)
    if "tokens" in df and "tokens" not in trusted and df["tokens"].notna().any():
        _check_tokens(df, source, place)
    if "loss" not in trusted:
        _check_loss(df, source, place)


def _check_params(df: pd.DataFrame, column: str, source: str, place: Place) -> None:
    params = _values(df, column)
    name = _source(df, column)
    blocks = 12.0 * _values(df, "depth") * _values(df, "width") ** 2
    vocabulary = (
        0.0 if column == "params_backbone" else np.nan_to_num(2.0 * _values(df, "vocab") * _values(df, "width"))
    )
    ratio = params / (blocks + vocabulary)
    known = np.isfinite(ratio) & (ratio > 0)
    if known.any():
        _check_jump(df, column, ratio, source, place, f"{column} over what the shape implies")
        typical = float(np.median(ratio[known]))
        if typical < 1e-2:
            scale = _nearest(1.0 / typical, (1e3, 1e6, 1e9))
            raise SchemaError(
                f"{source}, column {name!r}: looks like {_WORDS[scale]} of parameters (the shape of its first row "
                f"has about {params[known][0] / ratio[known][0]:.3g}, the column says {params[known][0]:g}); write "
                f"{suggestion(column, f'{identifier(name)} * {_short(scale)}')}"
            )
        return
    _check_jump(df, column, params, source, place, column, lower=_SMALL_MODEL)
    largest = float(np.nanmax(params))
    if largest < _SMALL_MODEL:
        scale = 1e6 if largest >= 20 else 1e9
        raise SchemaError(
            f"{source}, column {name!r}: the largest value is {largest:g}, which looks like {_WORDS[scale]} of "
            f"parameters; write {suggestion(column, f'{identifier(name)} * {_short(scale)}')}, or "
            f"columns={{'{column}': '{name}'}} if these are single parameters"
        )


def _check_tokens(df: pd.DataFrame, source: str, place: Place) -> None:
    tokens = _values(df, "tokens")
    name = _source(df, "tokens")
    params = next((_values(df, c) for c in _COUNTS if c in df and df[c].notna().any()), np.full(len(df), np.nan))
    if not (np.nanmax(params, initial=0.0) >= _FEW_TOKENS):
        return
    _check_jump(df, "tokens", tokens, source, place, "tokens", lower=_FEW_TOKENS)
    largest = float(np.nanmax(tokens))
    if largest < _FEW_TOKENS:
        per_param = max(float(np.nanmedian(tokens / params)), 1e-300)  # zeros are told by the range check
        scale = _nearest(20.0 / per_param, (1e3, 1e6, 1e9, 1e12))  # 20 tokens per parameter is the usual budget
        raise SchemaError(
            f"{source}, column {name!r}: the largest value is {largest:g} for models of up to {np.nanmax(params):.3g} "
            f"parameters, which looks like {_WORDS[scale]} of tokens; write "
            f"{suggestion('tokens', f'{identifier(name)} * {_short(scale)}')}, or columns={{'tokens': '{name}'}} if "
            "these are single tokens"
        )


def _check_loss(df: pd.DataFrame, source: str, place: Place) -> None:
    loss = _values(df, "loss")
    loss = np.where(np.isfinite(loss), loss, np.nan)
    name = _source(df, "loss")
    if np.isnan(loss).all():
        return
    middle = float(np.nanmedian(loss))
    if middle > 20:
        raise SchemaError(
            f"{source}, column {name!r}: the median is {middle:.3g}, which looks like a perplexity; the loss is in "
            f"nats per token: write {suggestion('loss', f'log({identifier(name)})')}"
        )
    limit = np.log(_values(df, "vocab"))
    known = np.isfinite(limit) & np.isfinite(loss)
    above = loss[known] > 1.05 * limit[known]
    if above.size and above.mean() > 0.5:
        raise SchemaError(
            f"{source}, column {name!r}: {int(above.sum()):,} of {above.size:,} values are above ln(vocab) = "
            f"{limit[known][0]:.3g} nats, the loss of a uniform guess, which looks like bits per token; write "
            f"{suggestion('loss', f'{identifier(name)} * log(2)')}"
        )
    _check_mixed_loss(df, loss, name, source, place)


def _check_mixed_loss(df: pd.DataFrame, loss: np.ndarray, name: str, source: str, place: Place) -> None:
    """Best effort: the same run measured twice, once 1 / ln 2 higher than the other, in most groups."""
    size = next((c for c in _COUNTS if c in df and df[c].notna().any()), None)
    if size is None or "tokens" not in df:
        return
    df, loss = df.iloc[:_MIXED_ROWS], loss[:_MIXED_ROWS]
    groups = [c for c in (size, "tokens", *_SAME_RUN) if c in df]
    repeated = df.duplicated(groups, keep=False).to_numpy()
    if repeated.sum() < 4:
        return
    by = df.loc[repeated, groups].assign(_loss=loss[repeated]).groupby(groups, dropna=False, sort=False)["_loss"]
    ratio = (by.max() / by.min()).to_numpy()
    mixed = (ratio > _SAME_RUN_BITS[0]) & (ratio < _SAME_RUN_BITS[1])
    if mixed.sum() >= 2 and mixed.mean() > 0.5:
        row = int(np.flatnonzero(repeated & (loss == by.transform("max").reindex(df.index).to_numpy()))[0])
        raise SchemaError(
            f"{source}, column {name!r}: rows of the same {size} and tokens differ by a factor of about 1.44 "
            f"= 1 / ln 2 ({int(mixed.sum()):,} of {mixed.size:,} groups; e.g. {place(row)}), which looks like bits and "
            f"nats in one column; convert those in bits by log(2), or write columns={{'loss': '{name}'}} to keep it"
        )


def _check_jump(
    df: pd.DataFrame, column: str, values: np.ndarray, source: str, place: Place, what: str, lower: float = np.inf
) -> None:
    """Two groups of values at least `_GAP` apart (the low one all below `lower`) are two units."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log10(values)
    ok = np.flatnonzero(np.isfinite(logs))
    if ok.size < 2 or np.ptp(logs[ok]) < np.log10(_GAP):
        return
    half_decade = np.floor(2 * logs[ok]).astype(int)
    empty = np.bincount(half_decade - half_decade.min()) == 0
    if not (empty[:-2] & empty[1:-1] & empty[2:]).any():  # a jump leaves three half decades empty; spares the sort
        return
    order = ok[np.argsort(values[ok], kind="stable")]
    steps = values[order][1:] / values[order][:-1]
    cut = int(np.argmax(steps))
    if steps[cut] < _GAP or values[order[cut]] >= lower:
        return
    low, high = order[: cut + 1], order[cut + 1 :]
    odd = low if low.size <= high.size else high
    name = _source(df, column)
    first = int(odd.min())
    raise SchemaError(
        f"{source}, column {name!r}: two units in one column: {what} is at most {values[order[cut]]:.3g} in "
        f"{low.size:,} rows and at least {values[order[cut + 1]]:.3g} in {high.size:,} (first odd one: {place(first)}, "
        f"value {_values(df, column)[first]:g}); bring them to one unit, or write "
        f"columns={{'{column}': '{name}'}} to keep it"
    )


_WORDS = {1e3: "thousands", 1e6: "millions", 1e9: "billions", 1e12: "trillions"}


def _short(scale: float) -> str:
    return f"1e{round(np.log10(scale))}"


def _nearest(value: float, scales: tuple[float, ...]) -> float:
    return min(scales, key=lambda s: abs(np.log(s / value)))


def _values(df: pd.DataFrame, column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    if column not in df:
        return np.full(len(df), np.nan)
    return df[column].to_numpy(dtype=float, na_value=np.nan)


def _source(df: pd.DataFrame, column: str) -> str:
    return str(df.attrs.get("mapping", {}).get(column, column))
