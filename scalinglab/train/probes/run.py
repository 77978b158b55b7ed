"""Running probes: which there are, what they cost, and where a finished run's model comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from scalinglab.errors import ConfigError, SchemaError
from scalinglab.probe_report import Measure, ProbeReport
from scalinglab.train.probes import affine, exchange, gradients, jacobian, lens, paths, removal, states
from scalinglab.train.probes.intervals import Resamples
from scalinglab.train.probes.setup import Setup, Thresholds
from scalinglab.train.probes.tap import Probed, blocks_of, forward, sequence_losses

Progress: TypeAlias = Callable[[str, int, int], None]
Which: TypeAlias = Literal["default", "all"] | Sequence[str]


@dataclass(frozen=True)
class Probe:
    """An entry of the registry.

    Parameters
    ----------
    run : callable
        Setup -> measures. NotImplementedError, with the reason, if it doesn't apply to the model.
    passes : callable
        Depth L -> forward passes over all sequences.
    default : bool
        Whether it runs unless asked for by name: no probe whose passes grow as L^2 does.
    """

    run: Callable[[Setup], list[Measure]]
    passes: Callable[[int], int]
    default: bool = True


PROBES: dict[str, Probe] = {
    "growth": Probe(states.growth, lambda L: 1),
    "rank": Probe(states.rank, lambda L: 1),
    "contributions": Probe(paths.contributions, lambda L: 1),
    "paths": Probe(paths.paths, lambda L: 1),
    "lens": Probe(lens.lens, lambda L: 1),
    "removal": Probe(removal.removal, lambda L: 1 + L),
    "pruning": Probe(removal.pruning, lambda L: 1 + L),
    "usefulness": Probe(affine.usefulness, lambda L: 2 + L),
    "jacobian": Probe(jacobian.jacobian, lambda L: 1),
    "gradients": Probe(gradients.gradients, lambda L: 1),
    "backward": Probe(gradients.backward, lambda L: 1),
    "permutation": Probe(exchange.permutation, lambda L: 1 + L * (L - 1) // 2, default=False),
    "groups": Probe(removal.groups, lambda L: 1 + (L - 1) * (L + 2) // 2, default=False),
}


def probe(
    model: Probed,
    tokens_bt: Tensor,
    targets_bt: Tensor,
    *,
    which: Which = "default",
    seed: int = 0,
    label: str = "",
    chunk: int = 8,
    level: float = 0.95,
    replicates: int = 1000,
    thresholds: Thresholds | None = None,
    directions: int = 8,
    rank_tokens: int = 1024,
    max_distance: int | None = None,
    progress: Progress | None = None,
) -> ProbeReport:
    """Run depth probes on a model.

    Parameters
    ----------
    model : Probed
        Any nn.Module with the connector interface (see `tap.Probed`). Its weights and mode are the same afterwards.
    tokens_bt, targets_bt : Tensor
        int64 [b, t]: inputs and what each position should predict (already shifted), on the model's device.
    which : "default", "all" or names
        "default" costs about 3 L + 12 forward passes; `permutation` and `groups` grow as L^2 and must be asked for.
    seed : int
        Of the bootstrap over sequences and of the Jacobian's directions.
    label : str
        Name in the report.
    chunk : int
        Sequences per forward pass; memory grows with it, results don't depend on it but for rounding.
    level, replicates
        Of the bootstrap intervals over sequences.
    thresholds : Thresholds, optional
        When a block counts.
    directions : int
        Random directions for the Jacobian.
    rank_tokens : int
        Tokens that enter singular value decompositions, at most.
    max_distance : int, optional
        Exchange only blocks this close (`permutation`); 1 takes L - 1 passes.
    progress : callable, optional
        progress(probe, forward passes done, all), after each forward pass of a chunk.

    Returns
    -------
    ProbeReport
        With the reason for each probe that doesn't apply.

    Raises
    ------
    ConfigError
        An unknown probe, tokens and targets that don't fit, or a model without the connector interface.
    """
    names = _names(which)
    if tokens_bt.ndim != 2 or tokens_bt.shape != targets_bt.shape or not tokens_bt.numel():
        raise ConfigError(
            f"tokens {tuple(tokens_bt.shape)} and targets {tuple(targets_bt.shape)} must both be [sequences, positions]"
        )
    for name, value in (("chunk", chunk), ("directions", directions), ("rank_tokens", rank_tokens)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be 1 or more")
    module = cast(nn.Module, model)
    training = module.training
    module.eval()
    try:
        depth = blocks_of(model, tokens_bt)
        meter = _Meter(sum(_passes(name, depth, max_distance) for name in names), -(-len(tokens_bt) // chunk), progress)
        setup = Setup(
            model, tokens_bt, targets_bt, depth,
            Resamples.draw(len(tokens_bt), seed=seed, replicates=replicates, level=level),
            thresholds or Thresholds(), seed, chunk, directions, rank_tokens, max_distance, meter.tick,
        )  # fmt: skip
        with torch.no_grad():
            losses = [sequence_losses(model, forward(model, x), y) for _, x, y in setup.chunks()]
            measures, skipped = _run(names, setup, meter)
    finally:
        module.train(training)
    settings: dict[str, Any] = {
        "sequences": len(tokens_bt), "context": tokens_bt.shape[1], "seed": seed, "level": level, "replicates": replicates,
        "thresholds": asdict(setup.thresholds), "directions": directions, "rank_tokens": rank_tokens,
        "max_distance": max_distance, "probes": names, "passes": round(meter.done / meter.chunks) + 1,
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
    }  # fmt: skip
    return ProbeReport(label, depth, float(torch.cat(losses).mean()), tuple(measures), skipped, settings)


def probe_run(
    run_dir: Path,
    *,
    sequences: int = 64,
    device: str = "cpu",
    which: Which = "default",
    seed: int = 0,
    chunk: int = 8,
    thresholds: Thresholds | None = None,
    max_distance: int | None = None,
    progress: Progress | None = None,
) -> ProbeReport:
    """Probe the trained model of a run folder on its corpus's fixed evaluation sequences; nothing is written.

    Parameters
    ----------
    run_dir : Path
        Holds config.toml and weights.pt.
    sequences : int
        Of the evaluation set.
    device : str
    which, seed, chunk, thresholds, max_distance, progress
        As in `probe`.

    Raises
    ------
    ConfigError
        config.toml is missing or not usable.
    SchemaError
        weights.pt is missing, damaged, or of another model.
    """
    from scalinglab.config import RunConfig
    from scalinglab.train.corpora import open_corpus
    from scalinglab.train.loop import read_summary

    run_dir = Path(run_dir)
    config = RunConfig.load(run_dir / "config.toml")
    model = load_model(run_dir, config, device=device)
    corpus = open_corpus(config.corpus, config.corpus_options, context=config.shape.context)
    known = (read_summary(run_dir) or {}).get("corpus_fingerprint", corpus.fingerprint)
    if known != corpus.fingerprint:
        raise SchemaError(
            f"the data of {run_dir} changed since it was trained: corpus {config.corpus!r} has another fingerprint"
        )
    tokens, targets, *_ = corpus.eval_set(sequences, config.shape.context)
    tokens_bt, targets_bt = (torch.as_tensor(np.asarray(x), device=device) for x in (tokens, targets))
    return probe(
        model, tokens_bt, targets_bt, which=which, seed=seed, label=config.run_id, chunk=chunk, thresholds=thresholds,
        max_distance=max_distance, progress=progress,
    )  # fmt: skip


def load_model(run_dir: Path, config: Any, *, device: str = "cpu") -> Probed:
    """The model of a run with its trained weights.

    Raises
    ------
    SchemaError
        weights.pt is missing, damaged, or of another model.
    """
    from scalinglab.train import checkpoints
    from scalinglab.train.loop import read_summary
    from scalinglab.train.scaling import build

    path = run_dir / "weights.pt"
    if not path.exists():
        raise SchemaError(f"{path} does not exist: the run isn't finished")
    weights, summary = checkpoints.read(path), read_summary(run_dir) or {}
    if weights is None:
        raise SchemaError(f"{path} is damaged or cut off; delete {run_dir / 'summary.json'} and train the run again")
    if summary.get("weights_sha256") not in (None, checkpoints.digest(weights)):
        raise SchemaError(f"{path} does not hold the weights that summary.json tells of: it was exchanged")
    model = build(config, device=device)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, ValueError, KeyError):
        raise SchemaError(f"{path}: these are not the weights of the model in config.toml") from None
    return cast(Probed, model)


def _names(which: Which) -> list[str]:
    if which == "all":
        return list(PROBES)
    if which == "default":
        return [name for name, entry in PROBES.items() if entry.default]
    names = [which] if isinstance(which, str) else list(dict.fromkeys(which))
    unknown = [name for name in names if name not in PROBES]
    if unknown:
        raise ConfigError(f"probe {unknown[0]!r} is unknown; choose default, all, or from {', '.join(PROBES)}")
    return names


def _passes(name: str, depth: int, max_distance: int | None) -> int:
    if name == "permutation" and max_distance is not None:
        return 1 + sum(depth - n for n in range(1, min(max_distance, depth - 1) + 1))
    return PROBES[name].passes(depth)


def _run(names: list[str], setup: Setup, meter: _Meter) -> tuple[list[Measure], dict[str, str]]:
    measures: list[Measure] = []
    skipped: dict[str, str] = {}
    for name in names:
        meter.name = name
        if setup.depth < 2 and name in ("pruning", "groups", "permutation"):
            skipped[name] = "one block has no pairs and no groups"
            continue
        try:
            measures += PROBES[name].run(setup)
        except NotImplementedError as reason:
            skipped[name] = str(reason)
    return measures, skipped


class _Meter:
    """Counts forward passes of chunks, and tells."""

    def __init__(self, passes: int, chunks: int, progress: Progress | None) -> None:
        self.passes, self.chunks, self.progress = passes, chunks, progress
        self.name, self.done = "", 0

    def tick(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.name, self.done, self.passes * self.chunks)
