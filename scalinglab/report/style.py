"""How figures look: sizes, palette, number formats and axes, for print at 8 pt; nothing here changes global state.

`styled()` is the one context in which figures are built and saved. Fonts are those that come with matplotlib, so a figure
is the same file on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from scalinglab.errors import ConfigError

Array = NDArray[np.float64]
Width = Literal["column", "page"] | float
Kind = Literal["count", "power", "plain"]

COLUMN, PAGE = 3.35, 6.9  # inches: one column and the full width of a two-column page
# Okabe & Ito 2008, ordered so that neighbours also differ in lightness (greyscale print); yellow is left out
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (3, 1, 1, 1, 1, 1)))
INK, GREY, PALE = "#1a1a1a", "#6e6e6e", "#d0d0d0"
BAND = 0.22  # opacity of uncertainty bands
SMALL = 7.0  # pt: ticks, notes and direct labels

_RC: dict[str, Any] = {
    "font.family": "STIXGeneral", "mathtext.fontset": "stix", "font.size": 8.0, "axes.titlesize": 8.0,
    "axes.labelsize": 8.0, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL,
    "figure.titlesize": 8.0, "axes.linewidth": 0.6, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "axes.titlepad": 4.0, "axes.labelpad": 2.5, "axes.titlelocation": "left", "axes.axisbelow": True,
    "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.width": 0.4, "ytick.minor.width": 0.4,
    "xtick.major.size": 3.0, "ytick.major.size": 3.0, "xtick.minor.size": 1.6, "ytick.minor.size": 1.6,
    "lines.linewidth": 1.2, "lines.markersize": 3.5, "patch.linewidth": 0.6, "legend.frameon": False,
    "legend.handlelength": 1.6, "legend.handletextpad": 0.5, "legend.labelspacing": 0.25, "legend.borderpad": 0.2,
    "legend.columnspacing": 1.2, "legend.borderaxespad": 0.3, "figure.dpi": 100, "savefig.dpi": 300,
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white", "savefig.bbox": None,
    "pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "scalinglab",
    "axes.unicode_minus": True, "axes.formatter.use_mathtext": True, "path.simplify": True, "text.usetex": False,
    "axes.xmargin": 0.03, "axes.ymargin": 0.05, "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03, "figure.constrained_layout.hspace": 0.04,
    "figure.constrained_layout.wspace": 0.03, "axes.prop_cycle": cycler(color=PALETTE),
}  # fmt: skip


_NOT_OURS = frozenset({"backend", "backend_fallback", "interactive", "toolbar", "timezone", "datapath"})


@contextmanager
def styled() -> Iterator[None]:
    """Matplotlib's defaults plus the house style, inside the block only: a user's rcParams neither leak in nor change."""
    base = {k: v for k, v in matplotlib.rcParamsDefault.items() if k not in _NOT_OURS and not k.startswith("_")}
    with matplotlib.rc_context({**base, **_RC}):
        yield


def new_figure(width: Width, height: float) -> Figure:
    """An empty figure with an Agg canvas, `height` inches tall; no pyplot behind it."""
    figure = Figure(figsize=(inches(width), height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def inches(width: Width) -> float:
    """Width in inches of "column", "page" or a number.

    Raises
    ------
    ConfigError
        Another word, or a number that is no width.
    """
    if width == "column":
        return COLUMN
    if width == "page":
        return PAGE
    if isinstance(width, str) or not (np.isfinite(width) and 1 <= width <= 40):
        raise ConfigError(f"width is {width!r}: give 'column' ({COLUMN} in), 'page' ({PAGE} in) or inches from 1 to 40")
    return float(width)


# ---- colours -----------------------------------------------------------------------------------------------------------
def colour_of(index: int) -> str:
    """Colour of the index-th category."""
    return PALETTE[index % len(PALETTE)]


def marker_of(index: int) -> str:
    """Marker of the index-th category; where colours repeat, the pair of colour and marker does not."""
    return MARKERS[(index + index // len(PALETTE)) % len(MARKERS)]


def dash_of(index: int) -> Any:
    """Line style of the index-th category."""
    return DASHES[index % len(DASHES)]


def ordered_map() -> Colormap:
    """Colours for an ordered quantity: monotone in lightness, readable for colour-blind readers and in grey."""
    full = matplotlib.colormaps["viridis"]
    return LinearSegmentedColormap.from_list("scalinglab", full(np.linspace(0.8, 0.0, 256)))


# ---- numbers -----------------------------------------------------------------------------------------------------------
_SUFFIX = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def count_label(value: float) -> str:
    """A count as people say it: 70M, 1.5B, 20T, 300k; at most three digits."""
    if not np.isfinite(value):
        return ""
    value = float(f"{value:.3g}")
    for size, suffix in _SUFFIX:
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def power_label(value: float) -> str:
    r"""A large number as a power of ten in mathtext: $10^{20}$, $3{\times}10^{19}$."""
    if not (np.isfinite(value) and value > 0):
        return ""
    mantissa, exponent = f"{value:.1e}".split("e")
    power = rf"10^{{{int(exponent)}}}"
    mantissa = f"{float(mantissa):g}"
    return f"${power}$" if mantissa == "1" else rf"${mantissa}{{\times}}{power}$"


def label_of(value: float, kind: Kind) -> str:
    """Text of a tick of an axis of this kind."""
    if kind == "count":
        return count_label(value)
    return power_label(value) if kind == "power" or not 1e-3 <= value < 1e4 else f"{value:.4g}"


def number(value: float) -> str:
    r"""Three digits of any number in mathtext: $0.347$, $-0.00234$; a power of ten from 10^5 on and below 10^-3."""
    if not np.isfinite(value):
        return r"$\infty$" if value > 0 else r"$-\infty$" if value < 0 else "?"
    mantissa, exponent = f"{value:.2e}".split("e")
    power = int(exponent)
    if value == 0 or -3 <= power < 5:
        return f"${value:.{max(0, 2 - power) if value else 0}f}$"
    return rf"${mantissa}{{\times}}10^{{{power}}}$"


_MANTISSAS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
)
_ENOUGH = 4  # labelled ticks that make a log axis readable


def log_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers for a log axis from low to high, between two and `most`: decades, else 1 and 3, else 1, 2, 5, ...

    The first set with at least four is taken, or else the richest that fits; below a third of a decade linear steps.

    Raises
    ------
    ConfigError
        The limits are not positive and increasing, or `most` is below 2.
    """
    if not (0 < low < high and np.isfinite(high)) or most < 2:
        raise ConfigError(f"a log axis needs 0 < low < high and 2 or more ticks, not {low!r}, {high!r} and {most!r}")
    if high / low < 3:
        return _linear_ticks(low, high, most)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    best: list[float] = []
    for mantissas in _MANTISSAS:
        inside = [float(f"{m}e{k}") for k in range(first, last + 1) for m in mantissas]
        inside = [v for v in inside if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        if len(inside) > most:
            if len(best) >= 2:
                break
            return inside[:: int(np.ceil(len(inside) / most))]  # many decades: every second, third, ...
        if len(inside) > len(best):
            best = inside
        if len(best) >= min(_ENOUGH, most):
            break
    return best if len(best) >= 2 else _linear_ticks(low, high, most)


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    found: list[float] = []
    for bins in range(most + 1, 0, -1):
        values = MaxNLocator(nbins=bins, steps=[1, 2, 5, 10]).tick_values(low, high)
        inside = [float(v) for v in values if low * (1 - 1e-12) <= v <= high * (1 + 1e-12)]
        if len(found) < len(inside) <= most:
            found = inside
    return found if len(found) >= 2 else [low, high]


def log_axis(ax: Axes, which: Literal["x", "y"], kind: Kind, *, most: int = 5) -> None:
    """Make an axis logarithmic with round, labelled major ticks and bare minor ones; call it when its limits are final."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    low, high = sorted(ax.get_xlim() if which == "x" else ax.get_ylim())
    major = log_ticks(low, high, most)
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    if high / low < 3:
        step = (major[1] - major[0]) / 5
        minor = [step * k for k in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1)]
    else:
        minor = [m * 10.0**k for k in range(first, last + 1) for m in ((1,) if last - first > 8 else range(1, 10))]
    minor = [v for v in minor if low <= v <= high and not np.isclose(v, major, rtol=1e-6).any()]
    axis.set_major_locator(FixedLocator(major))
    axis.set_minor_locator(FixedLocator(minor))
    axis.set_major_formatter(FuncFormatter(lambda v, _: label_of(v, kind)))
    axis.set_minor_formatter(NullFormatter())


def set_log_limits(ax: Axes, which: Literal["x", "y"], values: ArrayLike, pad: float = 0.04) -> None:
    """Limits around finite positive values with `pad` of their log range on each side."""
    v = np.asarray(values, dtype=np.float64).ravel()
    v = v[np.isfinite(v) & (v > 0)]
    low, high = np.log(v.min()), np.log(v.max())
    extra = pad * (high - low) if high > low else 0.1
    limits = float(np.exp(low - extra)), float(np.exp(high + extra))
    (ax.set_xscale if which == "x" else ax.set_yscale)("log")
    ax.set_xlim(limits) if which == "x" else ax.set_ylim(limits)


# ---- words in the figure -----------------------------------------------------------------------------------------------
def footnote(figure: Figure, text: str) -> None:
    """One or two small grey lines under the axes: what the bands are, or that there are none."""
    import textwrap

    characters = int(figure.get_figwidth() * 27)
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, characters)]
    figure.supxlabel("\n".join(lines), fontsize=6.2, color=GREY, x=0.01, ha="left")


def group_legend(figure: Figure, ax: Axes, title: str, place: str = "upper right") -> None:
    """Legend of the labelled artists of `ax`: inside it for up to four groups, else above the figure."""
    handles = [h for h in ax.get_legend_handles_labels()[0] if not str(h.get_label()).startswith("_")]
    if len(handles) <= 4:
        ax.legend(handles=handles, title=title, loc=place, title_fontsize=SMALL)
        return
    columns = max(2, int(figure.get_figwidth() / 1.1))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def separate(ax: Axes, texts: Sequence[Text]) -> None:
    """Move annotations up, in points, until none covers another; the lowest keep their place."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    placed: list[Any] = []
    for text in sorted(texts, key=lambda t: t.get_window_extent().y0):
        box = text.get_window_extent()
        for other in sorted(placed, key=lambda b: b.y0):
            if box.overlaps(other):
                lift = other.y1 - box.y0 + 0.5
                x, y = text.get_position()
                text.set_position((x, y + lift * 72 / figure.dpi))
                box = box.translated(0, lift)
        placed.append(box)


def haloed(text: Text) -> Text:
    """The text with a thin white outline, so that it reads on top of points and lines."""
    text.set_path_effects([withStroke(linewidth=1.6, foreground="white")])
    return text


def symbol(name: str) -> str:
    r"""A parameter in mathtext: alpha is $\alpha$, gamma1[mhc] is $\gamma_{1,\mathrm{mhc}}$; underscores stay visible."""
    from scalinglab.typeset import symbol as latex

    return "$" + latex(name).replace(r"\_", r"\mathrm{\_}") + "$"
