"""The command line: each verb is a few lines over a function of the package.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 done; 1 done, but the result is not to be used as it is
(no certified optimum, not identified, an audit that blocks, or runs that failed); 2 the input or the request can't be used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tyro

from scalinglab.cli.options import say
from scalinglab.errors import ScalinglabError, ScalinglabWarning

VERBS = {  # module and function; only the module of the verb that is asked for is imported
    "fit": ("analysis", "fit"),
    "compare": ("analysis", "compare"),
    "frontier": ("analysis", "frontier"),
    "audit": ("analysis", "audit"),
    "figure": ("analysis", "figure"),
    "table": ("analysis", "table"),
    "laws": ("analysis", "laws"),
    "import": ("analysis", "import_"),
    "cite": ("analysis", "cite"),
    "plan": ("training", "plan"),
    "train": ("training", "train"),
    "collect": ("training", "collect"),
    "tune": ("training", "tune"),
    "coords": ("training", "coords"),
    "probe": ("training", "probe"),
    "misscaling": ("misscaling", "misscaling"),
    "depth": ("depth", "depth"),
    "replicate": ("replicate", "replicate"),
    "paper": ("paper", "paper"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command `scalinglab`."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--version"]:
        from scalinglab import __version__

        print(f"scalinglab {__version__}")
        sys.exit(0)
    verb = args[0] if args and args[0] in VERBS else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = _show_warning
            if verb is not None:
                code = tyro.cli(_function(verb), prog=f"scalinglab {verb}", args=args[1:])
            else:
                verbs = {name: _function(name) for name in VERBS}
                code = tyro.extras.subcommand_cli_from_dict(verbs, prog="scalinglab", description=_ABOUT, args=args)
    except ScalinglabError as error:
        say(f"error: {error}")
        sys.exit(2)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        say(f"error: {error.filename or 'a file'} can't be written or read ({error.strerror or error})")
        sys.exit(2)
    except KeyboardInterrupt:
        say("stopped; what was written is whole, and the same command goes on from there")
        sys.exit(130)
    sys.exit(code or 0)


_ABOUT = (
    "Shape-aware scaling laws with honest error bars. Exit codes: 0 done, 1 done but not to be used as it is "
    "(not certified, not identified, or runs that failed), 2 the input can't be used."
)


def _function(verb: str) -> Callable[..., Any]:
    module, name = VERBS[verb]
    found: Callable[..., Any] = getattr(import_module(f"scalinglab.cli.{module}"), name)
    return found


def _show_warning(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    name = "warning" if issubclass(category, ScalinglabWarning) else category.__name__
    say(f"{name}: {message}")
