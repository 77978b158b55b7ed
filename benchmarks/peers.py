"""scalinglab beside what people would use instead: one run, same data, CPU seconds and the objective that was reached.

    python benchmarks/peers.py [--data FOLDER] [--starts 60] [--draws 20] [--full] [--out peers.csv]

Peers that are not installed are skipped and named. Rows marked "extrapolated" are the mean CPU time of a random subset times
the size of the peer's own published protocol, and the objective in such a row is the best of the subset, not of the whole
grid; --full runs the 4,500 starts of the Chinchilla grid. Generic optimisers have no grid of their own: their time is the
expected time until one start comes within 1 % of the optimum. "worse than optimum" is
objective / best known - 1, the sum-Huber objective on log loss evaluated at the parameters each peer returns.
"""

from __future__ import annotations

# isort: off
import clock  # before NumPy: pins the threads

# isort: on

import argparse
import contextlib
import importlib.metadata
import io
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from protocols import Array, PowerSum
from tables import chinchilla, folder, gemstones

from scalinglab.fitting import Fit, fit
from scalinglab.objectives import Huber
from scalinglab.uncertainty import bootstrap, jackknife

TERMS = {
    "chinchilla": (("params", "A", "alpha"), ("tokens", "B", "beta")),
    "width_depth": (("width", "A", "a"), ("depth", "B", "b"), ("tokens", "C", "c")),
    "width_depth_params": (("width", "A", "a"), ("depth", "B", "b"), ("params", "P", "p"), ("tokens", "C", "c")),
}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--data")
    a.add_argument("--starts", type=int, default=60)
    a.add_argument("--draws", type=int, default=20)
    a.add_argument("--full", action="store_true")
    a.add_argument("--out", type=Path)
    args = a.parse_args()
    warnings.simplefilter("ignore")
    data = folder(args.data)
    points, told = chinchilla(data)
    gems, told_gems = gemstones(data)
    print(f"{clock.pin()}; Python {platform.python_version()}; {versions()}")
    print(f"Chinchilla points: {len(points)} rows, {told}; Gemstones: {len(gems)} rows, {told_gems}\n")
    rows: list[dict[str, Any]] = []
    for task in (
        partial(point_fits, "Chinchilla point fit, Huber 1e-3", "chinchilla", points, 1e-3, args),
        partial(bootstraps, "1,000 bootstrap fits, Huber 1e-3", points, args),
        partial(point_fits, "Gemstones width-depth point fit, Huber 1e-4", "width_depth", gems, 1e-4, args),
        partial(point_fits, "Gemstones width-depth-params fit, Huber 1e-4", "width_depth_params", gems, 1e-4, args),
        partial(by_run, "Gemstones width-depth by run, Huber 1e-4", gems),
    ):
        made = task()
        show(made)
        rows += made
        if args.out:
            pd.DataFrame(rows).to_csv(args.out, index=False)


def versions() -> str:
    out = []
    for name in ("numpy", "scipy", "lmfit", "chinchilla", "simple-scaling-laws"):
        try:
            out.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            out.append(f"{name} not installed")
    return ", ".join(out)


def row(task: str, peer: str, seconds: float, objective: float = np.nan, note: str = "") -> dict[str, Any]:
    return {"task": task, "peer": peer, "cpu_s": seconds, "objective": objective, "note": note}


