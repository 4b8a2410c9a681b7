"""Parse a number as programs print it: exactly what is written, or not at all."""

from __future__ import annotations

import re
from typing import NamedTuple

_PLAIN = re.compile(
    r"[-+\u2212]?(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", re.ASCII
)
_WORD = re.compile(r"[-+]?(?:nan|inf(?:inity)?)(?!\w|\.\w)", re.IGNORECASE)
_GROUPED = re.compile(r"[-+\u2212]?[1-9][0-9]{0,2}((?:,[0-9]{3})+)(\.[0-9]*)?(?:[eE][-+]?[0-9]+)?")
_WRAPPER = re.compile(
    r"(?:[A-Za-z_]\w{0,40}\.){0,4}"
    r"(?:float\d{0,3}|float_|bfloat16|half|double|longdouble|u?int\d{0,3}"
    r"|[tT]ensor|[aA]rray|ArrayImpl|DeviceArray|Decimal)\(\s{0,4}"
)
_KEYWORDS = re.compile(r"\s{0,4},\s{0,4}[a-z_]{1,40}=")
_GOES_ON = re.compile(r",[0-9]")
_BLANK_GROUP = re.compile(r" [0-9]{3}(?![0-9%])")
_LONE_GROUP = re.compile(r"[-+\u2212]?[1-9][0-9]{0,2}")
_BEHIND = tuple(  # the first that matches what follows a number says why it is not read, or ""
    (re.compile(pattern), refusal)
    for pattern, refusal in (
        (r"$", ""),
        (r"[\u00a0\u2009\u202f][0-9]", "its digits are grouped by blanks"),
        (r"(?:\+/-|\u00b1|\+)[0-9]+\.[0-9]", ""),  # a spread, as of cross-validation
        (
            r"\s?(?:-{1,3}>|=+>|[\u2192\u21d2]|[\u00d7^]\s?\w|\*\w|\*\s?[0-9]|x\s?10(?![0-9])|/\s?[0-9])",
            "it is part of a formula, or one of two values",
        ),
        (r"\s|%|(?:s|sec|secs)(?!\w)|\.{1,3}(?![.\w])", ""),
        (r"[^\W\d]", "a unit follows, or it is no number"),
        (r"\.", "it has two points"),
        (r"'[0-9]", "its digits are grouped"),
        (r"[,;|)\]}>\"'!?(<]", ""),
        (r"[:/+=\\~-]|.?[0-9]", "it is part of something else"),
    )
)
_LONGEST_KEYWORDS = 200

_COMMA = "a comma in a number may be a decimal comma or group thousands"


class Numeral(NamedTuple):
    """The result: a value, or why something that looks like a number is not read.

    `value` is None and `refusal` empty where nothing looks like a number. `end` is the place
    behind it.
    """

    value: float | None
    refusal: str
    end: int


_NOTHING = Numeral(None, "", 0)


def numeral(text: str, at: int) -> Numeral:
    """Return the number that begins at this place of a line.

    Read are numbers of Python, C and JSON, with thousands grouped by commas (`9,500.00`) or `_`,
    and a single number as NumPy, PyTorch, TensorFlow and JAX print it (`np.float64(0.33)`,
    `tensor(0.41, device='cuda:0')`). Behind it `%`, `s` and a spread (`0.41+0.02`) are passed over.
    """
    if at < len(text) and text[at] in "'\"":
        return _quoted(text, at)
    wrapper = _WRAPPER.match(text, at)
    if wrapper is not None:
        number = _wrapped(text, wrapper.end())
    elif text.startswith("<tf.", at):
        number = _tensorflow(text, at)
    else:
        number = _bare(text, at)
    if number.value is None:
        return number
    refusal = _refused_behind(text, at, number.end)
    return Numeral(None, refusal, number.end) if refusal else number


def whole_numeral(text: str) -> Numeral:
    """Return the number that a text is, with nothing but blanks and punctuation around it."""
    stripped = text.strip()
    number = numeral(stripped, 0)
    rest = stripped[number.end :].strip(" \t%.,;:!?)]}|\"'s") if number.value is not None else ""
    if rest:
        return Numeral(None, "there is more than a number", number.end)
    return number


def _bare(text: str, at: int) -> Numeral:
    """Parse the number itself, commas between its digits included."""
    match = _WORD.match(text, at)
    if match is not None:
        return Numeral(float(match.group()), "", match.end())
    match = _PLAIN.match(text, at)
    if match is None:
        return _NOTHING
    end = match.end()
    if text[end : end + 1] in (",", "\uff0c") and text[end + 1 : end + 2].isdigit():
        return _with_commas(text, at, end)
    return Numeral(float(match.group().replace("\u2212", "-")), "", end)


def _with_commas(text: str, at: int, end: int) -> Numeral:
    match = _GROUPED.match(text, at)
    sure = match is not None and (match.group(2) is not None or len(match.group(1)) > len(",000"))
    if match is None or not sure or _GOES_ON.match(text, match.end()):
        return Numeral(None, _COMMA, end)
    digits = match.group().replace(",", "").replace("\u2212", "-")
    return Numeral(float(digits), "", match.end())


def _quoted(text: str, at: int) -> Numeral:
    number = _bare(text, at + 1)
    if number.value is None:
        return number
    behind = text[number.end : number.end + 2]
    if behind[:1] == text[at]:
        return number._replace(end=number.end + 1)
    if behind == "%" + text[at]:
        return number._replace(end=number.end + 2)
    return Numeral(None, "there is more than a number between the quotes", number.end)


def _wrapped(text: str, at: int) -> Numeral:
    """Parse the number of a one-element array, from behind its opening parenthesis."""
    quote = text[at : at + 1] if text[at : at + 1] in ("'", '"') else ""
    bracket = "[" if text[at : at + 1] == "[" else ""
    number = _bare(text, at + len(quote or bracket))
    if number.value is None:
        return number
    end = number.end
    for closing in (quote, "]" if bracket else ""):
        if closing:
            if text[end : end + 1] != closing:
                return Numeral(None, "it is more than one number", end)
            end += 1
    if _KEYWORDS.match(text, end):
        end = _closed(text, end)
    else:
        end += len(text[end : end + 4]) - len(text[end : end + 4].lstrip(" "))
    if text[end : end + 1] != ")":
        return Numeral(None, "it is more than one number", end)
    return number._replace(end=end + 1)


def _closed(text: str, at: int) -> int:
    """Return the index of the parenthesis that closes this one; the text's length without one."""
    depth = 0
    for place in range(at, min(len(text), at + _LONGEST_KEYWORDS)):
        if text[place] == "(":
            depth += 1
        elif text[place] == ")":
            if depth == 0:
                return place
            depth -= 1
    return len(text)


def _tensorflow(text: str, at: int) -> Numeral:
    close = text.find(">", at, at + 400)
    inside = text[at : close if close > 0 else at]
    mark = inside.rfind("numpy=")
    if mark < 0 or "shape=()" not in inside:
        return Numeral(None, "it is more than one number", at + 1)
    number = _bare(text, at + mark + len("numpy="))
    if number.value is None or number.end != close:
        return Numeral(None, number.refusal or "its value is not shown", at + 1)
    return number._replace(end=close + 1)


def _refused_behind(text: str, at: int, end: int) -> str:
    """Return why a number is refused, given what follows it; empty if it is not."""
    if _BLANK_GROUP.match(text, end) and _LONE_GROUP.fullmatch(text, at, end):
        return "its digits may be grouped by blanks"
    return next((why for pattern, why in _BEHIND if pattern.match(text, end)), "")
