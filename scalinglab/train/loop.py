"""Train one stack of runs to the end, or on from where it was stopped.

    out/<run_id>/    config.toml · log.jsonl (appended) · weights.pt · summary.json (last: the run is finished)
    out/.stacks/     checkpoints of stacks that are not finished
    out/.trunks/     states before the decay of "wsd" schedules, from which longer runs go on

A checkpoint and the config determine everything that follows, so a run that was killed at any moment ends in the same bytes as
an undisturbed one on the same machine.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from scalinglab.config import RunConfig
from scalinglab.errors import ConfigError, ScalinglabWarning
from scalinglab.tables import write_atomically
from scalinglab.train import checkpoints
from scalinglab.train.backends import Backend, choose_kernels, open_device
from scalinglab.train.corpora import Corpus, Evaluation, open_corpus, training_stream
from scalinglab.train.evaluating import Score, evaluate
from scalinglab.train.jobs import stack_id, trunk_of
from scalinglab.train.runlog import RunLog, is_logged
from scalinglab.train.schedule import branch_step, share
from scalinglab.train.stack import BUFFERS, Stack
from scalinglab.train.team import Team, join

if TYPE_CHECKING:
    from scalinglab.train.sharded import Sharded

SCHEMA = "scalinglab/summary-1"
Summary: TypeAlias = dict[str, Any]
_STATE = {
    *BUFFERS,
    "alive",
    "step",
    "since",
    "counted",
    "last_finite",
    "initial",
    "seconds",
    "logs",
    "run_ids",
    "corpus",
}
_WORSE = 1.1  # a training loss this far above the untrained model's is a divergence, not the noise of a batch


@dataclass(frozen=True)
class Progress:
    """Where a stack is: steps done of steps, tokens of all runs per second, training loss of each run."""

    step: int
    steps: int
    tokens_per_second: float
    losses: tuple[float, ...]


class Stopped(KeyboardInterrupt):
    """Training was asked to stop, and everything is saved."""


def train(
    configs: Sequence[RunConfig],
    out: Path,
    *,
    device: str = "cpu",
    backend: Backend = "auto",
    checkpoint_seconds: float = 60.0,
    fsdp: bool = False,
    report: Callable[[Progress], None] | None = None,
) -> list[Summary]:
    """Train runs that can be stacked, and leave a folder for each.

    Parameters
    ----------
    configs : sequence of RunConfig
        They may differ in seed, lr, weight decay, clipping and labels. If all are finished nothing is trained.
    out : Path
        Folder of the run folders.
    device : str
        As torch names it: "cpu", "cuda", "cuda:1", "mps".
    backend : {"auto", "torch", "native"}
        "native" are the fused C++ kernels for float32 on a CPU; "auto" takes them where they can run.
    checkpoint_seconds : float
        Least time between checkpoints, seconds. When they are made doesn't change the result.
    fsdp : bool
        Share out one run's weights and moments over the processes of torchrun, not its batches alone; see
        `scalinglab.train.sharded`. Its checkpoints are those of any other way to train the run.
    report : callable, optional
        Called with a `Progress` now and then.

    Returns
    -------
    list of dict
        The summaries, in the order of `configs`.

    Raises
    ------
    ConfigError
        A run can't be made: corpus and shape don't fit, no such device, backend "native" where it can't run, fsdp of
        several runs or in one process.
    Stopped
        After SIGINT or SIGTERM, once the state is saved.
    """
    found = [read_summary(out / config.run_id) for config in configs]
    if all(summary is not None for summary in found):
        return [summary for summary in found if summary is not None]
    team = join(configs[0].batch)
    run = _Run(tuple(configs), Path(out), open_device(device), team, fsdp)
    run.prepare(backend)
    with _stop_signal() as stopped:
        summaries = run.go(stopped, checkpoint_seconds, report)
    return summaries


def trunk_id(configs: Sequence[RunConfig]) -> str | None:
    """Name of the trunk of a stack; None where it has none."""
    trunk = trunk_of(configs)
    return None if trunk is None else stack_id(trunk)


def read_summary(folder: Path) -> Summary | None:
    """The summary of a run folder; None if the run is not finished."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        summary: Summary = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        raise ConfigError(f"{path} is not JSON; delete it to train the run again") from None
    return summary


