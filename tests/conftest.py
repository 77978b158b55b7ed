"""What several test files share: the optional folder of public run logs, and small designs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def shared_folder() -> Path | None:
    """The folder of public run logs: $SCALINGLAB_SHARED (or its data/), else ../shared/data beside the repository."""
    named = os.environ.get("SCALINGLAB_SHARED")
    for folder in [Path(named), Path(named) / "data"] if named else [ROOT.parent / "shared" / "data"]:
        if (folder / "gemstones_checkpoints.csv").is_file():
            return folder
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if folder is None:
        pytest.skip(
            "the public run logs are not here: set SCALINGLAB_SHARED to their folder or put it at ../shared/data"
        )
    return folder
