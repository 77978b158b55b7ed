"""From a sweep to its runs: `expand` makes the RunConfigs, `plan` a table of what they cost before anything is trained."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Any, get_args

import msgspec
import pandas as pd

from scalinglab import tomlfile
from scalinglab.axes import placed
from scalinglab.config import (
    ANY_TOKENS,
    Budget,
    Choice,
    Matching,
    RunConfig,
    Scaling,
    ShapeSpec,
    Sweep,
    canonical,
    run_name,
)
from scalinglab.errors import ConfigError
from scalinglab.matching import PLAIN, Match, Positions, charge, match_shapes
from scalinglab.shapes import FlopConvention

_COUNTS = (
    "params_embedding", "params_attention", "params_ffn", "params_readout", "params_other", "params_extra", "params_backbone",
    "params_total",
)  # fmt: skip
_TOLD = {  # what has a column of its own in `row`; the rest that isn't a default is named in `settings`
    "": ("shape", "lr", "tokens", "batch", "seed", "architecture", "options", "corpus", "corpus_options", "parametrization",
         "perturb", "positions", "init_std", "precision", "schedule"),
    "optimizer": ("weight_decay", "decay"),
}  # fmt: skip


@dataclass(frozen=True)
class Expansion:
    """The runs of a sweep in a fixed order.

    Attributes
    ----------
    runs : tuple of RunConfig
        Each once, labelled with its sweep and match group.
    mismatch : tuple of float
        Per run, ln(count / budget) of its matching rule; NaN for shapes given one by one.
    notes : tuple of str
        What was removed, and what a reader of the results must know.
    """

    runs: tuple[RunConfig, ...]
    mismatch: tuple[float, ...]
    notes: tuple[str, ...]


def expand(sweep: Sweep) -> Expansion:
    """All combinations of a sweep's axes as RunConfigs.

    The order is that of the values as written, nested as match group, budget, corpus, architecture, parametrization, further
    axes (by path in alphabetical order), shape, learning rate, seed; it does not depend on the order of keys in the file. A
    run that comes up twice is kept where it comes up first.

    Raises
    ------
    ConfigError
        A combination is no valid run, or no shape meets a matching rule.
    """
    template = {**sweep.run, "sweep": sweep.name}
    architecture = Choice(name=template.get("architecture", PLAIN), options=template.get("options", {}))
    scaling = Scaling(name=template.get("parametrization", "sp"), perturb=template.get("perturb", {}))
    none: list[Any] = [None]  # an axis that leaves the value of the template
    further = sweep.further_axes()
    axes = product(
        _groups(sweep),
        sweep.budgets or none,
        [_choice(c) for c in sweep.corpora] or none,
        [_choice(a) for a in sweep.architectures] or [architecture],
        [Scaling(name=p) if isinstance(p, str) else p for p in sweep.parametrizations] or [scaling],
        [dict(zip(further, values, strict=True)) for values in product(*further.values())],
    )
    runs: dict[str, RunConfig] = {}
    mismatch: list[float] = []
    notes, arms = _Notes(), Arms()
    for (label, rule), budget, corpus, arch, param, settings in axes:
        fixed = {
            **template, "architecture": arch.name, "options": arch.options, "parametrization": param.name,
            "perturb": param.perturb,
        }  # fmt: skip
        if corpus is not None:
            fixed |= {"corpus": corpus.name, "corpus_options": corpus.options}
        fixed = placed(fixed, settings)
        if rule is not None and budget is not None and len(sweep.budgets) > 1:
            label = f"{label} {budget.label}"  # runs of another length are no match
        for spec, miss in _sized(sweep, rule, arch, fixed.get("positions", "rope")):
            lrs = [_tuned(sweep, fixed, spec)] if sweep.tuned else sweep.lrs or none
            cell = {**fixed, "shape": spec, "match_group": label}
            for run in _runs(cell, lrs, sweep.seeds or none, budget, notes):
                if (name := arms.name(run)) in runs:
                    notes.removed.append(name)
                else:
                    runs[name] = run
                    mismatch.append(miss)
    return Expansion(tuple(runs.values()), tuple(mismatch), tuple(_notes(sweep, runs, notes)))


def plan(sweep: Sweep | Expansion) -> pd.DataFrame:
    """What a sweep would train: one row per run.

    Parameters
    ----------
    sweep : Sweep or Expansion
        An `Expansion` that is there already isn't made again.

    Returns
    -------
    DataFrame
        Columns of a run table (run_id, sweep, match_group, architecture, parametrization, seed, sizes, counts by component,
        tokens, batch_tokens, lr, and flops_6n, flops_causal, flops_full of the whole training), and params_extra (what the
        architecture adds), mismatch (see `Expansion`), alpha (the depth rule), corpus, steps, and what else tells arms apart:
        options and corpus_options (JSON of what differs from the defaults, empty if nothing does), weight_decay, decay,
        positions, tied (0 or 1), ffn, schedule, init_std, precision, settings (JSON of every other field that isn't at its
        default). Runs that agree in all but run_id and seed are replicates. attrs["notes"] lists what was removed and what
        to know.

    Raises
    ------
    ConfigError
        As `expand`.
    """
    expansion = sweep if isinstance(sweep, Expansion) else expand(sweep)
    arms = Arms()
    table = _table(row(run, miss, arms=arms) for run, miss in zip(expansion.runs, expansion.mismatch, strict=True))
    table.attrs["notes"] = list(expansion.notes)
    return table


def row(run: RunConfig, mismatch: float = math.nan, *, arms: Arms | None = None) -> dict[str, Any]:
    """The line of the plan for one run: labels, sizes, counts by component, tokens and FLOPs of the whole training.

    `arms` keeps what runs share: one `Arms()`, given with every run of a table, makes a long table cheap.
    """
    known = Arms() if arms is None else arms
    return {
        **known.of(run).line, "run_id": known.name(run), "sweep": run.sweep, "match_group": run.match_group,
        "seed": run.seed, "lr": run.lr, "mismatch": mismatch,
    }  # fmt: skip


@dataclass(frozen=True)
class _Arm:
    """What runs share that differ in learning rate, seed and labels alone: their canonical config, their line of a plan."""

    config: dict[str, Any]
    line: dict[str, Any]


class Arms:
    """The arms seen so far, each worked out once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], _Arm] = {}

    def of(self, run: RunConfig) -> _Arm:
        """The arm of a run."""
        key = (*_VALUES(run), *map(repr, _TABLES(run)))  # a dict has no hash
        arm = self._seen.get(key)
        if arm is None:
            config = canonical(run)
            arm = self._seen[key] = _Arm(config, _line(run, config))
        return arm

    def name(self, run: RunConfig) -> str:
        """The id of a run: `run.run_id`, without working out again what its arm shares."""
        if type(run.lr) is not float or type(run.seed) is not int:
            return run.run_id
        config = {**self.of(run).config, "lr": run.lr, "seed": run.seed}
        if not run.seed:  # the default
            del config["seed"]
        return run_name(run, config)


