"""The trainer beside a plain loop: five shapes times three seeds at 50-100k parameters, start-up included, wall seconds.

    python benchmarks/training.py                 # all arms, one after the other, in rounds
    python benchmarks/training.py --rounds 3 --batches 4 --backends torch

Same model function, tokens, context and vocabulary in all arms. The plain loop runs as its users run it: one process, torch's
default threads, one run after the other. Ours: one single-threaded process per core, three seeds stacked.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

SHAPES = ((2, 48), (4, 32), (8, 24), (16, 16), (32, 16))  # depth, width: 50k to 100k parameters outside the embedding
LARGE = ((4, 144), (8, 96), (16, 64))  # 0.8M to 1M: never slower than the loop is the bar
CONTEXT, VOCAB = 128, 256
SEEDS = 3
STEPS = {4: 200, 32: 40}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--backends", nargs="+", default=["torch", "native"])
    parser.add_argument("--large", action="store_true", help="1M parameters, 20 steps, one seed")
    args = parser.parse_args()
    shapes = LARGE if args.large else SHAPES
    seeds = 1 if args.large else SEEDS
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.bin"
        text.write_bytes(_text())
        for batch in args.batches:
            steps = 20 if args.large else STEPS[batch]
            arms = {"plain loop": partial(_plain, text, shapes, seeds, batch, steps)}
            for backend in args.backends:
                arms[backend] = partial(_ours, text, shapes, seeds, batch, steps, backend, Path(folder) / "runs")
            rounds = [{name: arm() for name, arm in arms.items()} for _ in range(args.rounds)]
            print(f"{batch * CONTEXT} tokens per step, {len(shapes)} shapes x {seeds} seeds, {steps} steps")
            for name in arms:
                median = statistics.median(taken[name] for taken in rounds)
                ratios = [taken["plain loop"] / taken[name] for taken in rounds]
                told = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"  {name:12s} {median:7.1f} s   ratio {statistics.median(ratios):5.2f}   by round {told}")


def _plain(text: Path, shapes, seeds: int, batch: int, steps: int) -> float:
    runs = [
        {"depth": depth, "width": width, "heads": max(1, width // 16), "vocab": VOCAB, "context": CONTEXT, "lr": 1e-3,
         "batch": batch, "steps": steps, "seed": seed, "sequences": 16}
        for depth, width in shapes for seed in range(seeds)
    ]  # fmt: skip
    spec = text.with_name("plain.json")
    spec.write_text(json.dumps({"text": str(text), "runs": runs}))
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    return _timed([sys.executable, str(Path(__file__).with_name("plain_loop.py")), str(spec)], environment)


def _ours(text: Path, shapes, seeds: int, batch: int, steps: int, backend: str, out: Path) -> float:
    blocks = "\n".join(
        f"[[shapes]]\ndepth = {depth}\nwidth = {width}\nheads = {max(1, width // 16)}\nffn_dim = {4 * width}\n"
        f'vocab = {VOCAB}\ncontext = {CONTEXT}\nffn = "gelu"\ntied = true\n'
        for depth, width in shapes
    )
    sweep = text.with_name("sweep.toml")
    sweep.write_text(
        f'name = "benchmark"\nseeds = {list(range(seeds))}\n{blocks}\n[run]\nlr = 1e-3\ntokens = {steps * batch * CONTEXT}\n'
        f'batch = {batch}\ncorpus = "text"\npositions = "learned"\n[run.corpus_options]\npath = "{text}"\npacking = "uint8"\n'
        "[run.evaluation]\nsequences = 16\n"
    )
    command = [sys.executable, "-m", "scalinglab", "train", str(sweep), "--out", str(out), "--backend", backend]
    seconds = _timed(command, dict(os.environ))
    shutil.rmtree(out)
    return seconds


def _timed(command: list[str], environment: dict[str, str]) -> float:
    began = time.time()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    return time.time() - began


def _text() -> bytes:
    """Bytes over the whole vocabulary: losses don't matter here, and nothing has to be downloaded."""
    import numpy as np

    return np.random.default_rng(0).integers(0, VOCAB, 1_000_000, dtype=np.uint8).tobytes()


if __name__ == "__main__":
    main()
