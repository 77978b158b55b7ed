"""Power of the mis-scaling verdict: shares of verdicts over simulated studies with a known answer.

Each study goes through the code that judges real ones: curves, bootstrap, drift conditions, margins, Holm over M and all W. The
gate at sigma .005 and two seeds: at least 80 % right and at most 2 % wrongly positive for each truth. Further plans say what
noise, a fifth depth, more candidates, and curvatures that differ between shapes cost.

    python benchmarks/misscaling_power.py [TRIALS] [OUT.csv]      400 trials by default, about four minutes of one core
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from scalinglab.misscaling import TRUTHS, Margins, Plan, power_table

PLANS = {
    "gate": Plan(),
    "one seed": Plan(seeds=1),
    "three seeds": Plan(seeds=3),
    "five depths": Plan(depths=5),
    "five rates": Plan(rates=5),  # nearly always one-sided somewhere: the grid would have to be extended
    "nine rates": Plan(rates=9),
    "two candidates": Plan(candidates=2),
    "curvatures differ by 30 %": Plan(curvature_spread=0.3),
    "nine rates, curvatures differ by 30 %": Plan(rates=9, curvature_spread=0.3),
    "seeds move shapes by .003": Plan(row=0.003),
    "sigma .01": Plan(sigma=0.01),
    "sigma .01, five seeds": Plan(sigma=0.01, seeds=5),
    "tau .006": Plan(tau=0.006),
}


def main(arguments: list[str]) -> None:
    trials = int(arguments[0]) if arguments else 400
    out = Path(arguments[1]) if len(arguments) > 1 else Path(__file__).with_name("misscaling_power.csv")
    start = time.process_time()
    table = power_table(PLANS, trials=trials)
    seconds = time.process_time() - start
    sys.stderr.write(table[["plan", "truth", "runs", "right", "wrongly_positive", "inconclusive"]].to_string() + "\n")
    out.write_text(table.to_csv(index=False, float_format="%.6g", lineterminator="\n"))
    gate = table[table["plan"] == "gate"]
    meta = {
        "what": "shares of verdicts over simulated studies with a known answer",
        "command": f"python benchmarks/misscaling_power.py {trials}",
        "seed": 0,
        "trials": trials,
        "cpu_seconds": round(seconds, 1),
        "truths": {k: asdict(t) for k, t in TRUTHS.items()},
        "margins": asdict(Margins()),
        "gate": {
            "asked": "right >= 0.80 and wrongly_positive <= 0.02",
            "least_right": float(gate["right"].min()),
            "most_wrongly_positive": float(gate["wrongly_positive"].max()),
            "met": bool((gate["right"] >= 0.80).all() and (gate["wrongly_positive"] <= 0.02).all()),
        },
        "columns": "wrongly_positive: claims an effect that is not there; wrong: any other wrong decision; se_*: mean standard errors",
    }
    out.with_suffix(".meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