_OWN = ("lr", "seed", "sweep", "match_group")
_TABLES = attrgetter("options", "corpus_options", "perturb")
_VALUES = attrgetter(
    *(f for f in RunConfig.__struct_fields__ if f not in (*_OWN, "options", "corpus_options", "perturb"))
)


def _line(run: RunConfig, known: dict[str, Any]) -> dict[str, Any]:
    """The line of a run; what the runs of an arm don't share has its place here and its value from `row`."""
    shape = run.shape.build()
    costs = {convention: _cost(run, convention) for convention in get_args(FlopConvention)}
    tokens = float(run.steps * run.batch_tokens)
    counts, scaling = costs["causal"].params, run.scaling()
    named = "; ".join([run.parametrization, *scaling.changes])  # "native" is one arm, whatever the architecture
    return {
        "run_id": "", "sweep": "", "match_group": "", "architecture": run.architecture,
        "parametrization": named, "alpha": scaling.alpha, "seed": 0, "lr": math.nan,
        "corpus": run.corpus, "depth": shape.depth, "width": shape.width, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "ffn_dim": shape.ffn_dim, "aspect": shape.aspect, "vocab": shape.vocab,
        "context": shape.context, **{name: counts[name] for name in _COUNTS}, "mismatch": math.nan, "tokens": tokens,
        "batch_tokens": run.batch_tokens, "steps": run.steps,
        "options": _text(known.get("options")), "corpus_options": _text(known.get("corpus_options")),
        "weight_decay": float(run.optimizer.weight_decay), "decay": run.optimizer.decay, "positions": run.positions,
        "tied": int(shape.tied), "ffn": shape.ffn, "schedule": _schedule(known.get("schedule", {})),
        "init_std": float(run.init_std), "precision": run.precision, "settings": _text(_untold(known)),
        **{f"flops_{convention}": cost.flops * tokens for convention, cost in costs.items()},
    }  # fmt: skip


