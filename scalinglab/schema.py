"""The columns of a run table: name, type, unit, range and meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

ParamsConvention = Literal["backbone", "total", "as given"]
Place = Callable[[int], str]  # position of a row in the table -> "runs.csv, row 17"


@dataclass(frozen=True)
class Column:
    """What a canonical column holds: its type, unit, range and meaning. `low` itself is excluded where `open`."""

    dtype: Literal["int", "float", "str"]
    unit: str
    meaning: str
    low: float | None = None
    open: bool = False
    complete: bool = False  # a column that has any value must have them all


def _count(meaning: str, *, unit: str = "parameters", open: bool = True, complete: bool = False) -> Column:
    return Column("float", unit, meaning, low=0.0, open=open, complete=complete)


def _size(meaning: str, *, unit: str = "1", complete: bool = False) -> Column:
    return Column("int", unit, meaning, low=1.0, complete=complete)


SCHEMA: dict[str, Column] = {
    "run_id": Column("str", "-", "one training run; its checkpoints share it", complete=True),
    "sweep": Column("str", "-", "the sweep that the run belongs to"),
    "match_group": Column("str", "-", "runs matched on size and data; paired comparisons stay within it"),
    "architecture": Column("str", "-", "residual topology, e.g. pre_ln"),
    "parametrization": Column("str", "-", "sp, mup, depth-mup, completep, ..."),
    "seed": Column("int", "-", "seed of initialisation and data order"),
    "depth": _size("number of blocks L", unit="blocks", complete=True),
    "width": _size("residual width d", complete=True),
    "heads": _size("query heads H"),
    "kv_heads": _size("key/value heads K"),
    "head_dim": _size("size of a head h"),
    "ffn_dim": _size("feed-forward inner width f"),
    "aspect": Column("float", "1", "aspect ratio width / depth", low=0.0, open=True),
    "vocab": _size("vocabulary V", unit="tokens"),
    "context": _size("context length s", unit="tokens"),
    "params_embedding": _count("input embedding"),
    "params_attention": _count("attention projections"),
    "params_ffn": _count("feed-forward"),
    "params_readout": _count("readout; 0 if tied", open=False),
    "params_other": _count("norm gains, gates, routers", open=False),
    "params_backbone": _count("backbone (non-embedding) parameters", complete=True),
    "params_total": _count("all parameters", complete=True),
    "params": _count("the declared N: attrs['params'] says which", complete=True),
    "tokens": _count("training tokens seen D", unit="tokens", complete=True),
    "flops": _count("training FLOPs as the source counts them", unit="FLOPs"),
    "flops_6n": _count("6 N D", unit="FLOPs"),
    "flops_causal": _count("with readout and causal attention", unit="FLOPs"),
    "flops_full": _count("with readout and full attention", unit="FLOPs"),
    "batch_tokens": _count("tokens per optimiser step", unit="tokens"),
    "lr": Column("float", "1", "peak learning rate", low=0.0),
    "loss": Column("float", "nats/token", "cross-entropy, validation where there is one", low=0.0, open=True),
    "loss_se": Column("float", "nats/token", "standard error of loss", low=0.0),
    "step": Column("int", "steps", "optimiser step of the checkpoint", low=0.0),
    "status": Column("str", "-", "finished, diverged, killed, failed, restarted, ..."),
    "split": Column("str", "-", "data split of the loss"),
    "eval_dataset": Column("str", "-", "data set of the loss"),
}

KEY = ("run_id", "step", "tokens", "eval_dataset", "split")
STOPPED = ("diverged", "killed", "failed", "nan", "crashed", "inf", "oom")


def stopped_rows(df: pd.DataFrame) -> np.ndarray:
    """Mask [n] of rows whose status says that the run did not live to have a loss."""
    if "status" not in df or df["status"].isna().all():
        return np.zeros(len(df), dtype=bool)
    return df["status"].astype("string").str.strip().str.lower().isin(STOPPED).fillna(False).to_numpy(dtype=bool)


def ordered(columns: Sequence[Any] | pd.Index) -> list[Any]:
    """Canonical columns in the order of `SCHEMA`, then the others as they came."""
    there = set(columns)
    return [c for c in SCHEMA if c in there] + [c for c in columns if c not in SCHEMA]


class ColumnsByName(Mapping[str, Any]):
    """The columns of a table as arrays for an expression; `val/loss` is also known as `val_loss`."""

    def __init__(self, df: pd.DataFrame) -> None:
        self._df = df
        self._names = {identifier(str(c)): c for c in reversed(df.columns)} | {str(c): c for c in df.columns}

    def __getitem__(self, name: str) -> Any:
        column = self._df[self._names[name]]
        if column.dtype.kind in "iuf":
            return column.to_numpy(dtype=float)  # params * tokens overflows 64-bit integers
        return column.to_numpy() if column.dtype.kind == "b" else column.to_numpy(dtype=object)

    def __iter__(self) -> Iterator[str]:
        return iter(n for n in self._names if n.isidentifier())

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def source(self, name: str) -> str:
        """Column that the name stands for."""
        return str(self._names[name])


def identifier(name: str) -> str:
    """`name` with `_` for every character that can't stand in an expression."""
    text = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
    return f"_{text}" if text[:1].isdigit() else text
