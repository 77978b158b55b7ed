"""From a valid file to a hostile one: bytes flipped and cut, cells and JSON values replaced, structure taken to extremes."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = (
    "nan", "NaN", "inf", "-inf", "1e308", "1e309", "-1e308", "5e-324", "1e-400", "0", "-0.0", "-1", "9" * 400, "9" * 5000,
    "9" * 10_000, "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1_000", "0x10", "1e+", "١٢٣", "½",
    "2024-01-31", "2024-01-31T12:00:00Z", "45322", "TRUE", "1,5", "1e308e308", "--1", "+5", "1j", "Infinity", "1d5", " 7 ",
)  # fmt: skip
TEXTS = (
    "", " ", "a", "NA", "None", "=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "''=1", "＝1+1",
    "=HYPERLINK(\"http://x\")", "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "../../../etc/passwd", "/etc/passwd",
    "..\\..\\x", "a/b", "a\x00b", "\x00", "\u202egnp.exe", "\u2066x\u2069", "\ufeff", "\ufeff=1", "\ud800", "\udfff\ud800", "e\u0301",
    "ﬁ", "ǅ", "𝟙𝟚", "\U0001f4a9", "\u2028", "\x1b[31mred\x1b[0m", "\x85", "\n", "a\nb", "\r\n", "\"", "''", "`", "$x$", "$", "$\\frac$",
    "\\", "%s%n", "{0}", "{}", "{a.__class__}", "__import__('os').system('true')", "params", "loss", "run_id", "x" * 300, "x" * 70_000,
    "pre_ln", "diverged", "nan", "inf", "con", "-", "--out", "#", "# x", "a - loss", "run: x - val/loss", ";", ",", "|", "&amp;",
)  # fmt: skip
NAMES = (
    "loss", "val_loss", "train/loss", "params", "params_total", "params_backbone", "tokens", "depth", "width", "heads", "ffn_dim",
    "vocab", "context", "run_id", "architecture", "seed", "step", "_step", "lr", "status", "split", "eval_dataset", "config",
    "config.n_layer", "L", "N", "D", "C", "aspect", "flops", "match_group", "parametrization", "ppl", "bpb", "key",
)  # fmt: skip


def number(rng: Random) -> str:
    return rng.choice(NUMBERS) if rng.random() < 0.7 else repr(rng.uniform(-1, 1) * 10.0 ** rng.randint(-300, 300))


def text(rng: Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randint(0, 127), rng.randint(0, 0x2FFF), rng.randint(0, 0x10FFFF))))
        for _ in range(rng.randint(1, 12))
    )


def word(rng: Random) -> str:
    return rng.choice((number, text, lambda r: r.choice(NAMES)))(rng)


def scramble(rng: Random, data: bytes, most: int = 6) -> bytes:
    """Bytes with a few random edits: flips, cuts, copies, insertions, joins, another encoding."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, most))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(12)
        if kind == 0 and out:
            out[at - 1] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[at:]
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 4, 16, 200))]
        elif kind == 3:
            out[at:at] = word(rng).encode("utf-8", "surrogatepass")
        elif kind == 4:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8))))
        elif kind == 5 and out:
            start = rng.randrange(len(out))
            out[at:at] = out[start : start + rng.choice((1, 10, 100))]
        elif kind == 6:
            out[at:at] = rng.choice(
                (
                    b",",
                    b";",
                    b"\t",
                    b'"',
                    b"'",
                    b"\n",
                    b"\r",
                    b"\r\n",
                    b"{",
                    b"}",
                    b"[",
                    b"]",
                    b":",
                    b"\x00",
                    b"#",
                    b"\\",
                )
            )
        elif kind == 7 and out:
            out[at - 1 : at] = rng.choice((b"\xff", b"\x00", b"\xc0\x80", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"0", b"9"))
        elif kind == 8 and rng.random() < 0.1:
            out[at:at] = rng.choice((b"(", b"[", b"{", b'"', b",", b"-", b"9", b'{"a":', b"[["))[:4] * 10_000
        elif kind == 9 and rng.random() < 0.2:
            out[:0] = rng.choice(
                (
                    b"\xef\xbb\xbf",
                    b"\xff\xfe",
                    b"\xfe\xff",
                    b"PK\x03\x04",
                    b"\x1f\x8b",
                    b"PAR1",
                    b"\x80\x04",
                    b"# c\n",
                    b"\n\n",
                )
            )
        elif kind == 10 and rng.random() < 0.1:
            out = bytearray(
                bytes(out)
                .decode("utf-8", "replace")
                .encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "cp037")), "replace")
            )
        elif kind == 11 and rng.random() < 0.2:
            out += bytes(out)
    return bytes(out)