@dataclass
class _Notes:
    """What expanding found: runs removed, and runs shorter than a step."""

    removed: list[str] = field(default_factory=list)
    short: dict[str, float] = field(default_factory=dict)  # run -> tokens asked for


def _text(value: Any) -> str:
    """Canonical JSON; empty for nothing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")) if value else ""


def _schedule(changed: dict[str, Any]) -> str:
    """Kind of the schedule and what isn't at its default, e.g. "wsd decay=0.1"."""
    return " ".join([changed.get("kind", "cosine"), *(f"{k}={v}" for k, v in sorted(changed.items()) if k != "kind")])


def _untold(known: dict[str, Any]) -> dict[str, Any]:
    """The part of a canonical config that no other column shows."""
    rest = {k: v for k, v in known.items() if k not in _TOLD[""]}
    optimizer = {k: v for k, v in rest.pop("optimizer", {}).items() if k not in _TOLD["optimizer"]}
    return {**rest, **({"optimizer": optimizer} if optimizer else {})}


def _table(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """A table of rows with the same keys; tuples take a fifth of the memory of dicts."""
    names: tuple[str, ...] = ()
    lines = []
    for line in rows:
        names = names or tuple(line)
        lines.append(tuple(line.values()))
    return pd.DataFrame(dict(zip(names, zip(*lines, strict=True), strict=True)))


def _cost(run: RunConfig, convention: FlopConvention) -> Match:
    return charge(
        run.shape.build(), architecture=run.architecture, options=run.options, convention=convention,
        positions=run.positions,
    )  # fmt: skip


def _groups(sweep: Sweep) -> list[tuple[str, Matching | None]]:
    """Labels and matching rules, then None for the shapes given one by one."""
    rules: list[Matching] = [sweep.match] if isinstance(sweep.match, Matching) else [*sweep.match]
    groups: list[tuple[str, Matching | None]] = [*zip(sweep.match_labels(), rules, strict=True)]
    return groups if groups and not sweep.shapes else [*groups, ("", None)]


def _sized(sweep: Sweep, rule: Matching | None, arch: Choice, positions: Positions) -> Iterator[tuple[Any, float]]:
    """Shapes of a rule, or those given one by one, with the mismatch that the rule gives them."""
    if rule is None:
        for spec in sweep.shapes or [sweep.run["shape"]]:
            yield spec, math.nan
        return
    arguments: dict[str, Any] = {k: v for k, v in msgspec.structs.asdict(rule).items() if k != "charge"}
    charged: dict[str, Any] = {"architecture": arch.name, "options": arch.options}
    for match in match_shapes(**arguments, **(charged if rule.charge else {}), positions=positions):
        miss = match.mismatch
        if not rule.charge:
            cost = charge(match.shape, **charged, convention=rule.convention, positions=positions)
            miss = math.log((cost.flops if rule.by == "flops" else cost.params[rule.by]) / rule.budget)
        yield ShapeSpec.of(match.shape), miss


def _tuned(sweep: Sweep, fixed: dict[str, Any], spec: Any) -> float:
    """Learning rate of an arm at a shape; the last entry that fits counts."""
    shape = tomlfile.convert(tomlfile.plain(spec), ShapeSpec)
    arm = {
        "architecture": fixed["architecture"], "parametrization": fixed["parametrization"], "depth": shape.depth,
        "width": shape.width, "corpus": fixed.get("corpus", ""),
    }  # fmt: skip
    found = [entry.lr for entry in sweep.tuned if entry.fits(**arm)]
    if not found:
        told = ", ".join(f"{k} {v}" for k, v in arm.items() if v)
        raise ConfigError(
            f"sweep {sweep.name!r}: tuned has no learning rate for {told}; add it or run `scalinglab tune`"
        )
    return found[-1]


def _runs(
    cell: dict[str, Any], lrs: Sequence[float | None], seeds: Sequence[int | None], budget: Budget | None, notes: _Notes
) -> Iterator[RunConfig]:
    """The runs of a cell, over learning rates and then seeds. They differ in these alone: the first is the model of the others."""
    first: RunConfig | None = None
    asked = math.nan
    for lr, seed in product(lrs, seeds):
        point = {k: v for k, v in {"lr": lr, "seed": seed}.items() if v is not None}
        run = None
        if first is not None:
            with suppress(ConfigError):  # `_run` says where
                run = msgspec.structs.replace(first, **point)
        if run is None:
            run, asked = _run({**cell, **point}, budget)
            first = run
        if asked < run.batch_tokens:
            notes.short[run.run_id] = asked
        yield run


def _run(data: dict[str, Any], budget: Budget | None) -> tuple[RunConfig, float]:
    """A run, and the tokens that were asked for, before rounding."""
    data = dict(tomlfile.plain(data))
    if budget is None:
        run = tomlfile.convert(data, RunConfig, within="run")
        return run, float(run.tokens)
    run = tomlfile.convert({**data, "tokens": ANY_TOKENS}, RunConfig, within="run")
    cost = _cost(run, budget.convention)
    tokens = budget.resolve(cost, run.batch_tokens)
    return msgspec.structs.replace(run, tokens=tokens), budget.exact(cost)


def _choice(value: str | Choice) -> Choice:
    return Choice(name=value) if isinstance(value, str) else value


def _notes(sweep: Sweep, runs: dict[str, RunConfig], found: _Notes) -> list[str]:
    notes = []
    if removed := found.removed:
        shown = ", ".join(dict.fromkeys(removed[:3])) + (", ..." if len(removed) > 3 else "")
        notes.append(f"{len(removed)} duplicate run{'s' if len(removed) > 1 else ''} removed: {shown}")
    if len(sweep.lrs) > 1 and any(r.optimizer.decay == "coupled" and r.optimizer.weight_decay for r in runs.values()):
        notes.append("weight decay is coupled: the sweep over lr also sweeps the regularisation")
    scaled = any(r.parametrization not in ("sp", "sp_gpt2") for r in runs.values())
    if scaled and any(r.optimizer.eps > 1e-12 for r in runs.values()):
        notes.append("optimizer.eps is above 1e-12: the scaling of epsilon, on which sources disagree, is not inert")
    if found.short:
        name, asked = next(iter(found.short.items()))
        notes.append(
            f"{len(found.short)} run{'s' if len(found.short) > 1 else ''} would be shorter than one step and get one: {name} "
            f"asks for {asked:.3g} tokens, a step has {runs[name].batch_tokens}"
        )
    return notes
