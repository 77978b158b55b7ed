"""From a sweep to its runs: `expand` makes the RunConfigs, `plan` a table of what they cost before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec
import pandas as pd

from scalinglab import tomlfile
from scalinglab.config import Budget, Choice, Matching, RunConfig, Scaling, ShapeSpec, Sweep
from scalinglab.matching import PLAIN, charge, match_shapes

_COUNTS = (
    "params_embedding", "params_attention", "params_ffn", "params_readout", "params_other", "params_extra", "params_backbone",
    "params_total",
)  # fmt: skip


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


@dataclass(frozen=True)
class _Sized:
    """A shape of the shapes axis, with the group and the mismatch that its rule gives it."""

    spec: Any
    group: str
    mismatch: float


def expand(sweep: Sweep) -> Expansion:
    """All combinations of a sweep's axes as RunConfigs.

    The order is that of the axes as written, nested as match group, budget, corpus, architecture, parametrization, shape,
    learning rate, seed; it does not depend on the order of keys in the file. A run that comes up twice is kept where it
    comes up first.

    Raises
    ------
    ConfigError
        A combination is no valid run, or no shape meets a matching rule.
    """
    template = {**sweep.run, "sweep": sweep.name}
    architecture = Choice(name=template.get("architecture", PLAIN), options=template.get("options", {}))
    scaling = Scaling(name=template.get("parametrization", "sp"), perturb=template.get("perturb", {}))
    none: list[Any] = [None]  # an axis that leaves the value of the template
    axes = product(
        _groups(sweep),
        sweep.budgets or none,
        [_choice(c) for c in sweep.corpora] or none,
        [_choice(a) for a in sweep.architectures] or [architecture],
        [Scaling(name=p) if isinstance(p, str) else p for p in sweep.parametrizations] or [scaling],
    )
    runs: dict[str, RunConfig] = {}
    mismatch: list[float] = []
    removed: list[str] = []
    for group, budget, corpus, arch, param in axes:
        fixed = {
            **template, "architecture": arch.name, "options": arch.options, "parametrization": param.name,
            "perturb": param.perturb,
        }  # fmt: skip
        if corpus is not None:
            fixed |= {"corpus": corpus.name, "corpus_options": corpus.options}
        for sized in _sized(sweep, group, arch):
            for lr, seed in product(sweep.lrs or none, sweep.seeds or none):
                point = {"shape": sized.spec, "match_group": sized.group, "lr": lr, "seed": seed}
                run = _run({**fixed, **{k: v for k, v in point.items() if v is not None}}, budget)
                if run.run_id in runs:
                    removed.append(run.run_id)
                else:
                    runs[run.run_id] = run
                    mismatch.append(sized.mismatch)
    return Expansion(tuple(runs.values()), tuple(mismatch), tuple(_notes(sweep, list(runs.values()), removed)))


def plan(sweep: Sweep) -> pd.DataFrame:
    """What a sweep would train: one row per run.

    Returns
    -------
    DataFrame
        Columns of a run table (run_id, sweep, match_group, architecture, parametrization, seed, sizes, counts by component,
        tokens, batch_tokens, lr, and flops_6n, flops_causal, flops_full of the whole training), and params_extra (what the
        architecture adds), mismatch (see `Expansion`), alpha (the depth rule), corpus, steps. attrs["notes"] lists what was
        removed and what to know.

    Raises
    ------
    ConfigError
        As `expand`.
    """
    expansion = expand(sweep)
    rows = [row(run, miss) for run, miss in zip(expansion.runs, expansion.mismatch, strict=True)]
    table = pd.DataFrame(rows)
    table.attrs["notes"] = list(expansion.notes)
    return table


def row(run: RunConfig, mismatch: float = math.nan) -> dict[str, Any]:
    """The line of the plan for one run: labels, sizes, counts by component, tokens and FLOPs of the whole training."""
    shape = run.shape.build()
    costs = {
        convention: charge(shape, architecture=run.architecture, options=run.options, convention=convention)
        for convention in ("6n", "causal", "full")
    }
    tokens = float(run.steps * run.batch_tokens)
    counts, scaling = costs["causal"].params, run.scaling()
    named = "; ".join([run.parametrization, *scaling.changes])  # "native" is one arm, whatever the architecture
    return {
        "run_id": run.run_id, "sweep": run.sweep, "match_group": run.match_group, "architecture": run.architecture,
        "parametrization": named, "alpha": scaling.alpha, "seed": run.seed, "lr": run.lr,
        "corpus": run.corpus, "depth": shape.depth, "width": shape.width, "heads": shape.heads, "kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "ffn_dim": shape.ffn_dim, "aspect": shape.aspect, "vocab": shape.vocab,
        "context": shape.context, **{name: counts[name] for name in _COUNTS}, "mismatch": mismatch, "tokens": tokens,
        "batch_tokens": run.batch_tokens, "steps": run.steps,
        **{f"flops_{convention}": cost.flops * tokens for convention, cost in costs.items()},
    }  # fmt: skip


def _groups(sweep: Sweep) -> list[Matching | None]:
    """Matching rules, then None for the shapes given one by one."""
    rules: list[Matching | None] = [sweep.match] if isinstance(sweep.match, Matching) else [*sweep.match]
    return rules if rules and not sweep.shapes else [*rules, None]


def _sized(sweep: Sweep, rule: Matching | None, arch: Choice) -> Iterator[_Sized]:
    if rule is None:
        for spec in sweep.shapes or [sweep.run["shape"]]:
            yield _Sized(spec, "", math.nan)
        return
    arguments: dict[str, Any] = {k: v for k, v in msgspec.structs.asdict(rule).items() if k != "charge"}
    charged: dict[str, Any] = {"architecture": arch.name, "options": arch.options}
    for match in match_shapes(**arguments, **(charged if rule.charge else {})):
        miss = match.mismatch
        if not rule.charge:
            cost = charge(match.shape, **charged, convention=rule.convention)
            miss = math.log((cost.flops if rule.by == "flops" else cost.params[rule.by]) / rule.budget)
        yield _Sized(ShapeSpec.of(match.shape), rule.label, miss)


def _run(data: dict[str, Any], budget: Budget | None) -> RunConfig:
    data = dict(tomlfile.plain(data))
    if budget is None:
        return tomlfile.convert(data, RunConfig, within="run")
    run = tomlfile.convert({**data, "tokens": 1}, RunConfig, within="run")
    cost = charge(run.shape.build(), architecture=run.architecture, options=run.options, convention=budget.convention)
    return msgspec.structs.replace(run, tokens=budget.resolve(cost, run.batch_tokens))


def _choice(value: str | Choice) -> Choice:
    return Choice(name=value) if isinstance(value, str) else value


def _notes(sweep: Sweep, runs: list[RunConfig], removed: list[str]) -> list[str]:
    notes = []
    if removed:
        shown = ", ".join(dict.fromkeys(removed[:3])) + (", ..." if len(removed) > 3 else "")
        notes.append(f"{len(removed)} duplicate run{'s' if len(removed) > 1 else ''} removed: {shown}")
    if len(sweep.lrs) > 1 and any(r.optimizer.decay == "coupled" and r.optimizer.weight_decay for r in runs):
        notes.append("weight decay is coupled: the sweep over lr also sweeps the regularisation")
    if any(r.optimizer.eps > 1e-12 for r in runs) and any(r.parametrization not in ("sp", "sp_gpt2") for r in runs):
        notes.append("optimizer.eps is above 1e-12: the scaling of epsilon, on which sources disagree, is not inert")
    if any(r.positions == "learned" for r in runs):
        notes.append("learned positions add context * width parameters to the embedding; the counts leave them out")
    return notes