@dataclass
class _Run:
    """A stack on its way."""

    configs: tuple[RunConfig, ...]
    out: Path
    device: torch.device
    team: Team
    fsdp: bool = False
    backend: str = "torch"
    since: list[float] = field(default_factory=list)  # sums of training losses since the last line
    counted: int = 0
    last_finite: list[float | None] = field(default_factory=list)
    initial: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def prepare(self, backend: Backend) -> None:
        first = self.configs[0]
        self.corpus: Corpus = open_corpus(first.corpus, first.corpus_options, context=first.shape.context)
        if self.corpus.vocab > first.shape.vocab:
            raise ConfigError(
                f"corpus {first.corpus!r} has {self.corpus.vocab} symbols, more than shape.vocab={first.shape.vocab}"
            )
        self.fixed: Evaluation = self.corpus.evaluation(first.evaluation.sequences, first.shape.context)  # type: ignore[attr-defined]
        # Combinations that training never shows, where the corpus keeps some apart.
        self.unseen: Evaluation | None = None
        if getattr(self.corpus, "held_out", ()):
            self.unseen = self.corpus.evaluation(first.evaluation.sequences, first.shape.context, split="held_out")  # type: ignore[attr-defined]
        self.stack: Stack | Sharded
        if self.fsdp:
            from scalinglab.train.sharded import Sharded

            if backend == "native":
                raise ConfigError(
                    "backend='native' can't train a run that fsdp shares out: choose backend torch or auto"
                )
            self.stack = Sharded(self.configs, self.team, device=self.device)
        else:
            self.stack = Stack(self.configs, device=self.device)
            self.backend = choose_kernels(self.stack, first, backend)
        self.logs: list[RunLog] = []
        if self.team.leads:
            for config in self.configs:
                folder = self.out / config.run_id
                folder.mkdir(parents=True, exist_ok=True)
                _keep_config(config, folder / "config.toml")
                self.logs.append(RunLog(folder / "log.jsonl"))
        self.since = [0.0] * len(self.configs)
        self.last_finite = [None] * len(self.configs)

    def go(
        self, stopped: Callable[[], bool], checkpoint_seconds: float, report: Callable[[Progress], None] | None
    ) -> list[Summary]:
        config, stack, steps = self.configs[0], self.stack, self.configs[0].steps
        if not self._resume():
            self.initial = [score.fields()["loss"] for score in self._evaluate(0)]
        batches = self._batches(stack.step)
        began = saved = time.monotonic()
        before = self.seconds
        while stack.step < steps and bool(stack.alive.any()):
            if stack.step == self._branch():
                self._save_trunk()
            norms_k = self._step(*next(batches))
            step = stack.step
            if is_logged(step) or step == steps:
                losses = self._log(step, norms_k)
                if report is not None:
                    elapsed = time.monotonic() - began
                    rate = len(self.configs) * config.batch_tokens * step / max(before + elapsed, 1e-9)
                    report(Progress(step, steps, rate, losses))
            if config.evaluation.every and step % config.evaluation.every == 0 and step < steps:
                self._evaluate(step)
            now = time.monotonic()
            self.seconds = before + now - began
            stop, due = self.team.any(stopped(), now - saved >= checkpoint_seconds)  # clocks differ
            if stop or (due and step < steps):
                self._checkpoint()
                saved = now
            if stop:
                raise Stopped(f"stopped at step {step} of {steps}; the same call goes on from there")
        return self._finish()

    def _step(self, tokens_kbt: Tensor, targets_kbt: Tensor) -> Tensor:
        stack = self.stack
        with self._autocast():
            losses_k = stack.model.nats(tokens_kbt, targets_kbt).mean((1, 2))
        stack.backward(losses_k)
        losses_k = losses_k.detach()
        stack.average(self.team)
        self.team.average(losses_k)
        norms_k = stack.update(losses_k, share(stack.step, self.configs[0]))
        self.counted += 1
        for k, (loss, alive) in enumerate(zip(losses_k.tolist(), stack.alive.tolist(), strict=True)):
            if alive:
                self.since[k] += loss
                self.last_finite[k] = loss
        return norms_k

    def _log(self, step: int, norms_k: Tensor) -> tuple[float, ...]:
        means = tuple(total / self.counted for total in self.since)
        scale, tokens = share(step - 1, self.configs[0]), step * self.configs[0].batch_tokens
        parts = zip(self.logs, self.configs, means, norms_k.tolist(), self.stack.alive.tolist(), strict=False)
        for log, config, mean, norm, alive in parts:
            if alive:
                log.write(kind="train", step=step, tokens=tokens, loss=mean, lr=config.lr * scale, grad_norm=norm)
        self.since, self.counted = [0.0] * len(self.configs), 0
        return means

    def _scores(self, evaluation: Evaluation) -> list[Score]:
        replicas, model = len(self.configs), self.stack.model
        return evaluate(model, evaluation, replicas=replicas, device=self.device, autocast=self._autocast)

    def _evaluate(self, step: int) -> list[Score]:
        scores = self._scores(self.fixed)
        tokens = step * self.configs[0].batch_tokens
        for log, score, alive in zip(self.logs, scores, self.stack.alive.tolist(), strict=False):
            if alive:
                log.write(kind="eval", step=step, tokens=tokens, **_finite(score.fields()))
        return scores

    def _batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and targets [K, b, t] of this process; runs of one seed read the same data."""
        batch, context = self.configs[0].batch, self.configs[0].shape.context
        streams = {
            seed: self.corpus.batches(training_stream(seed), batch, context, start=step * batch)
            for seed in dict.fromkeys(config.seed for config in self.configs)
        }
        mine = self.team.slice(batch)
        while True:
            drawn = {seed: next(stream) for seed, stream in streams.items()}
            pairs = [drawn[config.seed] for config in self.configs]
            tokens, targets = (torch.from_numpy(np.stack([pair[i][mine] for pair in pairs])) for i in (0, 1))
            yield tokens.to(self.device), targets.to(self.device)

    # ------------------------------------------------------------------------------------------------ saving, resuming

    @property
    def _folder(self) -> Path:
        return self.out / ".stacks" / stack_id(self.configs)

    def _branch(self) -> int | None:
        return branch_step(self.configs[0]) if trunk_id(self.configs) else None

    def _trunk(self, step: int) -> Path:
        trunk = f"{trunk_id(self.configs)}-{self.corpus.fingerprint[:8]}"  # other data, another trunk
        return self.out / ".trunks" / trunk / f"step-{step}.pt"

    def _state(self) -> dict[str, Any]:
        return {
            **self.stack.state(),
            "since": self.since,
            "counted": self.counted,
            "last_finite": self.last_finite,
            "initial": self.initial,
            "seconds": self.seconds,
            "logs": [log.lines for log in self.logs],
            "run_ids": [config.run_id for config in self.configs],
            "corpus": self.corpus.fingerprint,
        }

    def _checkpoint(self) -> None:
        state = self._state()  # in all processes: each may hold a part
        if self.team.leads:
            for log in self.logs:
                log.sync()  # a checkpoint must not remember lines that a crash could lose
            checkpoints.save(self._folder, state)
        self.team.wait()

    def _save_trunk(self) -> None:
        (missing,) = self.team.any(not self._trunk(self.stack.step).exists())
        if not missing:
            return
        state = self._state()
        if self.team.leads:
            write_atomically(self._trunk(self.stack.step), checkpoints.seal(checkpoints.encode(state)))
        self.team.wait()

    def _resume(self) -> bool:
        """Go on from the checkpoint, or else from the longest trunk; False at the beginning of everything."""
        state = self._read(lambda: checkpoints.load(self._folder, fits=self._fits))
        if state is not None and state["corpus"] != self.corpus.fingerprint:
            raise ConfigError(
                f"the data of run {self.configs[0].run_id} changed since it began: corpus {self.configs[0].corpus!r} has another "
                f"fingerprint; put the old data back, or delete {self._folder} and the run's log to start over"
            )
        if state is None:
            state = self._read(self._longest_trunk)
        if state is None:
            return False
        for log, lines in zip(self.logs, state["logs"], strict=False):
            log.restore(lines)
        self._load(state)
        return True

    def _read(self, find: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """A state from disk; of a sharded run the first process alone reads it, and the others get all but the large tensors."""
        if not self.fsdp:
            return find()
        state = find() if self.team.leads else None
        told = self.team.tell(state and {name: value for name, value in state.items() if name not in BUFFERS})
        return told if state is None else state

    def _longest_trunk(self) -> dict[str, Any] | None:
        branch = self._branch()
        if branch is None:
            return None
        known = sorted(self._trunk(0).parent.glob("step-*.pt"), key=_trunk_step, reverse=True)
        for path in known:
            if _trunk_step(path) > branch:
                continue
            state = checkpoints.read(path)
            if state is not None and set(state) >= _STATE:
                return state
            warnings.warn(f"{path} is damaged; using a shorter trunk or none", ScalinglabWarning, stacklevel=2)
            path.unlink(missing_ok=True)
        return None

    def _fits(self, state: dict[str, Any]) -> bool:
        return set(state) >= _STATE and state["run_ids"] == [config.run_id for config in self.configs]

    def _load(self, state: dict[str, Any]) -> None:
        self.stack.load_state(state)
        for name in ("since", "counted", "last_finite", "initial", "seconds"):
            setattr(self, name, state[name])

    def _finish(self) -> list[Summary]:
        self._checkpoint()  # so that a crash between two summaries ends in the same bytes
        scores = self._evaluate(self.stack.step)
        unseen = [None] * len(self.configs) if self.unseen is None else self._scores(self.unseen)
        summaries: list[Summary] = []
        for k, (config, score) in enumerate(zip(self.configs, scores, strict=True)):
            weights = self.stack.weights(k)  # in all processes: each may hold a part
            if not self.team.leads:
                summaries.append({})
                continue
            folder = self.out / config.run_id
            self.logs[k].sync()
            summary = read_summary(folder)
            if summary is None:  # a crash may have come between the summaries of a stack
                write_atomically(folder / "weights.pt", checkpoints.encode(weights))
                summary = self._summary(k, config, score, unseen[k]) | {"weights_sha256": checkpoints.digest(weights)}
                write_atomically(
                    folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"
                )
            summaries.append(summary)
        if self.team.leads:
            checkpoints.remove(self._folder)
        self.team.wait()
        return summaries

    def _summary(self, k: int, config: RunConfig, score: Score, unseen: Score | None) -> Summary:
        alive, fields = bool(self.stack.alive[k]), _finite(score.fields())
        trained = [line for line in map(msgspec.json.decode, self.logs[k].lines) if line["kind"] == "train"]
        # A run that trains to a worse loss than it began with has diverged as much as one that ends in infinity.
        worse = "loss" not in fields or bool(trained and trained[-1]["loss"] > _WORSE * self.initial[k])
        step = self.stack.step if alive else (trained[-1]["step"] if trained else 0)
        tokens = self.stack.step * config.batch_tokens
        summary: Summary = {
            "schema": SCHEMA,
            "run_id": config.run_id,
            "status": "diverged" if worse or not alive else "finished",
            "step": step,
            "tokens": step * config.batch_tokens,
            **fields,
            "loss_initial": self.initial[k],
            "last_finite_loss": self.last_finite[k],
            "floor": self.corpus.floor(config.shape.context),
            "by_difficulty": score.by_difficulty() if alive else None,
            "held_out_by_difficulty": unseen.by_difficulty() if alive and unseen is not None else None,
            "params": self.stack.size,
            "seconds": self.seconds / len(self.configs),
            "tokens_per_second": len(self.configs) * tokens / max(self.seconds, 1e-9),
            "stack_size": len(self.configs),
            "device": str(self.device),
            "backend": self.backend,
            "torch": str(torch.__version__),
            "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
            "corpus_fingerprint": self.corpus.fingerprint,
        }
        return {name: value for name, value in summary.items() if value is not None}

    def _autocast(self) -> Any:
        if self.configs[0].precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def _keep_config(config: RunConfig, path: Path) -> None:
    """Write the config unless it is there; what says another run is replaced."""
    if path.exists():
        try:
            if RunConfig.load(path).run_id == config.run_id:
                return
        except ConfigError:
            pass
        warnings.warn(f"{path} is not the config of its run; it is written anew", ScalinglabWarning, stacklevel=2)
    config.save(path)


def _trunk_step(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _finite(fields: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN: what isn't finite is left out."""
    return {name: value for name, value in fields.items() if np.isfinite(value)}


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Turns SIGINT and SIGTERM into a flag, so that no step is cut in half; a second signal ends at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def catch(number: int, frame: Any) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    old = {number: signal.signal(number, catch) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
