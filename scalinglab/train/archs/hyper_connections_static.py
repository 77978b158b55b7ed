"""Hyper-connections without the token-dependent part: n (n + 2) weights per sublayer."""

from __future__ import annotations

from scalinglab.train.archs.connector import Architecture
from scalinglab.train.archs.hyper_connections import HyperConnector

HYPER_CONNECTIONS_STATIC = Architecture("hyper_connections_static", HyperConnector)
