"""What a terminal gets that knows only ASCII, or Latin-1: signs like ours, and never "?", which says undecided."""

from __future__ import annotations

import codecs
import unicodedata

STAND_INS = "whywait"  # the name of the error handler
_SIGNS = {
    "●": "*", "○": "o", "◐": "~", "◂": "<", "▸": ">", "→": "->", "←": "<-", "↔": "<->", "↑": "^", "↓": "v",
    "–": "-", "—": "-", "−": "-", "×": "x", "·": ".", "…": "...", "≤": "<=", "≥": ">=", "≈": "~", "±": "+/-",
    "≠": "!=", "µ": "u", "μ": "u", "‘": "'", "’": "'", "“": '"', "”": '"', "✓": "ok", "✗": "x", "█": "#",
    "▁": "_", "▂": "_", "▃": "-", "▄": "-", "▅": "=", "▆": "=", "▇": "#", "▏": "|", "◆": "*", "▶": ">",
    "⇄": "<->", "÷": "/", "ψ": "psi", "½": "1/2", "¼": "1/4", "¾": "3/4", "£": "GBP", "¥": "JPY", "₹": "INR",
    "└": "+", "├": "+", "√": "sqrt", "‖": "||", "€": "EUR", "Σ": "sum", "│": "|", "─": "-", "°": " deg",
}  # fmt: skip


def _stand_in(sign: str, encoding: str) -> str:
    if sign in _SIGNS:
        return _SIGNS[sign]
    like = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()  # é → e, a thin space → a space
    return like or sign.encode(encoding, "backslashreplace").decode(encoding)


def _replace(exc: UnicodeError) -> tuple[str, int]:
    if not isinstance(exc, UnicodeEncodeError):
        raise exc
    return "".join(_stand_in(c, exc.encoding) for c in exc.object[exc.start : exc.end]), exc.end


codecs.register_error(STAND_INS, _replace)
