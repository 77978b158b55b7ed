"""The scaling rule of each architecture: CompleteP where its assumptions hold, and what replaces it where they don't.

Never put one multiplier on every architecture: LNS contains a depth factor already, so that CompleteP on top of it shrinks
what the model learns per step, and a comparison would find that "the architecture does not help". Here (branch multiplier,
learning rates) follow per architecture from two conditions at first steps: the change of the normalised stream does not
depend on depth, and neither does the non-linear share of a block's change.

Known for Pre-LN from theory and training to 1.5B parameters. All other rules are derivations; `note` says which were
checked by slopes at first steps (width 64, up to 32 blocks) and which are drawn by analogy. None has evidence from training
losses. "Native" means the rule native to the architecture; to train one as published, use `sp` with its learning rate tuned
at every depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scalinglab.errors import ConfigError
from scalinglab.parametrization import BRANCH, NONE, Exponents, Parametrization, scaled

_TESTED = "derived; checked at first steps only"
_ANALOGY = "by analogy, not checked"


@dataclass(frozen=True)
class _Rule:
    """Depth exponents that differ from CompleteP."""

    why: str
    branch: float = -1.0
    depth: Mapping[str, float] = field(default_factory=dict)  # "role.location" -> of the learning rate
    eps: Mapping[str, float] = field(default_factory=dict)  # "role.location" -> of epsilon


_STREAMS = "stream mixing has learning rate 1/m_L (dynamic projections 1/m_N on top)"

_RULES: dict[str, _Rule] = {
    "pre_ln": _Rule("CompleteP: theory and training to 1.5B"),
    "sandwich": _Rule(f"CompleteP, output gains count as branch gains ({_TESTED}: slope +0.09). Init of the last matrix is inert"),
    "lns": _Rule(
        f"c = m_L^-1/2: the 1/sqrt(l) of its norms is the other half ({_TESTED}: slope +0.02); no 1/sqrt(2L) init",
        branch=-0.5,
        eps={"matrix.branch": -1.0, "vector.branch": -1.0},
    ),
    "post_ln": _Rule(f"c inside the norm, gains on the trunk 1/m_L ({_TESTED}: slope -0.14). c changes the architecture"),
    "deepnorm": _Rule(
        f"its own alpha and beta (as ratios to the base depth), learning rate m_L^-1/2 ({_TESTED}: slope -0.01; non-linear share "
        "falls as m_L^-1/4, mildly lazy; with SwiGLU beta acts on three matrices and the slope is -0.18). Gains on the trunk 1/m_L by "
        "analogy with Post-LN",
        branch=0.0,
        depth={"matrix.branch": -0.5, "vector.branch": -0.5},
        eps={"matrix.branch": -0.5, "vector.branch": -0.5},
    ),
    "keel": _Rule(f"its own alpha = 2L is the branch factor 1/m_L already; gains on the trunk 1/m_L ({_ANALOGY} to Post-LN)",
                  branch=0.0),
    "mix_ln": _Rule(f"as Post-LN in its first blocks and Pre-LN in the others ({_ANALOGY})"),
    "hyper_connections": _Rule(f"CompleteP; {_STREAMS} ({_TESTED} for the static form: slope -0.05)"),
    "hyper_connections_static": _Rule(f"CompleteP; {_STREAMS} ({_TESTED}: slope -0.05)"),
    "mhc": _Rule(f"CompleteP; {_STREAMS} ({_ANALOGY} to hyper-connections)"),
    "denseformer": _Rule(
        f"CompleteP; averages over depth have learning rate m_L^-2, for there are L^2 of them ({_TESTED}: slope -0.05; m_L^-1 "
        "will do over small ranges)",
        depth={"vector.trunk": -2.0},
    ),
    "attn_res": _Rule(
        "CompleteP on the values; queries, which sum over the width, have learning rate 1/m_N and no depth factor, as a branch "
        f"matrix has ({_TESTED}: slope -0.05)"
    ),
    "block_attn_res": _Rule(f"as attn_res ({_ANALOGY})"),
    "moda": _Rule(f"CompleteP; the key and value projections of the depth cache count as branch matrices ({_ANALOGY})"),
    "layerscale": _Rule(
        "CompleteP; the scale counts as a branch gain. Derived and checked, not confirmed: slope -0.33 from scales of 1e-4, a pass from scales of 1"
    ),
    "looped": _Rule(f"CompleteP with m_L counting blocks as run, not as stored ({_ANALOGY}); epsilon must be inert"),
}  # fmt: skip

NATIVE: tuple[str, ...] = tuple(_RULES)


def native(architecture: str) -> Parametrization:
    """The rule to use with an architecture.

    Raises
    ------
    ConfigError
        No rule was derived for it; lists those there are.

    Examples
    --------
    >>> native("lns").table["branch_multiplier"].depth, native("denseformer").table["vector.trunk.lr"].depth
    (-0.5, -2.0)
    """
    if architecture not in _RULES:
        raise ConfigError(
            f"no scaling rule was derived for architecture {architecture!r}; there are rules for {', '.join(_RULES)}. "
            "Use sp with the learning rate tuned at every depth, and say so"
        )
    rule, table = _RULES[architecture], dict(scaled(1.0).table)
    table[BRANCH] = Exponents(depth=rule.branch)
    for tag, depth in rule.depth.items():
        table[f"{tag}.lr"] = replace(table[f"{tag}.lr"], depth=depth)
        if table[f"{tag}.weight_decay"] != NONE:
            table[f"{tag}.weight_decay"] = replace(table[f"{tag}.weight_decay"], depth=-depth)
    for tag, depth in rule.eps.items():
        table[f"{tag}.eps"] = replace(table[f"{tag}.eps"], depth=depth)
    return replace(scaled(1.0), name=f"native({architecture})", table=table, alpha=-rule.branch, note=rule.why)
