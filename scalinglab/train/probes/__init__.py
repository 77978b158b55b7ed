"""Depth probes: what the blocks of a trained model do, for any residual topology and any nn.Module with its interface.

    report = probe(model, tokens, targets)      # or probe_run(folder) for a finished run
    report.save(folder)

A probe is a function of a `Setup` that returns `Measure`s, with one entry in `PROBES`.
"""

from scalinglab.train.probes.run import PROBES, Probe, load_model, probe, probe_run
from scalinglab.train.probes.setup import Setup, Thresholds
from scalinglab.train.probes.tap import Probed, forward

__all__ = ["PROBES", "Probe", "Probed", "Setup", "Thresholds", "forward", "load_model", "probe", "probe_run"]
