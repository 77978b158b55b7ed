"""The sections of the page, in reading order: what is claimed, what it rests on, what would change it, all the numbers."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from scalinglab.depth_benefit.phrasing import beyond
from scalinglab.report.figures.benefit import decimals
from scalinglab.report.html import arms as held
from scalinglab.report.html.elements import Child, el, table
from scalinglab.report.html.graphics import strip_chart
from scalinglab.report.html.wording import SEVERITIES, SIGNS, Wording, and_list, worded, wording
from scalinglab.report.style import count_label
from scalinglab.report.tables import p_value

if TYPE_CHECKING:
    from scalinglab.depth_benefit import DepthReport
    from scalinglab.depth_benefit.effects import Effect

MINUS = "\N{MINUS SIGN}"
_UNSHOWN = "not stated"
_FEW = 5  # sentences shown at once
_ROWS = 24  # of a table that is shown at once
_LOSSES = frozenset({
    "estimate", "se", "low", "high", "low90", "high90", "difference", "shrunken", "dgamma1", "dgamma2", "correction",
})  # fmt: skip


def section(name: str, title: str, *children: Child, lead: str = "") -> ET.Element:
    """A titled section of the page."""
    head = el("h2", title, id=f"{name}-head")
    return el(
        "section", head, el("p", lead, class_="lead") if lead else None, *children, id=name, aria_labelledby=f"{name}-head"
    )  # fmt: skip


# ---- the answer --------------------------------------------------------------------------------------------------------
def masthead(report: DepthReport, effects: list[Effect]) -> ET.Element:
    """Question, what was compared, and the answer in one sentence per kind of label."""
    runs = report.intake.runs
    facts = [
        (f"{len(runs)}", "runs"), (f"{len(report.verdicts)}", "architectures"),
        (str(runs.drop_duplicates(["depth", "width"]).shape[0]), "shapes"), (_seeds(report), "seeds per shape"),
    ]  # fmt: skip
    if effects:
        c = effects[0].contrast
        facts += [
            (count_label(c.get("params", math.nan)), "parameters"),
            (count_label(c.get("tokens", math.nan)), "tokens"),
        ]
    if len(report.intake.lost):
        facts.append((str(len(report.intake.lost)), "lost runs"))
    return el(
        "header", el("p", "Depth report", class_="kicker"), el("h1", "Does depth help?"),
        el("p", _question(report, effects), class_="question"),
        el("ul", [el("li", a) for a in answers(report)], class_="answers"),
        el("dl", [el("div", el("dt", k), el("dd", v)) for v, k in facts if v], class_="facts"),
    )  # fmt: skip


def answers(report: DepthReport) -> list[str]:
    """What the labels say, one sentence per label, claims first; then whether architectures differ."""
    by_words: dict[Wording, list[str]] = {}
    for a, v in report.verdicts.items():
        by_words.setdefault(worded(v.label, v), []).append(a)
    claims = {"better": 0, "worse": 1, "equal": 2, "open": 3, "refused": 4}
    out = []
    for words in sorted(by_words, key=lambda w: claims[w.tone]):
        names = by_words[words]
        all_of_many = len(names) == len(report.verdicts) > 2
        if words.tone == "refused":
            of = "No claim for " + (f"any of the {len(names)} architectures" if all_of_many else and_list(names))
        else:
            of = f"All {len(names)} architectures" if all_of_many else and_list(names)
        out.append(f"{of}: {words.short[0].lower()}{words.short[1:]}. {words.tells}")
    if len(report.verdicts) > 1:
        told = wording(report.study).short
        if report.study == "ARCH_DEPENDENT" and report.gate is not None:
            apart = report.gate.contrasts
            apart = apart[(apart["low"] > 0) | (apart["high"] < 0)]
            told += f": {and_list([str(a) for a in apart.index])} differ{'s' if len(apart) == 1 else ''} from {report.gate.reference}"
        learning = report.study == "ARCH_UNRESOLVED" and report.study_reason.startswith("learning rates")
        out.append(told + (": learning rates may explain what the tests say." if learning else "."))
    return out


def _question(report: DepthReport, effects: list[Effect]) -> str:
    if not effects:
        return "These runs hold no depth contrast; what they lack is said below."
    c = effects[0].contrast
    what = {
        "E1": "at equal parameters and tokens", "E1s": "per e-fold of depth, at equal parameters and tokens",
        "E2": "at equal training FLOPs",
    }[report.options.estimand]  # fmt: skip
    return (
        f"Loss of {c.get('depth_shallow', math.nan):.3g} against {c.get('depth_deep', math.nan):.3g} blocks {what}. "
        "Positive: deeper is better."
    )


def _seeds(report: DepthReport) -> str:
    counts = report.intake.runs.groupby(["architecture", "group", "depth", "width"]).size()
    if not len(counts):
        return ""
    return f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()}\N{EN DASH}{counts.max()}"


def cards(report: DepthReport, effects: list[Effect]) -> ET.Element:
    """One card per architecture: label in words and as code, effect with interval, why, how stable."""
    first = {e.architecture: e for e in reversed(effects)}
    ends = [abs(v) for e in first.values() for v in e.interval(0.95) if math.isfinite(v)]
    reach = 1.04 * max(ends, default=1.0)
    reasons = {v.reason for v in report.verdicts.values()}
    shared = next(iter(reasons)) if len(reasons) == 1 and len(report.verdicts) > 1 else ""
    digits = decimals([e.se for e in first.values()])
    made = [_card(report, a, first.get(a), reach, digits, bool(shared)) for a in report.verdicts]
    told = el("p", f"All {len(made)}: {_sentence(shared)}", class_="shared") if shared else None
    return el("div", told, el("div", made, class_="cards"))


def _card(report: DepthReport, a: str, effect: Effect | None, reach: float, digits: int, brief: bool) -> ET.Element:
    v = report.verdicts[a]
    words = worded(v.label, v)
    reference = (
        el("span", "reference", class_="tag") if a == report.options.reference and len(report.verdicts) > 1 else None
    )
    parts: list[Child] = [
        el("h3", a, " ", reference),
        el(
            "p",
            el("span", SIGNS[words.tone], aria_hidden="true", class_="sign"),
            words.short,
            class_=f"badge {words.tone}",
        ),
    ]
    if effect is not None and effect.usable:
        low, high = effect.interval(0.95)
        unit = "nats" if effect.unit == "nats" else "nats per e-fold"
        parts += [
            el("p", el("strong", signed(effect.estimate, digits)), f" {unit} ",
               el("span", f"95 % [{signed(low, digits)}, {signed(high, digits)}]", class_="ci"), class_="effect"),
            strip_chart(effect.estimate, low, high, *effect.interval(0.90), margin=margin_of(report), reach=reach,
                        tone="better" if effect.estimate >= 0 else "worse"),
        ]  # fmt: skip
        worth = _worth(report, effect)
        if worth:
            parts.append(el("p", worth, class_="worth"))
    if not brief:
        parts.append(el("p", _sentence(v.reason)))
    if v.label != v.reading:
        parts.append(el("p", "The intervals alone would say: ", el("b", wording(v.reading).short.lower()), "."))
    also = [f"{worded(k, v).short.lower()} ({why})" for k, why in v.also.items()]
    if also:
        parts.append(el("p", "Also: ", "; ".join(also), "."))
    modifiers = [wording(m).short for m in v.modifiers]
    parts.append(el("p", " · ".join([*modifiers, v.robustness]), class_="foot"))
    parts.append(el("p", [[el("code", c), " "] for c in v.codes], class_="codes"))
    return el("article", parts, class_=f"card {words.tone}")


def margin_of(report: DepthReport) -> float:
    """The margin in the unit of the effects that labels are about."""
    if report.outcome is None:
        return math.nan
    own = (e for e in report.outcome.effects if e.estimand == report.options.estimand)
    return next((e.of_gap(report.outcome.margin) for e in own), math.nan)


def _worth(report: DepthReport, effect: Effect) -> str:
    outcome = report.outcome
    if outcome is None or effect.unit != "nats" or not outcome.screen.compute > 0:
        return ""
    logs = [v / outcome.screen.compute for v in (effect.estimate, *effect.interval(0.95))]
    share = [beyond(v) or percent(math.expm1(v)) for v in logs]
    told = f"worth {share[0]} compute [{share[1]}, {share[2]}]"
    return told + (", at borrowed rates" if outcome.screen.borrowed else "")


# ---- what it rests on -----------------------------------------------------------------------------------------------------
def cautions(report: DepthReport) -> ET.Element:
    """Design notes, what both arms hold equal, and every warning with its code."""
    order = list(SEVERITIES)
    said = sorted(report.warnings, key=lambda w: order.index(w.severity) if w.severity in order else len(order))
    items = [
        el("li", el("span", SEVERITIES.get(w.severity, w.severity), class_=f"severity {w.severity}"), " ",
           el("code", w.code), el("p", _sentence(w.message)), class_=w.severity)
        for w in said
    ]  # fmt: skip
    notes = held.design_notes(report)
    rows = held.arms(report)
    return section(
        "cautions", "What to keep in mind",
        el("ul", [el("li", n) for n in notes], class_="notes") if notes else None,
        _arms(report, rows) if rows else None,
        el("ul", items, class_="warnings") if items else el("p", "No warnings."),
        lead="What the design holds equal and what it doesn't; every warning of the analysis with its code.",
    )  # fmt: skip


def _arms(report: DepthReport, rows: list[held.Held]) -> ET.Element:
    assert report.outcome is not None
    c = next(iter(report.outcome.effects)).contrast
    frame = pd.DataFrame({
        "": [h.name for h in rows],
        f"{c['depth_shallow']:.3g} blocks": [_big(h.shallow) for h in rows],
        f"{c['depth_deep']:.3g} blocks": [_big(h.deep) for h in rows],
        "difference": [percent(h.change) for h in rows],
        "held": ["equal" if h.equal else "not equal" for h in rows],
    })  # fmt: skip
    made = table(frame, "The two shapes that are compared (equal: within 1 %)", class_="arms")
    for row, h in zip(made.iterfind(".//tbody/tr"), rows, strict=True):
        row.set("class", "same" if h.equal else "changed")
    return made


def interaction(report: DepthReport, figure: Child) -> ET.Element:
    """Does the gap depend on the architecture: figure, joint test, simultaneous contrasts."""
    frame = report.tables["T4"]
    told = report.sentences.get("interaction", "")
    contrasts: Child = None
    if len(frame):
        contrasts = table(
            _shown(frame, {
                "architecture": "architecture", "difference": "difference (nats)", "low": "low", "high": "high",
                "p_max_t": "p (max-t)", "shrunken": "shrunken", "dgamma1": "Δγ₁", "dgamma2": "Δγ₂",
            }, 4), f"Difference of the depth benefit from {frame['reference'].iloc[0]}, simultaneous 95 % limits",
        )  # fmt: skip
    several = len(report.verdicts) > 1
    lead = "That one architecture's effect is significant and another's isn't is no difference; the joint test is."
    return section(
        "interaction", "Loss against shape" + (", and whether architectures differ" if several else ""), figure,
        el("p", told) if told else None, contrasts, lead=lead if several else "",
    )  # fmt: skip


def robustness(report: DepthReport, figure: Child) -> ET.Element:
    """Specification curve, and the grid of labels: re-analyses by architecture."""
    frame = report.tables["T6"]
    own = [a for a in report.verdicts if (frame["architecture"] == a).any()] if len(frame) else []
    if not own:
        return section("robustness", "Does the label survive other choices?", el("p", "No re-analysis was made."))
    body = []
    for name in dict.fromkeys(frame.loc[frame["architecture"].isin(own), "analysis"]):
        cells: list[Child] = [el("th", str(name), scope="row")]
        for a in own:
            rows = frame[(frame["analysis"] == name) & (frame["architecture"] == a) & (frame["label"] != "")]
            cells.append(_grid_cell(report, a, rows.iloc[0]) if len(rows) else el("td", "\N{EN DASH}", class_="none"))
        body.append(el("tr", cells))
    stable = [el("td", f"{report.verdicts[a].stable} of {report.verdicts[a].analyses}") for a in own]
    grid = el(
        "table", el("caption", "Label and estimate of every re-analysis; marked where the label changes. In brackets: isn't counted, as it leaves label and estimate as they are or can't be made with this design"),
        el("thead", el("tr", el("th", "re-analysis", scope="col"), [el("th", a, scope="col") for a in own])),
        el("tbody", body), el("tfoot", el("tr", el("th", "label stable in", scope="row"), stable)), class_="grid",
    )  # fmt: skip
    failed = frame[frame["architecture"] == ""]
    notes = el("ul", [el("li", f"{r.analysis}: {r.note}") for r in failed.itertuples()], class_="small") if len(failed) else None  # fmt: skip
    return section(
        "robustness", "Does the label survive other choices?", figure,
        el("div", grid, class_="scroll", role="region", tabindex="0", aria_label="Robustness grid"), notes,
        lead="The same question under every other defensible choice.",
    )  # fmt: skip


def _grid_cell(report: DepthReport, a: str, row: pd.Series) -> ET.Element:
    label = str(row["label"])
    same = label == report.verdicts[a].label
    words = wording(label)
    value = signed(float(row["estimate"])) if math.isfinite(float(row["estimate"])) else "\N{EN DASH}"
    return el(
        "td", el("span", SIGNS[words.tone], aria_hidden="true", class_=f"sign {words.tone}"), " ",
        value if row["counts"] else f"({value})",
        el("span", f" {label}", class_="label"), class_="same" if same else "changed", title=f"{label}: {row['note']}",
    )  # fmt: skip


def change(report: DepthReport, figure: Child, told: str) -> ET.Element:
    """What would change the verdict: advice grouped by what is to be done, power."""
    groups: dict[str, list[str]] = {}
    for text in report.advice:
        who = next((a for a in report.verdicts if text.startswith(f"{a}: ")), "")
        groups.setdefault(text.removeprefix(f"{who}: ") if who else text, []).append(who)
    items = [
        el("li", _sentence(what), el("span", f" {and_list([w for w in who if w])}", class_="who") if any(who) else None)
        for what, who in groups.items()
    ]  # fmt: skip
    return section(
        "change", "What would change the verdict", el("ul", items, class_="advice") if items else
        el("p", "Nothing is asked for: each label is a claim that the design bears, and no re-analysis is owed."),
        el("p", told) if told else None, figure,
    )  # fmt: skip


# ---- all the numbers -----------------------------------------------------------------------------------------------------
def effects_table(report: DepthReport) -> ET.Element | None:
    """Table T3, shortened to what people quote."""
    frame = report.tables["T3"]
    if not len(frame):
        return None
    shown = _shown(frame, {
        "architecture": "architecture", "estimand": "estimand", "variant": "variant", "contrast": "depths",
        "estimate": "estimate", "unit": "unit", "se": "SE", "df": "df", "low": "low", "high": "high", "p": "p",
        "p_holm": "p (Holm)", "low90": "low 90 %", "high90": "high 90 %", "compute_percent": "compute, %",
        "correction": "corrected by", "label": "label",
    }, 4)  # fmt: skip
    return details("All effects", table(shown, "Effects with 95 % limits"))


def audit(report: DepthReport) -> ET.Element:
    """Data audit: table T1, and T7 where runs were lost."""
    shown = _shown(report.tables["T1"], {
        "architecture": "architecture", "tier": "group", "depth": "depth", "width": "width", "params": "N",
        "params_total": "N total", "tokens": "D", "loss": "loss", "loss_sd": "SD of seeds", "seeds_finished": "finished",
        "seeds_diverged": "lost", "schedule_finished": "schedule finished", "lr_grid": "LR", "lr_interior": "best LR inside its grid",
        "tokens_per_param": "D / N", "flops_causal": "FLOPs (causal)", "heads": "heads", "ffn_dim": "FFN",
    })  # fmt: skip
    made = table(shown, "One row per architecture and shape")
    parts: list[Child] = [made if len(shown) <= _ROWS else details(f"{len(shown)} shapes of architectures", made)]
    if len(report.intake.lost) and len(report.tables["T7"]):
        parts.append(table(_shown(report.tables["T7"], {c: c.replace("_", " ") for c in report.tables["T7"]}), "Lost runs and what they could change"))  # fmt: skip
    return section("audit", "Data audit", parts)


def laws(report: DepthReport) -> ET.Element | None:
    """Law parameters (T2), their comparison (T5) and rival explanations, where there are any."""
    parts: list[Child] = []
    if report.rivals:
        parts.append(
            _list(
                {
                    k.replace("kaplan/", "shape hardly matters, ")
                    .replace("misscaling/", "merely mis-scaled, ")
                    .replace("/", ", "): v
                    for k, v in report.rivals.items()
                }
            )
        )
    for name, caption in (("T2", "Parameters of the law"), ("T5", "Laws compared by runs left out")):
        frame = report.tables[name]
        if len(frame):
            parts.append(table(_shown(frame, {c: c.replace("_", " ") for c in frame}), caption))
    return section("laws", "Laws and rival explanations", parts) if parts else None


def words(report: DepthReport) -> ET.Element:
    """Sentences for a paper, and the reporting checklist."""
    said = [text for key, text in report.sentences.items() if not key.startswith("label/")]
    joint = [report.sentences[k] for k in ("interaction",) if report.sentences.get(k)]
    first, rest = (said, []) if len(said) <= _FEW else (joint, [t for t in said if t not in joint])
    parts: list[Child] = [el("ul", [el("li", t) for t in first], class_="sentences")] if first else []
    if rest:
        more = el("ul", [el("li", t) for t in rest], class_="sentences")
        parts.append(details(f"{len(rest)} sentences on single architectures", more))
    if report.deviations:
        parts += [el("h3", "Departures from the preregistration"), el("ul", [el("li", d) for d in report.deviations])]
    groups = [
        el("div", el("h3", head[0].upper() + head[1:]), _list(dict(entries)), class_="check") for head, entries in report.checklist.items()
    ]  # fmt: skip
    if groups:
        parts.append(details("Reporting checklist, filled in from the runs", el("div", groups, class_="checklist")))
    return section(
        "words", "In sentences, and the checklist", parts, lead="Ready to quote. Absence of an effect is never claimed."
    )


def provenance(report: DepthReport) -> ET.Element:
    """Hashes and conventions: what exactly was analysed, by what."""
    r = report.result
    entries = {
        "data (SHA-256)": r["data_hash"], "preregistration (SHA-256)": r["prereg_hash"] or "none",
        "scalinglab": r["code_version"], "created": r["created"], "result schema": r["schema_version"],
        **{f"convention: {k}": str(v) for k, v in r["conventions"].items()},
    }  # fmt: skip
    return section("provenance", "Provenance", _list({k: str(v) for k, v in entries.items()}))


def details(summary: str, *children: Child) -> ET.Element:
    """A part that opens on demand, and on paper."""
    return el("details", el("summary", summary), *children)


def _list(entries: Mapping[str, str]) -> ET.Element:
    return el(
        "dl",
        [el("div", el("dt", k), el("dd", v, class_="missing" if v == _UNSHOWN else None)) for k, v in entries.items()],
        class_="entries",
    )


# ---- numbers ---------------------------------------------------------------------------------------------------------------
def signed(value: float, digits: int = 4) -> str:
    """A loss difference with its sign and so many decimals."""
    if not math.isfinite(value):
        return "unbounded" if math.isinf(value) else "?"
    return f"{value:+.{digits}f}".replace("-", MINUS)


def percent(share: float) -> str:
    """A relative difference as a signed percentage, two digits."""
    if not math.isfinite(share):
        return "?"
    value = 100 * share
    told = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}" if abs(value) >= 0.05 else "0"
    return told.replace("-", MINUS) + "\N{NO-BREAK SPACE}%"


def _big(value: float) -> str:
    return count_label(value) if value < 1e15 else f"{value:.3g}"


def _shown(frame: pd.DataFrame, columns: Mapping[str, str], digits: int | None = None) -> pd.DataFrame:
    """Columns with their headings; those without any value are left out, counts and p-values are written as such."""
    out = {}
    for column, head in columns.items():
        if column not in frame or frame[column].isna().all() or (frame[column].astype(str) == "").all():
            continue
        values = frame[column]
        if column in ("params", "params_total", "tokens", "flops_causal"):
            values = pd.Series([_big(float(v)) if pd.notna(v) else None for v in values], dtype=object)
        elif column in ("p", "p_holm", "p_max_t", "sign_flip_p", "worst_rank_p"):
            values = pd.Series([p_value(float(v)) if pd.notna(v) else None for v in values], dtype=object)
        elif column in _LOSSES and digits is not None:
            told = [f"{v:.{digits}f}".replace("-", MINUS) if pd.notna(v) else None for v in values]
            values = pd.Series(told, dtype=object)
        out[head] = values.reset_index(drop=True)
    return pd.DataFrame(out)


def _sentence(text: str) -> str:
    text = text.strip().replace(" %", "\N{NO-BREAK SPACE}%")
    return text[:1].upper() + text[1:] + ("" if text[-1:] in ".!?" else ".")
