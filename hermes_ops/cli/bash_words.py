"""Completion in bash, which ends a word at each colon: the id of a sweep in a DAG has colons.

bash says `my_dag`, `:`, `ru` where its user has typed `my_dag:ru`, and puts what is answered in the
place of `ru` alone. Where COMP_WORDBREAKS has no colon, words come whole and so are the answers.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, MutableMapping, Sequence

ASKED = ("_HERMES_COMPLETE", "complete_bash")
"""The variable by which the shell's script asks for completions, and its value from bash."""


def answer(complete: Callable[[], None], environment: MutableMapping[str, str]) -> None:
    """Have `complete` see whole words, and print what it prints as bash will put it in.

    COMP_WORDS has bash's words by line, COMP_CWORD the place of the one to complete.
    """
    words, place = environment["COMP_WORDS"].split("\n"), int(environment["COMP_CWORD"])
    if place >= len(words):  # not by line: nothing tells which words were one
        complete()
        return
    whole = joined(words[: place + 1])
    environment.update(COMP_WORDS="\n".join(whole), COMP_CWORD=str(len(whole) - 1))
    there = whole[-1].removesuffix(_typed(words[place]))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            complete()
    finally:
        lines = said.getvalue().splitlines(keepends=True)
        sys.stdout.write("".join(line.removeprefix(there) for line in lines))


def joined(words: Sequence[str]) -> list[str]:
    """The words as they were typed: a colon belongs to the word before it and to that behind it.

    An empty word is a new one.
    """
    found: list[str] = []
    for place, word in enumerate(words):
        if place and word and (_is_colon(word) or _is_colon(words[place - 1])):
            found[-1] += word
        else:
            found.append(word)
    return found


def _is_colon(word: str) -> bool:
    return bool(word) and not word.strip(":")


def _typed(word: str) -> str:
    """What bash replaces: nothing behind a colon, else the word."""
    return "" if _is_colon(word) else word
