"""Laws of loss: sums of terms, each log-linear in features, some under an outer exponent.

A law is its formula. `LAWS` is a table of formulas with their source; a user's law is one more formula. Compiling a law
for a run table gives the solver's `Problem`; crossing its parameters with a column (architecture) makes them free per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scalinglab import expressions
from scalinglab.errors import ConfigError
from scalinglab.features import COLUMNS, R0, feature_values, level_codes
from scalinglab.formulas import Group, OutsideAlgebra, Term, parse_law

Array = NDArray[np.float64]
Level = Literal["H0", "H1", "H2", "H3", "H4"]


@dataclass(frozen=True)
class Law:
    """A scaling law: loss in nats per token as a function of the columns of a run table.

    formula : the law as text; names that are columns or constants are data, the others are parameters.
    constants : numbers that the formula reads and no fit changes.
    derived : expressions of the parameters that are reported with their own intervals.
    bounds, ties, fixed : limits, equalities (`{"beta": "alpha"}`) and constants of parameters, on their natural scale.
    shared : with `by`, the parameters that stay common by default.
    function : a Python function ``(columns, *parameters) -> loss``, for a law that has no formula in the algebra.
    """

    key: str
    formula: str
    source: str = ""
    note: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)
    derived: Mapping[str, str] = field(default_factory=dict)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    starts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    alias: str = ""
    columns: frozenset[str] = COLUMNS
    function: Callable[..., Any] | None = None
    by: str | None = None
    levels: tuple[str, ...] = ()
    shared: frozenset[str] = frozenset()

    # ---- structure ---------------------------------------------------------------------------------------------------
    @property
    def structure(self) -> tuple[list[Term], list[Group]]:
        """Terms and groups; raises OutsideAlgebra where the formula has none."""
        if self.function is not None:
            raise OutsideAlgebra(f"law {self.key!r} is a Python function, not a formula of the algebra")
        return parse_law(self.formula, frozenset(self.columns | set(self.constants)))

    @property
    def terms(self) -> list[Term]:
        """All terms, those under an outer exponent included; raises OutsideAlgebra where the formula has none."""
        alone, groups = self.structure
        return alone + [t for g in groups for t in g.terms]

    @property
    def in_algebra(self) -> bool:
        """Whether the batched solver takes the law; lmfit takes the others."""
        try:
            _ = self.structure
        except OutsideAlgebra:
            return False
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters of the formula in order of appearance, before crossing; tied ones included."""
        if self.function is not None:
            return _signature(self.function)
        data = self.columns | set(self.constants)
        read = expressions.names(self.formula)
        return tuple(n for n in _in_order(self.formula) if n in read and n not in data)

    @property
    def amplitudes(self) -> frozenset[str]:
        """Parameters that are amplitudes (positive, reported on their natural scale, log inside)."""
        return frozenset(t.amplitude for t in self.terms)

    @property
    def floor(self) -> str | None:
        """The irreducible loss: an amplitude without features, on its own."""
        if not self.in_algebra:
            return "E" if "E" in self.names else None
        terms, _ = self.structure
        plain = [t.amplitude for t in terms if not t.coefficients and t.offset is None]
        return plain[0] if plain else None

    @property
    def reads(self) -> frozenset[str]:
        """Columns of the run table that the law needs (derived ones resolved to what they are made of)."""
        if self.function is not None:
            return frozenset()
        read = expressions.names(self.formula) & self.columns
        return frozenset(read)

    @property
    def param_names(self) -> tuple[str, ...]:
        """Reported parameters: crossed ones as `name[level]`."""
        out: list[str] = []
        for name in self.names:
            out += [name] if not self.levels or name in self.shared else [f"{name}[{v}]" for v in self.levels]
        return tuple(out)

    # ---- variants ----------------------------------------------------------------------------------------------------
    def with_(
        self,
        *,
        fixed: Mapping[str, float] | None = None,
        bounds: Mapping[str, tuple[float, float]] | None = None,
        ties: Mapping[str, str] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> Law:
        """The law with more parameters fixed, bounded or tied, or with other constants.

        Raises
        ------
        ConfigError
            A name that is no parameter (or constant) of the law, an empty interval, a tie to itself.
        """
        law = replace(
            self,
            fixed={**self.fixed, **(fixed or {})},
            bounds={**self.bounds, **(bounds or {})},
            ties={**self.ties, **(ties or {})},
            constants={**self.constants, **(constants or {})},
        )
        known = set(self.names)
        for what, given in (("fixed", law.fixed), ("bounds", law.bounds), ("ties", law.ties)):
            for name in given:
                if name.split("[")[0] not in known:
                    raise ConfigError(
                        f"{what}: {name!r} is no parameter of law {self.key!r}; it has {', '.join(self.names)}"
                    )
        for name, target in law.ties.items():
            if target not in known or target == name or target in law.ties:
                raise ConfigError(f"ties: {name!r} can't be tied to {target!r}; tie it to another free parameter")
        for name, value in law.fixed.items():
            if not np.isfinite(value):
                raise ConfigError(f"fixed: {name!r} is {value}; give a finite number")
        for name, (low, high) in law.bounds.items():
            if not low < high:
                raise ConfigError(f"bounds of {name!r}: [{low}, {high}] is empty")
        for name in constants or {}:
            if name not in self.constants:
                raise ConfigError(
                    f"{name!r} is no constant of law {self.key!r}; it has {', '.join(self.constants) or 'none'}"
                )
        return law

    def crossed(self, by: str, levels: Sequence[str], share: Iterable[str] | Level | None = ()) -> Law:
        """The law with every parameter but the shared ones free per level of a column.

        share : names that stay common; E always does (same corpus and tokenizer, same entropy floor) unless share is None.
            "H0".."H4" are the sharing levels of the depth question: nothing free; amplitude of the capacity term; also its
            shape coefficients; also its exponent; also the data term.

        Raises
        ------
        ConfigError
            An unknown name, fewer than two levels, or a level without its own meaning in this law.
        """
        if len(levels) < 2:
            raise ConfigError(f"by={by!r} has only the value {list(levels)}: crossing needs at least two")
        if not self.in_algebra:
            raise ConfigError(
                f"by={by!r}: law {self.key!r} is outside the algebra and can't be crossed; fit each group apart"
            )
        names = set(self.names)
        if isinstance(share, str) and share not in ("H0", "H1", "H2", "H3", "H4"):
            if share not in names:
                raise ConfigError(f"share={share!r}: write parameter names ({', '.join(self.names)}) or a level H0..H4")
            share = (share,)
        if isinstance(share, str):
            shared = names - self._free_at(share)
        elif share is None:
            shared = set()
        else:
            unknown = [s for s in share if s not in names]
            if unknown:
                raise ConfigError(
                    f"share: {unknown[0]!r} is no parameter of law {self.key!r}; it has {', '.join(self.names)}"
                )
            shared = set(share) | ({self.floor} if self.floor else set())
        _, groups = self.structure
        shared |= {g.exponent for g in groups}
        return replace(self, by=by, levels=tuple(str(v) for v in levels), shared=frozenset(shared))

    def _free_at(self, level: str) -> set[str]:
        def of(*columns: str) -> list[Term]:
            return [t for t in self.terms if any(set(columns) & expressions.names(c.feature) for c in t.coefficients)]

        capacity, data = of("params", "width", "depth", "aspect", "u", "params_total", "params_backbone"), of("tokens")
        free: set[str] = set()
        if level >= "H1":
            free |= {t.amplitude for t in capacity}
        if level >= "H2":
            shape = {"depth", "width", "aspect", "u"}
            free |= {c.name for t in capacity for c in t.coefficients if expressions.names(c.feature) & shape}
        if level >= "H3":
            free |= {c.name for t in capacity for c in t.coefficients}
        if level >= "H4":
            free |= {t.amplitude for t in data} | {c.name for t in data for c in t.coefficients}
        return free

    # ---- values ------------------------------------------------------------------------------------------------------
    def loss(self, params: pd.DataFrame | Mapping[str, Any], runs: pd.DataFrame) -> Array:
        """Loss of the law, straight from its formula: [n] for one set of parameters, [R, n] for a frame of R rows.

        The independent path: fits go through log-sum-exp, this goes through the text of the law.
        """
        data = feature_values(self, runs)
        many = isinstance(params, pd.DataFrame)
        get = {str(k): np.asarray(v, dtype=np.float64) for k, v in params.items()}
        values: dict[str, Any] = {}
        code = None
        if self.levels:
            code = level_codes(self, runs)
        for name in self.names:
            if code is None or name in self.shared:
                v = get[name]
                values[name] = v[:, None] if many else v
            else:
                stack = np.stack([get[f"{name}[{level}]"] for level in self.levels], -1)
                values[name] = stack[..., code]
        if self.function is not None:
            return np.asarray(self.function(data, *(values[n] for n in self.names)), dtype=np.float64)
        out = np.asarray(expressions.evaluate(self.formula, {**data, **values}, what="law"), dtype=np.float64)
        shape = (len(next(iter(get.values()))), len(runs)) if many else (len(runs),)
        return np.broadcast_to(out, shape).copy() if out.shape != shape else out


def law_from(law: str | Law | Callable[..., Any], columns: Iterable[str] = ()) -> Law:
    """A Law from a key of LAWS, a code of the literature (C1, S2, ...), a formula or a Python function.

    Raises
    ------
    ConfigError
        Neither a known key nor a formula with parameters; the message lists the keys.
    """
    if isinstance(law, Law):
        return law
    if callable(law):
        return Law(getattr(law, "__name__", "function"), "", source="user function", function=law)
    if law in LAWS:
        return LAWS[law]
    by_alias = {a.lower(): entry for entry in LAWS.values() for a in entry.alias.split()}
    if law.lower() in by_alias:
        return by_alias[law.lower()]
    if law.isidentifier():
        import difflib

        close = difflib.get_close_matches(law, LAWS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"law {law!r} is not known{hint} Known: {', '.join(LAWS)}; or write a formula such as 'E + A*params**-alpha'"
        )
    read = expressions.names(law)
    known = COLUMNS | (set(map(str, columns)) & read)
    made = Law("formula", law, source="user formula", constants={"r0": R0} if {"r0", "u"} & read else {}, columns=known)
    _check_formula(made, columns)
    if not made.names:
        raise ConfigError(
            f"law {law!r} has no parameter: names that are columns are data, e.g. {', '.join(sorted(known)[:8])}"
        )
    return made


def _check_formula(law: Law, columns: Iterable[str]) -> None:
    """Refuse what can't be meant: the loss as a regressor, text or infinite numbers, a misspelt column."""
    import ast
    import difflib

    if "loss" in expressions.names(law.formula):
        raise ConfigError(f"law {law.formula!r} reads 'loss', which is what it is to predict")
    for node in ast.walk(expressions.parse(law.formula, what="law")):
        if isinstance(node, ast.Constant) and (
            not isinstance(node.value, int | float) or not np.isfinite(float(node.value))
        ):
            raise ConfigError(f"law {law.formula!r} has {node.value!r}, which is no finite number")
    known = COLUMNS | set(map(str, columns))
    for name in law.names:
        close = difflib.get_close_matches(name, known, 1, cutoff=0.85) if len(name) > 3 else []
        if close:
            raise ConfigError(
                f"law {law.formula!r} has {name!r}, which is no column: did you mean {close[0]!r}? (rename a parameter)"
            )


def _in_order(text: str) -> list[str]:
    import re

    return list(dict.fromkeys(re.findall(r"[A-Za-z_]\w*", text)))


def _signature(function: Callable[..., Any]) -> tuple[str, ...]:
    import inspect

    return tuple(list(inspect.signature(function).parameters)[1:])


_SHAPE = "exp(gamma1*u + gamma2*u**2)"
_R_STAR = "r0*exp(-gamma1/(2*gamma2))"
_LEVINE = "log(maximum((log(width) - a_th)/b_th, 1))"
_HOFFMANN = "Hoffmann et al. 2022, arXiv:2203.15556, eq. 2"

LAWS: dict[str, Law] = {
    law.key: law
    for law in (
        Law(
            "kaplan_n",
            "A*params**-alpha",
            "Kaplan et al. 2020, arXiv:2001.08361, eq. 1.1",
            alias="K1 K1N",
            derived={"N_c": "A**(1/alpha)"},
        ),
        Law(
            "kaplan_d",
            "B*tokens**-beta",
            "Kaplan et al. 2020, arXiv:2001.08361, eq. 1.2",
            alias="K1D",
            derived={"D_c": "B**(1/beta)"},
        ),
        Law(
            "kaplan",
            "((A*params**-alpha)**(1/delta) + (B*tokens**-delta)**(1/delta))**delta",
            "Kaplan et al. 2020, arXiv:2001.08361, eq. 1.5",
            alias="K2",
            note="alpha is alpha_N, delta is alpha_D; no irreducible loss",
            derived={"N_c": "A**(1/alpha)", "D_c": "B**(1/delta)"},
        ),
        Law(
            "chinchilla",
            "E + A*params**-alpha + B*tokens**-beta",
            _HOFFMANN,
            alias="C1",
            derived={"a_opt": "beta/(alpha+beta)"},
        ),
        Law(
            "ces",
            "E + ((A*params**-alpha)**(1/delta) + (B*tokens**-beta)**(1/delta))**delta",
            "constant-elasticity family that holds chinchilla (delta=1) and kaplan (E=0, delta=beta)",
            alias="G1",
        ),
        Law(
            "ray",
            "E + A*params**-alpha",
            "runs at one ratio tokens/params: only the sum of both exponents' effect is seen",
            alias="R1",
        ),
        Law(
            "shape",
            f"E + A*params**-alpha*{_SHAPE} + B*tokens**-beta",
            "aspect ratio inside the capacity term, log-quadratic; regular at gamma1=gamma2=0",
            alias="S2",
            constants={"r0": R0},
            derived={"r_star": _R_STAR, "a_opt": "beta/(alpha+beta)"},
        ),
        Law(
            "shape_drift",
            "E + A*params**-alpha*exp(gamma1*u + gamma2*u**2 + gamma3*u*log(params/N0)) + B*tokens**-beta",
            "shape, with an optimum that moves with size: r* = r0 exp(-gamma1/(2 gamma2)) (N/N0)^q",
            alias="S2d",
            note="q = -gamma3/(2 gamma2); the drift enters as an interaction, which keeps the law regular at q = 0",
            constants={"r0": R0, "N0": 3e8},
            derived={"r_star": _R_STAR, "q": "-gamma3/(2*gamma2)"},
        ),
        Law(
            "shape_data",
            f"E + A*params**-alpha*{_SHAPE} + B*tokens**-beta*exp(zeta1*u)",
            "shape, with data efficiency that depends on the aspect ratio",
            alias="S3",
            constants={"r0": R0},
            derived={"r_star": _R_STAR},
        ),
        Law(
            "width_depth",
            "E + A*width**-a + B*depth**-b + C*tokens**-c",
            "McLeish et al. 2025 (Gemstones), arXiv:2502.06857; Liu et al. 2026, arXiv:2602.05970",
            alias="WD",
            derived={"gamma2_implied": "a*b/9"},
        ),
        Law(
            "width_depth_params",
            "E + A*width**-a + B*depth**-b + P*params**-p + C*tokens**-c",
            "McLeish et al. 2025 (Gemstones), arXiv:2502.06857",
            alias="WDN",
        ),
        Law(
            "levine",
            "E + A*params**-alpha + B*tokens**-beta"
            f" + eta1*softplus(({_LEVINE} - log(depth))/s)*s + eta2*softplus((log(depth) - {_LEVINE})/s)*s",
            "Levine et al. 2020, arXiv:2006.12467: depth helps below L_th(width) = (ln width - a_th)/b_th",
            alias="LV",
            note="a_th, b_th and the smooth hinge's scale s are constants, so the law is in the algebra; eta1, eta2 >= 0",
            constants={"a_th": 5.039, "b_th": 0.0555, "s": 0.1},
        ),
        Law(
            "critical_depth",
            "E + A*params**-alpha + B*tokens**-beta + eta*softplus((log(depth) - k - chi*log(width))/s)*s",
            "Fahim & Karim 2026, arXiv:2601.20994: harm beyond L_crit = exp(k) width^chi, published chi 0.44",
            alias="CD",
            note="the hinge's place k and slope chi are nonlinear: fitted by lmfit from a grid of places",
            constants={"s": 0.1},
            fixed={"chi": 0.44},
            bounds={"eta": (0.0, np.inf)},
            starts={"k": (-1.0, 0.0, 0.5, 1.0), "eta": (0.01,)},
        ),
        Law(
            "effective_depth",
            "E + A*width**-a + B*depth**-b + C*tokens**-c",
            "effective depth L**rho inside width_depth; rho = b / b of the reference architecture",
            alias="EL",
            note="fit by='architecture' with share=('A','a','B','C','c'): rho and b are one number within one architecture",
        ),
        Law(
            "data_constrained",
            "E + A*params**-alpha + B*(unique_tokens*(1 + Rd*(1 - exp(-(tokens/unique_tokens - 1)/Rd))))**-beta",
            "Muennighoff et al. 2023, arXiv:2305.16264, eq. 5-6 (excess parameters are not discounted)",
            alias="DC",
            note="repeated tokens decay with Rd: nonlinear, fitted by lmfit; needs the column unique_tokens",
            starts={"Rd": (5.0, 15.0)},
            bounds={"Rd": (1e-3, 1e6)},
        ),
    )
}