def attempt(task: str, peer: str, work: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The row of an optional peer; a missing or failing one is a row that says so."""
    try:
        yield work()
    except ModuleNotFoundError as error:
        yield row(task, peer, np.nan, note=f"SKIPPED: {error.name} is not installed")
    except Exception as error:  # a peer that fails must not end the comparison
        yield row(task, peer, np.nan, note=f"FAILED: {type(error).__name__}: {str(error)[:80]}")


def problem(law: str, runs: pd.DataFrame, delta: float) -> PowerSum:
    X = np.stack([np.log(runs[c].to_numpy(np.float64)) for c, _, _ in TERMS[law]], 1)
    return PowerSum(X, np.log(runs["loss"].to_numpy(np.float64)), delta)


# ---- point fits ----------------------------------------------------------------------------------------------------------
def point_fits(task: str, law: str, runs: pd.DataFrame, delta: float, args: argparse.Namespace) -> list[dict[str, Any]]:
    p = problem(law, runs, delta)
    ours = clock.measure(lambda: fit(law, runs, objective=Huber(delta)), 3)
    found: Fit = ours.result
    note = f"status {found.status}; {found.search.agreeing} of {found.search.starts} starts agree; best of 3"
    out = [row(task, "scalinglab", ours.best, found.objective, note)]
    best = found.objective
    small = law == "chinchilla"
    everything = args.full and small
    count = p.grid_size if everything else args.starts if small else max(4, args.starts // 5)
    starts = p.starts(count, np.random.default_rng(0))
    out += attempt(task, f"scipy L-BFGS-B, {p.grid_size:,}-start grid", lambda: lbfgs_grid(task, p, starts, best))
    few = starts[: max(4, args.starts // 5)]
    out += attempt(task, "scipy least_squares huber, our Jacobian", lambda: scipy_huber(task, p, few, best))
    out += attempt(task, "lmfit least_squares huber", lambda: lmfit_starts(task, p, few, best, "least_squares"))
    if small:
        out += attempt(task, "lmfit leastsq (log MSE)", lambda: lmfit_starts(task, p, few, best, "leastsq"))
        out += attempt(task, "chinchilla 0.2.0 log_huber", lambda: chinchilla_package(task, p, runs))
    if law != "width_depth_params":
        out += attempt(task, "simple-scaling-laws (least squares)", lambda: ssl(task, law, p, runs, 2))
    return out


def spread(
    task: str, p: PowerSum, peer: str, seconds: float, ends: list[Array], best: float, *, published: bool
) -> dict[str, Any]:
    """A row for a multi-start.

    A published protocol costs the mean per start times its whole grid. A generic tool has no grid of its own: it costs the
    mean per start divided by the share of starts within 1 % of the optimum, the expected time until one gets there.
    """
    values = np.array([p.objective(t) for t in ends])
    hits = int((values <= best * 1.01).sum())
    each = seconds / len(ends)
    note = f"{1e3 * each:.0f} ms per start, {hits} of {len(ends)} within 1 % of the optimum"
    if published:
        full = len(ends) == p.grid_size
        cost = each * p.grid_size
        note = ("run in full" if full else f"extrapolated from {len(ends)} of {p.grid_size:,} starts") + f"; {note}"
    else:
        cost = each / (hits / len(ends)) if hits else np.nan
        note = ("expected time to the optimum; " if hits else "did not get there; ") + note
    return row(task, peer, cost, float(np.nanmin(values)), note)


def lbfgs_grid(task: str, p: PowerSum, starts: Array, best: float) -> dict[str, Any]:
    from scipy.optimize import minimize

    t = clock.measure(lambda: [minimize(p.objective, s, method="L-BFGS-B").x for s in starts])
    return spread(task, p, f"scipy L-BFGS-B, {p.grid_size:,}-start grid", t.best, t.result, best, published=True)


def scipy_huber(task: str, p: PowerSum, starts: Array, best: float) -> dict[str, Any]:
    from scipy.optimize import least_squares

    def one(s: Array) -> Array:
        return least_squares(p.residual, s, jac=p.jacobian, loss="huber", f_scale=p.delta, max_nfev=2000).x

    t = clock.measure(lambda: [one(s) for s in starts])
    return spread(task, p, "scipy least_squares huber, our Jacobian", t.best, t.result, best, published=False)


def lmfit_starts(task: str, p: PowerSum, starts: Array, best: float, method: str) -> dict[str, Any]:
    import lmfit

    def one(s: Array) -> Array:
        params = lmfit.Parameters()
        for i, v in enumerate(s):
            params.add(f"p{i}", value=float(v))
        options = {"loss": "huber", "f_scale": p.delta} if method == "least_squares" else {}
        made = lmfit.minimize(
            lambda q: p.residual(np.array(list(q.valuesdict().values()))),
            params,
            method=method,
            max_nfev=4000,
            **options,
        )
        return np.array(list(made.params.valuesdict().values()))

    t = clock.measure(lambda: [one(s) for s in starts])
    name = "lmfit least_squares huber" if method == "least_squares" else "lmfit leastsq (log MSE)"
    return spread(task, p, name, t.best, t.result, best, published=False)


def chinchilla_package(task: str, p: PowerSum, runs: pd.DataFrame) -> dict[str, Any]:
    """Its documented use with log_huber; 3^5 starts here, 5^5 in its README."""
    import matplotlib

    matplotlib.use("Agg")
    from chinchilla import Chinchilla
    from chinchilla._metrics import log_huber

    grid = {
        "e": np.linspace(0, 1, 3), "a": np.linspace(5, 15, 3), "b": np.linspace(5, 15, 3),
        "alpha": np.linspace(0.2, 0.6, 3), "beta": np.linspace(0.2, 0.6, 3),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        cc = Chinchilla(place, param_grid=grid, loss_fn=partial(log_huber, delta=p.delta), log_level=50)
        for r in runs.itertuples():
            cc.append(N=r.params, D=r.tokens, loss=r.loss)
        t = clock.measure(cc.fit)
    end = np.array([np.log(float(cc.E)), np.log(float(cc.A)), np.log(float(cc.B)), float(cc.alpha), float(cc.beta)])
    return row(
        task, "chinchilla 0.2.0 log_huber", t.best, p.objective(end), "run in full: 3^5 starts (its README: 5^5)"
    )


def ssl(task: str, law: str, p: PowerSum, runs: pd.DataFrame, draws: int) -> dict[str, Any]:
    import polars as pl
    import simple_scaling_laws as peer

    columns: dict[str, Any] = {"training_run_id": [f"{r}-{i}" for i, r in enumerate(runs["run_id"])]}
    for c, _, _ in TERMS[law]:
        columns[("dataset_size__" if c == "tokens" else "model_size__") + c] = runs[c].to_numpy(np.float64)
    frame = pl.DataFrame({**columns, "test_loss__ce": runs["loss"].to_numpy(np.float64)})
    t = clock.measure(lambda: peer.fit(frame, n_draws=draws, seed=0))
    v = list(t.result.params("test_loss__ce").values())
    note = f"{draws} draws; weighted least squares on raw loss: another objective (E {v[0]:.4g})"
    K = p.X.shape[1]
    amplitude, exponent = np.array(v[1 : 2 * K + 1 : 2]), np.array(v[2 : 2 * K + 1 : 2])
    # it reports amplitudes at the geometric mean of each predictor; its floor may be negative
    predicted = v[0] + (amplitude * np.exp(-(p.X - p.X.mean(0)) * exponent)).sum(1)
    return row(task, "simple-scaling-laws (least squares)", t.best, p.huber(p.y - np.log(predicted)), note)


# ---- many fits -----------------------------------------------------------------------------------------------------------
def bootstraps(task: str, runs: pd.DataFrame, args: argparse.Namespace) -> list[dict[str, Any]]:
    p = problem("chinchilla", runs, 1e-3)
    base = fit("chinchilla", runs, objective=Huber(1e-3))
    ours = clock.measure(lambda: bootstrap(base, draws=1000), 3)
    v = base.params
    theta = np.array([np.log(v["E"]), np.log(v["A"]), np.log(v["B"]), v["alpha"], v["beta"]])
    note = f"{ours.result.converged.mean():.1%} converged; best of 3"
    out = [row(task, "scalinglab bootstrap(draws=1000)", ours.best, note=note)]
    W = np.random.default_rng(1).multinomial(len(runs), np.full(len(runs), 1 / len(runs)), args.draws).astype(float)
    optimum = base.refit(weights=W).objective

    def looped(peer: str, one: Callable[[Array], Array]) -> dict[str, Any]:
        t = clock.measure(lambda: [one(w) for w in W])
        worse = np.array([p.objective(x, w) for x, w in zip(t.result, W, strict=True)]) / optimum - 1
        said = f"extrapolated from {len(W)} draws; worse than optimum: median {np.median(worse):.1e}, max {worse.max():.1e}"
        return row(task, peer, t.best * 1000 / len(W), note=said)

    def bfgs(w: Array) -> Array:
        from scipy.optimize import minimize

        return minimize(p.objective, theta, args=(w,), jac=p.gradient, method="BFGS").x

    def squares(w: Array) -> Array:
        from scipy.optimize import least_squares

        keep = np.repeat(np.arange(len(w)), w.astype(int))
        q = PowerSum(p.X[keep], p.y[keep], p.delta)
        return least_squares(q.residual, theta, jac=q.jacobian, loss="huber", f_scale=p.delta, max_nfev=2000).x

    name = "scipy BFGS, one start, analytic gradient (Epoch's loop)"
    out += attempt(task, name, lambda: looped(name, bfgs))
    other = "scipy least_squares huber, our Jacobian, looped"
    out += attempt(task, other, lambda: looped(other, squares))
    # its objective differs, so what it reached on our objective says nothing about its draws
    out += attempt(task, "simple-scaling-laws", lambda: ssl(task, "chinchilla", p, runs, 1000) | {"objective": np.nan})
    return out


def by_run(task: str, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """No peer resamples whole runs; what the package itself costs here."""
    base = fit("width_depth", runs, objective=Huber(1e-4))
    j = clock.measure(lambda: jackknife(base), 3)
    b = clock.measure(lambda: bootstrap(base, draws=1000))
    return [
        row(
            task, "scalinglab jackknife (22 runs)", j.best, note=f"{j.result.converged.mean():.1%} converged; best of 3"
        ),
        row(
            task, "scalinglab bootstrap(draws=1000)", b.best, note=f"{b.result.converged.mean():.1%} converged; one run"
        ),
    ]


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    known = [r["objective"] for r in rows if np.isfinite(r["objective"])]
    best = min(known) if known else np.nan
    print(first["task"])
    for r in rows:
        ratio = f"{r['cpu_s'] / first['cpu_s']:>11,.1f}x" if np.isfinite(r["cpu_s"]) else " " * 12
        worse = f"{r['objective'] / best - 1:>10.1e}" if np.isfinite(r["objective"]) else " " * 10
        seconds = f"{r['cpu_s']:>13,.3f}" if np.isfinite(r["cpu_s"]) else " " * 13
        print(f"  {r['peer']:<54}{seconds} s {ratio} {worse}  {r['note']}", flush=True)
    print()


if __name__ == "__main__":
    main()
