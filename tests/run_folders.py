"""Run directories as the trainer leaves them, without training: for tests of everything that reads or skips them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scalinglab.config import RunConfig, ShapeSpec


def config(**fields: Any) -> RunConfig:
    """A tiny run on the automaton; `depth` and `width` set the shape."""
    depth, width = fields.pop("depth", 1), fields.pop("width", 8)
    shape = ShapeSpec(depth=depth, width=width, heads=1, ffn_dim=2 * width, vocab=8, context=32)
    given: dict[str, Any] = {"lr": 0.01, "tokens": 512, "corpus": "automaton", "batch": 2, **fields}
    given.setdefault("corpus_options", {"width": 4})
    return RunConfig(shape=shape, **given)


def lines(run: RunConfig, loss: float, steps: Sequence[int] = (0, 4, 8)) -> str:
    """A log: training and evaluation lines at these steps, falling to `loss`."""
    out = []
    for step in steps:
        here = loss + 2.0 * (1 - step / steps[-1])
        tokens = step * run.batch_tokens
        if step:
            out.append({"kind": "train", "step": step, "tokens": tokens, "loss": here, "lr": run.lr, "grad_norm": 1.0})
        out.append({"kind": "eval", "step": step, "tokens": tokens, "loss": here, "loss_se": 0.01})
    return "".join(f"{json.dumps(line)}\n" for line in out)


def write_run(out: Path, run: RunConfig, loss: float = 1.0, *, status: str = "finished", summary: bool = True) -> Path:
    """config.toml, log.jsonl and summary.json of one run; unfinished without the last."""
    folder = out / run.run_id
    folder.mkdir(parents=True)
    run.save(folder / "config.toml")
    last = run.steps
    (folder / "log.jsonl").write_text(lines(run, loss, (0, last // 2, last)))
    if summary:
        record = {
            "schema": "scalinglab/summary-1", "run_id": run.run_id, "status": status, "step": last,
            "tokens": last * run.batch_tokens, "loss": loss, "loss_se": 0.01, "excess": loss - 0.1, "floor": 0.1,
            "loss_initial": loss + 2, "last_finite_loss": loss, "seconds": 1.5, "tokens_per_second": 1e4, "stack_size": 2,
            "device": "cpu", "backend": "torch", "torch": "2.13.0", "machine": "x", "weights_sha256": "ab" * 32,
            "by_difficulty": {"1": {"loss": loss / 2, "accuracy": 0.9}},
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(record))
    return folder


def write_grid(out: Path, loss: Callable[[float, float], float]) -> list[RunConfig]:
    """Finished runs over five widths and four budgets; `loss` is a law of params_backbone and tokens."""
    from scalinglab.planning import row

    runs = [
        config(width=width, tokens=64 * steps, seed=seed)
        for width in (8, 16, 32, 64, 128)
        for steps in (8, 32, 128, 512)
        for seed in (0, 1)
    ]
    for run in runs:
        planned = row(run)
        write_run(out, run, loss(planned["params_backbone"], planned["tokens"]) * (1.001 if run.seed else 0.999))
    return runs