def cells(rng: Random, rows: list[list[str]]) -> list[list[str]]:
    """A table of texts (its first row names the columns) with cells, names, rows and columns changed."""
    out = [list(r) for r in rows]
    for _ in range(rng.choice((0, 0, 1, 1, 1, 2, 2, 3, 5))):
        r, kind = rng.randrange(len(out)), rng.randrange(10)
        if not out[r]:
            continue
        c = rng.randrange(len(out[r]))
        if kind <= 3:
            out[r][c] = word(rng)
        elif kind == 4:
            out[0][rng.randrange(len(out[0]))] = rng.choice(
                (rng.choice(NAMES), rng.choice(NAMES), word(rng), word(rng), rng.choice(out[0]))
            )
        elif kind == 5:
            value = word(rng)
            for row in out[1:]:
                row[c : c + 1] = [value]
        elif kind == 6:
            del out[r][c]
        elif kind == 7:
            out.insert(r, list(out[r]))
        elif kind == 8:
            for row in out:
                row.insert(min(c, len(row)), row[min(c, len(row) - 1)] if row else "")
        elif len(out) > 1:
            del out[rng.randrange(1, len(out))]
        if not out[0]:
            out[0] = ["loss"]
    return out


def value(rng: Random, depth: int = 0) -> Any:
    """A JSON value of any kind."""
    kind = rng.randrange(12)
    if kind < 3:
        return text(rng)
    if kind < 5:
        return rng.choice((0, 1, -1, 2**31, 2**63, 2**64, -(2**70), 10**300, 10**400, 10**4000))
    if kind < 7:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, 5e-324, 0.0, -0.0, 1.5))
    if kind == 7:
        return rng.choice((None, True, False))
    if kind == 8:
        return number(rng)
    if depth > 3:
        return []
    if kind == 9:
        return [value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {
        rng.choice((rng.choice(NAMES), "value", "desc", text(rng))): value(rng, depth + 1)
        for _ in range(rng.randint(0, 3))
    }


def altered(rng: Random, document: Any, changes: int | None = None) -> Any:
    """A JSON document with values replaced, taken out, doubled or renamed at random places."""
    out = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 4)) if changes is None else changes):
        node: Any = out
        while True:
            if isinstance(node, dict) and node:
                key: Any = rng.choice(list(node))
            elif isinstance(node, list) and node:
                key = rng.randrange(len(node))
            else:
                break
            if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
                node = node[key]
                continue
            kind = rng.randrange(8)
            if kind <= 3:
                node[key] = value(rng)
            elif kind == 4:
                del node[key]
            elif kind == 5 and isinstance(node, dict):
                node[rng.choice((rng.choice(NAMES), text(rng)))] = node.pop(key)
            elif kind == 6 and isinstance(node, list):
                node.append(node[key])
            elif isinstance(node, dict):
                node[rng.choice((rng.choice(NAMES), text(rng)))] = value(rng)
            else:
                node[key] = value(rng)
            break
    return out


def json_bytes(rng: Random, document: Any, *, lines: bool = False) -> bytes:
    """The document as JSON in one of several spellings, surrogates included; now and then nested without end."""
    try:
        made = json.dumps(
            document, ensure_ascii=rng.random() < 0.5, indent=None if lines else rng.choice((None, None, 1))
        )
    except ValueError:  # integers of more than 4,300 digits
        made = "{" + '"a":' + "9" * 10_000 + "}"
    if rng.random() < (0.004 if lines else 0.03):
        depth = rng.choice((100, 1_000, 10_000, 100_000))
        deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth))
        made = made.replace(rng.choice(("null", "1", "0", '""')), deep, 1)
    return made.encode("utf-8", rng.choice(("surrogatepass", "replace")))
