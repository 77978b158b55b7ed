"""What a training run is, written down: `RunConfig` for one, `Sweep` for many, `Budget` for how long.

Everything that changes a result is in the RunConfig, and nothing else is: two runs are the same exactly if their `run_id`
is. Its hash is taken over the fields that differ from the defaults, whatever their order, and over `SCHEMA`; a new field
therefore leaves old ids alone, and a changed default must come with a new SCHEMA (a test holds the defaults fast).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from scalinglab import tomlfile
from scalinglab.arch_options import resolve_options
from scalinglab.axes import by_path, placed, sections, struct_fields
from scalinglab.errors import ConfigError
from scalinglab.matching import Match, MatchBy, Positions
from scalinglab.native import native
from scalinglab.parametrization import Parametrization, parametrization
from scalinglab.shapes import FFN, FlopConvention, Shape

SCHEMA = "scalinglab/run-1"
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_LABELS = ("sweep", "match_group")  # they say where a run belongs, not what it is
_UNSCALED = ("sp", "sp_gpt2")
ANY_TOKENS = 1 << 62  # stands in for tokens that are not known yet: every schedule fits into it
_LISTS = ("shapes", "match", "budgets", "corpora", "architectures", "parametrizations", "lrs", "tuned", "seeds")
_OWN_AXES = {  # fields of RunConfig that `Sweep.axes` leaves to the sweep's own axes
    "lr": "lrs", "seed": "seeds", "tokens": "budgets", "corpus": "corpora", "corpus_options": "corpora",
    "architecture": "architectures", "options": "architectures", "parametrization": "parametrizations",
    "perturb": "parametrizations", "shape": "shapes or match",
}  # fmt: skip


def _at_least(name: str, value: Any, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{name}={value} must be at least {low}")


def _within(name: str, value: float, low: float, high: float, *, open_right: bool = False) -> None:
    if not low <= value <= high or (open_right and value == high):
        raise ConfigError(f"{name}={value} must lie in [{low}, {high}{')' if open_right else ']'}")


class _Declared(NamedTuple):
    """A field: its types that need no look inside, its choices, whether it is a table, and the declaration itself."""

    name: str
    simple: frozenset[type]
    choices: frozenset[Any]
    table: bool
    type: Any
    structs: tuple[type[msgspec.Struct], ...]


@functools.cache
def _declared(kind: type[msgspec.Struct]) -> tuple[_Declared, ...]:
    """The fields of a Struct, read once: a plan makes and checks several structs a run."""
    out = []
    for field in struct_fields(kind):
        parts = (field.type,) if isinstance(field.type, type) else (field.type, *get_args(field.type))
        simple = {p for p in parts if p in (bool, int, float, str, type(None))}
        choices = {v for p in parts if get_origin(p) is Literal for v in get_args(p)}
        table = get_origin(field.type) is dict
        structs = sections(field.type)
        out.append(
            _Declared(
                field.name, frozenset() if table else frozenset(simple), frozenset(choices), table, field.type, tuple(structs)
            )
        )  # fmt: skip
    return tuple(out)


def _typed(struct: msgspec.Struct, section: str = "") -> None:
    """Values of the declared types; msgspec checks them in files alone, not in Python calls."""
    for field in _declared(type(struct)):
        value = getattr(struct, field.name)
        kind = type(value)
        if kind in field.simple or kind in field.structs or (kind is str and value in field.choices):
            continue
        name = f"{section}{field.name}"
        if not field.structs or (value is None and not isinstance(field.type, type)):
            tomlfile.convert(tomlfile.plain(value), field.type, within=name)
        elif not isinstance(value, field.structs):
            raise ConfigError(f"{name}: Expected `{field.structs[0].__name__}`, got `{kind.__name__}`")


def _settled(struct: msgspec.Struct) -> bool:
    """Whether every value has the very type of its declaration: a way through plain data and back would change nothing."""
    for field in _declared(type(struct)):
        value = getattr(struct, field.name)
        kind = type(value)
        if kind in field.structs:
            if not _settled(value):
                return False
        elif field.table:
            if kind is not dict or any(
                type(k) is not str or type(v) not in (bool, int, float, str) for k, v in value.items()
            ):
                return False
        elif not (kind in field.simple or (kind is str and value in field.choices)):
            return False
    return True


class ShapeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of `Shape`; give heads or head_dim, or both."""

    depth: int
    width: int
    ffn_dim: int
    vocab: int
    context: int
    heads: int = 0
    head_dim: int = 0
    kv_heads: int | None = None
    ffn: FFN = "swiglu"
    tied: bool = False

    def __post_init__(self) -> None:
        _typed(self, "shape.")
        self.build()

    def build(self) -> Shape:
        """The shape; raises ConfigError where its sizes don't fit."""
        return Shape(**msgspec.structs.asdict(self))

    @classmethod
    def of(cls, shape: Shape) -> ShapeSpec:
        """The canonical spec of a shape: heads and head_dim both given, kv_heads only if they differ from heads."""
        return cls(
            depth=shape.depth, width=shape.width, ffn_dim=shape.ffn_dim, vocab=shape.vocab, context=shape.context,
            heads=shape.heads, head_dim=shape.head_dim, kv_heads=None if shape.kv_heads == shape.heads else shape.kv_heads,
            ffn=shape.ffn, tied=shape.tied,
        )  # fmt: skip


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shape at which every parametrization is the same: what width, depth and fan-in are counted against."""

    depth: int
    width: int
    head_dim: int
    ffn_dim: int

    def __post_init__(self) -> None:
        _typed(self, "base.")
        for name in self.__struct_fields__:
            _at_least(f"base.{name}", getattr(self, name), 1)
        if self.width % self.head_dim:
            raise ConfigError(f"base.width={self.width} must be a multiple of base.head_dim={self.head_dim}")


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW. Multipliers of the parametrization come on top.

    `weight_decay` is what a step at the peak shrinks a weight by if decay="independent" (0.0002 is 0.1 at a learning rate
    of 0.002), and PyTorch's argument if "coupled": then a sweep over learning rates also sweeps the regularisation.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 2e-4
    decay: Literal["independent", "coupled"] = "independent"
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        _typed(self, "optimizer.")
        for name in ("beta1", "beta2"):
            _within(f"optimizer.{name}", getattr(self, name), 0, 1, open_right=True)
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"optimizer.eps={self.eps} must be positive: entries without a gradient would be 0/0")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"optimizer.weight_decay={self.weight_decay} must be a finite number, 0 or more")
        if not self.grad_clip > 0:
            raise ConfigError(f"optimizer.grad_clip={self.grad_clip} must be positive (inf to clip nothing)")


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning rate over time: linear warmup from 0, then the kind; all as shares of the steps or of the peak.

    `warmup_tokens`, where given, replaces the share `warmup`. With it and kind "wsd", runs that differ in tokens alone have
    the same trunk: a shorter one is a branch of a longer one, and the trunk is trained once.
    """

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup: float = 0.1
    final: float = 0.1
    decay: float = 0.2  # of the steps, wsd only
    warmup_tokens: int | None = None

    def __post_init__(self) -> None:
        _typed(self, "schedule.")
        if self.warmup_tokens is not None:
            _at_least("schedule.warmup_tokens", self.warmup_tokens, 0)
        for name in ("warmup", "final", "decay"):
            _within(f"schedule.{name}", getattr(self, name), 0, 1)

    def check(self, tokens: int) -> None:
        """Refuse a warmup that leaves no time at the peak in a run of so many tokens, or that the decay overlaps."""
        given, named = self.warmup, f"schedule.warmup={self.warmup:g}"
        if self.warmup_tokens is not None:
            given, named = self.warmup_tokens / tokens, f"schedule.warmup_tokens={self.warmup_tokens}"
        if given >= 1:
            raise ConfigError(
                f"{named} takes up all of the run ({tokens} tokens): the learning rate has no time at its peak"
            )
        if self.kind == "wsd" and given + self.decay > 1 + 1e-9:
            raise ConfigError(
                f"{named} and schedule.decay={self.decay:g} overlap: of {tokens} tokens, warmup takes {given:.3g} and decay "
                f"{self.decay:.3g}, more than the whole run; shorten one of them"
            )


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fixed held-out set: how many sequences, and every how many steps (0: at the end only)."""

    sequences: int = 256
    every: int = 0

    def __post_init__(self) -> None:
        _typed(self, "evaluation.")
        _at_least("evaluation.sequences", self.sequences, 1)
        _at_least("evaluation.every", self.every, 0)


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run.

    Attributes
    ----------
    shape : ShapeSpec
    lr : float
        Base peak learning rate.
    tokens : int
        Training tokens; a run takes whole steps, rounded up (`steps`).
    architecture, options
        Residual topology and its options (see `arch_options`).
    parametrization, perturb, base
        Key of `PARAMETRIZATIONS`, "alpha=NUMBER" or "native" (the rule of the architecture); entries changed in it, as
        {"matrix.branch.lr": {"depth": 0.0}}; and the base shape, which every one but sp and sp_gpt2 needs.
    corpus, corpus_options
        Name of the token stream and its options.
    batch : int
        Sequences per step.
    seed : int
        Of the initialisation and of the data order: runs with one seed read the same data in the same order.
    init_std : float
        Base standard deviation of every matrix, embedding and readout.
    precision
        Parameters are never kept below fp32; bf16 is autocast.
    sweep, match_group : str
        Labels for the run table. They are no part of the id.
    """

    shape: ShapeSpec
    lr: float
    tokens: int
    corpus: str
    corpus_options: dict[str, Any] = {}
    architecture: str = "pre_ln"
    options: dict[str, Any] = {}
    parametrization: str = "sp"
    perturb: dict[str, dict[str, float]] = {}
    base: Base | None = None
    seed: int = 0
    batch: int = 8
    init_std: float = 0.02
    norm_eps: float = 1e-8  # mixes of attention residuals start so small that 1e-6 would change them
    positions: Positions = "rope"
    rope_theta: float = 1e4
    precision: Literal["fp32", "fp64", "bf16"] = "fp32"
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    evaluation: Evaluation = Evaluation()
    sweep: str = ""
    match_group: str = ""

    def __post_init__(self) -> None:
        _typed(self)
        for name in ("lr", "init_std", "norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and (value > 0 or (name == "norm_eps" and value == 0))):
                raise ConfigError(f"{name}={value} must be a positive number")
        for name, low in {"tokens": 1, "batch": 1, "seed": 0}.items():
            _at_least(name, getattr(self, name), low)
        head_dim = self.shape.head_dim or self.shape.width // self.shape.heads  # the shape has checked its sizes itself
        if self.positions == "rope" and head_dim % 2:
            raise ConfigError(f"head_dim={head_dim} must be even for rotary positions")
        resolve_options(self.architecture, self.options)
        self.scaling()
        if (self.parametrization not in _UNSCALED or self.perturb) and self.base is None:
            raise ConfigError(
                f"parametrization {self.parametrization!r} needs [base], the shape where all its multipliers are 1"
            )
        if self.steps > 1:  # one step has no schedule
            self.schedule.check(self.tokens)

    @property
    def steps(self) -> int:
        """Optimiser steps: the tokens, rounded up to whole steps."""
        return whole_steps(self.tokens, self.batch_tokens)

    @property
    def batch_tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.shape.context

    @property
    def run_id(self) -> str:
        """Readable prefix and hash of the canonical config; safe as a file name."""
        return run_name(self, canonical(self))

    def scaling(self) -> Parametrization:
        """The parametrization with its changes."""
        chosen = (
            native(self.architecture) if self.parametrization == "native" else parametrization(self.parametrization)
        )
        for entry, exponents in sorted(self.perturb.items()):
            chosen = chosen.perturb(entry, to=exponents)
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the defaults; `tomlfile.convert(data, RunConfig)` gives the config back."""
        return _differing(self)

    def save(self, path: str | Path) -> Path:
        """Write as TOML, atomically."""
        return tomlfile.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> RunConfig:
        """Read from TOML; raises ConfigError with the path of a wrong key."""
        return tomlfile.read(path, cls)


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long to train: exactly one of tokens, tokens_per_param and flops.

    `of` says which parameters, `convention` which FLOPs (forward + backward), both with what the architecture adds.
    """

    tokens: int | None = None
    tokens_per_param: float | None = None
    flops: float | None = None
    of: Literal["params_total", "params_backbone"] = "params_total"
    convention: FlopConvention = "causal"

    def __post_init__(self) -> None:
        _typed(self, "budget.")
        given = [v for v in (self.tokens, self.tokens_per_param, self.flops) if v is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise ConfigError("a budget is exactly one positive number: tokens, tokens_per_param or flops")

    @property
    def label(self) -> str:
        """The budget in short, e.g. tokens_per_param=20."""
        named = {"tokens": self.tokens, "tokens_per_param": self.tokens_per_param, "flops": self.flops}
        short = next(f"{name}={_exact(value)}" for name, value in named.items() if value is not None)
        short += f" of={self.of}" if self.tokens_per_param is not None and self.of != "params_total" else ""
        return short + (
            f" convention={self.convention}" if self.flops is not None and self.convention != "causal" else ""
        )

    def exact(self, cost: Match) -> float:
        """Tokens of a shape whose cost was counted by `matching.charge` in `convention`, before rounding."""
        if self.tokens is not None:
            return float(self.tokens)
        if self.tokens_per_param is not None:
            return self.tokens_per_param * cost.params[self.of]
        return (self.flops or 0.0) / cost.flops

    def resolve(self, cost: Match, batch_tokens: int) -> int:
        """The same, rounded up to whole steps as `RunConfig.steps` rounds them."""
        return batch_tokens * whole_steps(self.exact(cost), batch_tokens)


class Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An architecture or a corpus with options."""

    name: str
    options: dict[str, Any] = {}


class Scaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parametrization with entries changed."""

    name: str
    perturb: dict[str, dict[str, float]] = {}


class Tuned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning rate of one arm at one shape, as an earlier sweep found it; a corpus left empty is any."""

    architecture: str
    parametrization: str = "sp"
    depth: int
    width: int
    lr: float
    corpus: str = ""

    def __post_init__(self) -> None:
        _typed(self, "tuned.")

    def fits(self, *, architecture: str, parametrization: str, depth: int, width: int, corpus: str) -> bool:
        """Whether it is of this arm and shape."""
        mine = (self.architecture, self.parametrization, self.depth, self.width, self.corpus or corpus)
        return mine == (architecture, parametrization, depth, width, corpus)


class Matching(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shapes by a rule: the arguments of `match_shapes`.

    With charge=True every architecture is matched with what it adds; with False all get the shapes of Pre-LN, and the plan
    shows what they add as mismatch.
    """

    budget: float
    depths: list[int]
    vocab: int
    context: int
    by: MatchBy = "params_backbone"
    heads: int | None = None
    head_dim: int | None = None
    head_multiple: int = 2
    kv_heads: int | None = None
    ffn: FFN = "swiglu"
    ffn_ratio: float | None = None
    ffn_multiple: int = 16
    ffn_slack: float = 0.0
    tied: bool = False
    tolerance: float = 0.01
    convention: FlopConvention = "causal"
    charge: bool = True

    def __post_init__(self) -> None:
        _typed(self, "match.")

    @property
    def label(self) -> str:
        """Name of the group of matched runs; a sweep adds what tells its rules apart (`Sweep.match_labels`)."""
        return f"{self.by}={_exact(self.budget)}"


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Many runs: what they share in `run`, and the axes along which they differ. Every combination is a run.

    Attributes
    ----------
    name, question : str
    run : dict
        Fields of RunConfig that all runs share. An axis overrules it.
    shapes, match
        Shapes one by one, or by one or more matching rules; each rule is a group of matched runs.
    budgets, corpora, architectures, parametrizations, lrs, seeds
        The other axes; an empty one leaves the value of `run` (or its default).
    tuned
        In place of `lrs`: the learning rate of every arm and shape, as `scalinglab tune` writes it from an earlier sweep.
    axes
        Further ones: values for each of some other fields of RunConfig, by dotted path, e.g.
        {"batch": [4, 8], "optimizer.weight_decay": [0.0, 2e-4]}.
    """

    name: str
    question: str = ""
    run: dict[str, Any] = {}
    shapes: list[ShapeSpec] = []
    match: Matching | list[Matching] = []
    budgets: list[Budget] = []
    corpora: list[str | Choice] = []
    architectures: list[str | Choice] = []
    parametrizations: list[str | Scaling] = []
    lrs: list[float] = []
    tuned: list[Tuned] = []
    seeds: list[int] = []
    axes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        types = {field.name: field.type for field in struct_fields(type(self))}
        for name in _LISTS:  # a Python call may give plain data, as a file does
            given = tomlfile.plain(getattr(self, name))
            msgspec.structs.force_setattr(self, name, tomlfile.convert(given, types[name], within=name))
        if not (self.shapes or self.match or "shape" in self.run):
            raise ConfigError(f"sweep {self.name!r} has no shapes: give shapes, match, or run.shape")
        if self.lrs and self.tuned:
            raise ConfigError(f"sweep {self.name!r} has lrs and tuned: give one of them")
        for axis, field in {"budgets": "tokens", "lrs": "lr", "corpora": "corpus"}.items():
            if not (getattr(self, axis) or field in self.run or (axis == "lrs" and self.tuned)):
                raise ConfigError(f"sweep {self.name!r} needs {axis} or run.{field}")
        for field in ("sweep", "match_group"):
            if field in self.run:
                raise ConfigError(f"run.{field} is set by the sweep; leave it out")
        self.match_labels()
        axes = self.further_axes()
        # With stand-ins for what the axes bring, so that a wrong key is refused before anything runs.
        shape = {"depth": 1, "width": 2, "ffn_dim": 2, "heads": 1, "vocab": 2, "context": 1}
        stand_ins = {"shape": shape, "tokens": ANY_TOKENS, "lr": 1.0, "corpus": "-"}
        template = {**stand_ins, **self.run, **self._stand_in_axes()}
        tomlfile.convert(placed(template, {path: values[0] for path, values in axes.items()}), RunConfig, within="run")

    def _stand_in_axes(self) -> dict[str, Any]:
        """What must not clash with the stand-ins: options belong to the architecture that an axis brings."""
        plain: dict[str, Any] = {"architecture": "pre_ln", "options": {}} if self.architectures else {}
        plain |= {"tokens": ANY_TOKENS} if self.budgets else {}
        return {**plain, "parametrization": "sp", "perturb": {}} if self.parametrizations else plain

    def further_axes(self) -> dict[str, list[Any]]:
        """`axes` by dotted path in alphabetical order; see `axes.by_path`."""
        return by_path(self.axes, RunConfig, taken={**_OWN_AXES, **dict.fromkeys(_LABELS, "")})

    def match_labels(self) -> list[str]:
        """A label for each rule of `match`, unlike those of the other rules: what differs among rules of one budget is added.

        Raises
        ------
        ConfigError
            Two rules are equal.
        """
        rules = [self.match] if isinstance(self.match, Matching) else self.match
        labels = []
        for rule in rules:
            alike = [other for other in rules if other.label == rule.label]
            if alike.count(rule) > 1:
                raise ConfigError(f"sweep {self.name!r}: match has the rule {rule.label} twice; leave one out")
            apart = [f for f in rule.__struct_fields__ if len({repr(getattr(other, f)) for other in alike}) > 1]
            labels.append(" ".join([rule.label, *(f"{f}={getattr(rule, f)}" for f in apart)]))
        return labels

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the defaults."""
        return _differing(self)

    def save(self, path: str | Path) -> Path:
        """Write as TOML, atomically."""
        return tomlfile.write(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Sweep:
        """Read from TOML; raises ConfigError with the path of a wrong key."""
        return tomlfile.read(path, cls)


def whole_steps(tokens: float, batch_tokens: int) -> int:
    """Optimiser steps for so many tokens: rounded up, at least one. Budgets and `run.tokens` share this rule.

    Examples
    --------
    >>> whole_steps(1000, 512), whole_steps(1024, 512), whole_steps(1, 512)
    (2, 2, 1)
    """
    if isinstance(tokens, int):
        return max(1, -(-tokens // batch_tokens))
    exact = tokens / batch_tokens
    near = round(exact)  # a quotient like flops / flops per token may miss a whole number by its rounding error
    return max(1, near if math.isclose(exact, near, rel_tol=1e-9) else math.ceil(exact))


def _exact(value: float) -> str:
    """A number as short as it can be and still be that number."""
    short = f"{value:g}"
    return short if float(short) == value else f"{value:.17g}"


def canonical(config: RunConfig) -> dict[str, Any]:
    """The config as plain data in one form: labels out, defaults out, options and heads spelled one way, types checked.

    Raises
    ------
    ConfigError
        A value has the wrong type.
    """
    checked = config if _settled(config) else tomlfile.convert(tomlfile.plain(config), RunConfig)
    resolved = asdict(resolve_options(checked.architecture, checked.options))
    defaults = asdict(resolve_options(checked.architecture, None))
    options = {
        name: float(value) if isinstance(defaults[name], float) else value
        for name, value in resolved.items()
        if value != defaults[name]
    }
    unscaled = checked.parametrization in _UNSCALED and not checked.perturb
    return _differing(
        checked, shape=_spelled(checked.shape), options=options, base=None if unscaled else checked.base,
        **dict.fromkeys(_LABELS, ""),
    )  # fmt: skip


def run_name(config: RunConfig, known: Mapping[str, Any]) -> str:
    """`config.run_id`, where its canonical form is known."""
    changed = f"+{len(config.perturb)}" if config.perturb else ""
    shape = config.shape
    prefix = f"{config.architecture}-L{shape.depth}-d{shape.width}-{config.parametrization}{changed}-lr{config.lr:g}"
    digest = hashlib.sha256(f"{SCHEMA}\n{_CANONICAL.encode(known)}".encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '', prefix)}-s{config.seed}-{digest[:10]}"


@functools.lru_cache(maxsize=4096)  # pure, and a sweep has few shapes
def _spelled(spec: ShapeSpec) -> ShapeSpec:
    """The one spec of a shape, however its heads were given."""
    return ShapeSpec.of(spec.build())


def _differing(value: Any, **instead: Any) -> Any:
    """Plain data of a Struct without the fields that equal their default (msgspec's omit_defaults compares by identity).

    `instead` are values that stand for those of some fields.
    """
    if isinstance(value, msgspec.Struct):
        kept = {}
        for field in struct_fields(type(value)):
            given = instead[field.name] if field.name in instead else getattr(value, field.name)
            empty = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else msgspec.NODEFAULT
            if given != (field.default if field.default is not msgspec.NODEFAULT else empty):
                kept[field.name] = _differing(given)
        return kept
    if isinstance(value, list):
        return [_differing(item) for item in value]
    return value if type(value) in (bool, int, float, str) else tomlfile.plain(value)
