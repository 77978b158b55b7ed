"""Sweeps by file or by name: those that travel with the package are `embedded:NAME`, as its tables are.

An installed package carries them in its folder `embedded/sweeps`; a checkout has them in `data/sweeps`.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from scalinglab.config import Sweep
from scalinglab.errors import ConfigError

_PREFIX = "embedded:"


def load_sweep(name: str | Path) -> Sweep:
    """The sweep of a TOML file, or the embedded one `embedded:NAME`.

    Raises
    ------
    ConfigError
        No such file or name, or an unusable one: names the file and the key.

    Examples
    --------
    >>> load_sweep("embedded:tiny").name
    'tiny'
    """
    return Sweep.load(sweep_path(name))


def sweep_path(name: str | Path) -> Path:
    """File of a sweep.

    Raises
    ------
    ConfigError
        There is no embedded sweep of that name; lists those there are.
    """
    text = str(name)
    if not text.startswith(_PREFIX):
        return Path(name)
    known, wanted = _embedded(), text.removeprefix(_PREFIX)
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, 1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        raise ConfigError(f"there is no embedded sweep {wanted!r}{hint}; known: {', '.join(sorted(known)) or 'none'}")
    return known[wanted]


def _embedded() -> dict[str, Path]:
    package = Path(__file__).resolve().parent
    folders = (package / "embedded" / "sweeps", package.parent / "data" / "sweeps")
    return {path.stem: path for folder in reversed(folders) for path in sorted(folder.glob("*.toml"))}
