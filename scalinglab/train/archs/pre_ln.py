"""Pre-LN: h + F(norm(h)), final norm. The baseline, and the plain connector itself."""

from __future__ import annotations

from scalinglab.train.archs.connector import Architecture, Connector

PRE_LN = Architecture("pre_ln", Connector)
