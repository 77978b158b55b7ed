"""Which column of somebody's file is which column of ours.

Names are compared in lower case, with `_ - . /` and space alike, camelCase split, and the prefixes of trackers
(`config.`, `summary.`, ...) taken off. One-letter names keep their case, since `d` is a width and `D` a data size.

Two columns for one of ours: for the loss, the step and a few more a stated order decides (validation before test before
training), else the canonical name decides, else equal columns are the same thing, else it is an error.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from scalinglab.errors import SchemaError
from scalinglab.schema import SCHEMA

# The order within a list is the order of preference; what comes first is tried first.
ALIASES: dict[str, tuple[str, ...]] = {
    "run_id": ("run_id", "run_name", "run", "runid", "name", "id", "experiment_name", "experiment_id"),
    "sweep": ("sweep", "sweep_id", "sweep_name"),
    "match_group": ("match_group", "matched_group", "iso_group"),
    "architecture": ("architecture", "arch", "model_architecture", "residual_topology"),
    "parametrization": ("parametrization", "parameterization", "parametrisation", "parameterisation"),
    "seed": ("seed", "random_seed"),
    "depth": ("depth", "n_layers", "n_layer", "num_layers", "num_hidden_layers", "layers", "nlayers", "L"),
    "width": ("width", "d_model", "n_embd", "hidden_size", "dim", "model_dim", "n_embed", "embed_dim", "dmodel", "d"),
    "heads": ("heads", "n_heads", "n_head", "num_heads", "num_attention_heads"),
    "kv_heads": ("kv_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim", "d_head", "head_size", "kv_size"),
    "ffn_dim": ("ffn_dim", "d_ff", "n_inner", "intermediate_size", "ffn_hidden_size", "d_ffn", "ff_dim", "mlp_dim"),
    "aspect": ("aspect", "aspect_ratio"),
    "vocab": ("vocab", "vocab_size", "n_vocab", "padded_vocab_size"),
    "context": (
        "context",
        "seq_len",
        "block_size",
        "context_length",
        "sequence_length",
        "max_seq_len",
        "n_ctx",
        "n_positions",
        "max_position_embeddings",
    ),
    "params_embedding": ("params_embedding", "embedding_params"),
    "params_attention": ("params_attention", "attention_params"),
    "params_ffn": ("params_ffn", "ffn_params"),
    "params_readout": ("params_readout", "readout_params"),
    "params_other": ("params_other",),
    "params_backbone": (
        "params_backbone",
        "params_non_embedding",
        "non_embedding_params",
        "n_nonemb",
        "n_non_embedding",
        "num_non_embedding_params",
        "params_nonembedding",
        "backbone_params",
    ),
    "params_total": ("params_total", "total_params", "n_total", "n_params_total"),
    "params": ("params", "n_params", "num_params", "num_parameters", "n_parameters", "parameters", "N"),
    "tokens": (
        "tokens",
        "tokens_seen",
        "n_tokens",
        "train_tokens",
        "num_tokens",
        "num_input_tokens_seen",
        "total_tokens",
        "training_tokens",
        "D",
    ),
    "flops": ("flops", "compute", "train_flops", "total_flops", "total_flos", "C"),
    "flops_6n": ("flops_6n",),
    "flops_causal": ("flops_causal",),
    "flops_full": ("flops_full",),
    "batch_tokens": ("batch_tokens", "tokens_per_step", "batch_size_tokens", "tokens_per_batch"),
    "lr": ("lr", "learning_rate", "peak_lr", "max_lr", "peak_learning_rate"),
    "loss": (
        "final_val_loss",
        "val_loss",
        "validation_loss",
        "valid_loss",
        "loss_val",
        "loss_validation",
        "eval_loss",
        "loss_eval",
        "test_loss",
        "loss_test",
        "final_loss",
        "loss",
        "train_loss",
        "training_loss",
        "loss_train",
        "final_train_loss",
    ),
    "loss_se": ("loss_se", "loss_std_err", "loss_stderr", "se_loss"),
    "step": ("step", "global_step", "train_global_step", "iter", "iteration", "iterations", "iter_num", "_step"),
    "status": ("status", "state", "run_state"),
    "split": ("split",),
    "eval_dataset": ("eval_dataset", "val_dataset", "validation_dataset"),
}
TRAINING_LOSSES = ("loss", "train_loss", "training_loss", "loss_train")

_BY_ORDER = ("loss", "step", "tokens", "run_id", "lr")  # canonical columns whose list above decides between candidates
_PREFIXES = ("config", "summary", "args", "hparams", "params", "model", "model_config", "metrics", "cfg", "state")
_TARGETS = {alias: canonical for canonical, names in ALIASES.items() for alias in names}


def recognise(columns: Iterable[str], *, mapped: Iterable[str] = ()) -> dict[str, list[str]]:
    """Columns of a file that could be each canonical column, the preferred one first.

    Parameters
    ----------
    columns
        Names in the file.
    mapped
        Canonical columns that the user maps, for which nothing is looked up.

    Returns
    -------
    dict
        canonical -> candidates, in the order of `ALIASES`.
    """
    taken = set(mapped)
    found: dict[str, list[tuple[int, str]]] = {}
    for name in columns:
        for alias in spellings(name):
            canonical = _TARGETS.get(alias)
            if canonical is not None:
                if canonical not in taken:
                    found.setdefault(canonical, []).append((ALIASES[canonical].index(alias), name))
                break
    return {canonical: [name for _, name in sorted(hits, key=lambda h: h[0])] for canonical, hits in found.items()}


def spellings(name: str) -> list[str]:
    """The forms under which a column name is looked up, from the closest to the most stripped."""
    text = name.strip()
    if len(text) == 1:
        return [text]
    folded = re.sub(r"[-./\\\s_]+", "_", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text)).lower()
    forms = [folded.rstrip("_"), folded.strip("_")]
    head, mark, rest = re.match(r"([^./]*)([./]?)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if mark and rest and head.strip("_").lower() in _PREFIXES:
        forms += spellings(rest)
    elif folded.startswith(("config_", "summary_")):
        forms += spellings(folded.partition("_")[2])
    return [form for form in dict.fromkeys(forms) if form]


def decides_by_order(canonical: str) -> bool:
    """Whether the order of `ALIASES` settles which of several columns is `canonical`."""
    return canonical in _BY_ORDER


def check_targets(columns: Mapping[str, str]) -> None:
    """Refuse a user's mapping to a column that isn't canonical.

    Raises
    ------
    SchemaError
        Names close matches and all canonical columns.
    """
    for canonical in columns:
        if canonical not in SCHEMA:
            raise SchemaError(
                f"columns={{{canonical!r}: ...}}: {canonical!r} is not a canonical column{near(canonical, SCHEMA)}; "
                f"canonical columns: {', '.join(SCHEMA)}"
            )


def near(name: str, known: Iterable[str]) -> str:
    """A hint such as "; did you mean 'depth'?" or nothing."""
    hits = difflib.get_close_matches(name.lower(), [str(k) for k in known], 2, 0.6)
    return f" (did you mean {' or '.join(map(repr, hits))}?)" if hits else ""
