"""Everything that scalinglab raises or warns about, in one family.

An error message says what is wrong with the value, where it stands (file, row, column, key) and what to do.
"""

from __future__ import annotations


class ScalinglabError(Exception):
    """Base of all errors that a user can cause and mend."""


class ConfigError(ScalinglabError, ValueError):
    """An option, a law or a question file (TOML) is not usable as written."""


class SchemaError(ScalinglabError, ValueError):
    """A run table or log breaks the schema: names the file, the row and the column."""


class FitError(ScalinglabError, RuntimeError):
    """A fit can't be made from these runs (too few rows, no variation, no finite start)."""


class ScalinglabWarning(UserWarning):
    """Base of all soft trouble; it is also stored on the result."""


class ConvergenceWarning(ScalinglabWarning):
    """The optimiser stopped short of a certified optimum."""


class IdentifiabilityWarning(ScalinglabWarning):
    """The runs do not determine a parameter that the law has."""


class DroppedRunsWarning(ScalinglabWarning):
    """Rows were left out of a fit; says which and why."""
