"""Shell completion: ids of sweeps and trials, names of policies.

All of it is read from the state folder; no service is asked, as a key press must not wait.

bash ends a word at each colon, and the id of a sweep in a DAG has colons: where its user has typed
`my_dag:ru`, bash passes `my_dag`, `:`, `ru` and replaces `ru` alone by the completion. Where
COMP_WORDBREAKS has no colon, words come whole and so are the completions.

zsh gets a script of ours. typer's own leaves the first Tab of a new shell unanswered, completes ids
from both ends (of two sweeps `a:x-1` and `a:y-1` it makes `a:-1`), and asks the `hermes` of PATH,
whichever was typed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path

from hermes_ops.trial.checkpoint_store.store import safe_name

MOST = 50
"""Completions that are offered at most."""


def complete_sweeps(incomplete: str) -> list[str]:
    """Return the sweeps of the state folder whose ids begin with it, newest first."""
    folders = sorted(_children(_home() / "sweeps"), key=lambda p: (-_changed_s(p), p.name))
    return [name for name in map(_sweep_of, folders) if name.startswith(incomplete)][:MOST]


def complete_trials(incomplete: str) -> list[str]:
    """Return each SWEEP/NUMBER that begins with it; before the slash, each SWEEP/."""
    sweep, slash, number = incomplete.partition("/")
    if not slash:
        return [f"{name}/" for name in complete_sweeps(sweep)]
    folder = _home() / "sweeps" / safe_name(sweep) / "trials"
    numbers = sorted(int(p.name) for p in _children(folder) if p.name.isdigit())
    return [f"{sweep}/{n}" for n in numbers if str(n).startswith(number)][:MOST]


def complete_policies(incomplete: str) -> list[str]:
    """Return the policies of a live pool that begin with it."""
    from hermes_ops.policies import live_policies

    return [name for name in live_policies() if name.startswith(incomplete)]


def _sweep_of(folder: Path) -> str:
    """Return the id of a folder's sweep; a name that ends in a digest stands for another id."""
    if re.search(r"-[0-9a-f]{8}$", folder.name):
        log = folder / "decisions.jsonl"
        with contextlib.suppress(OSError, ValueError, KeyError), log.open() as decisions:
            return str(json.loads(decisions.readline())["sweep"])
    return folder.name


def _home() -> Path:
    return Path(os.environ.get("HERMES_HOME") or Path.home() / ".hermes")


def _children(folder: Path) -> Iterator[Path]:
    try:
        yield from (p for p in folder.iterdir() if not p.name.startswith("."))
    except OSError:
        return


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


BASH_REQUEST = ("_HERMES_COMPLETE", "complete_bash")
"""The variable by which the shell's script requests completions, and its value from bash."""


def answer_bash(complete: Callable[[], None], environment: MutableMapping[str, str]) -> None:
    """Run `complete` on whole words, and print of its completions the part that bash inserts.

    `environment` is changed: COMP_WORDS has bash's words by line, COMP_CWORD the index of the one
    to complete.
    """
    words, index = environment["COMP_WORDS"].split("\n"), int(environment["COMP_CWORD"])
    if index >= len(words):  # not by line: nothing tells which words were one
        complete()
        return
    whole = join_words(words[: index + 1])
    environment.update(COMP_WORDS="\n".join(whole), COMP_CWORD=str(len(whole) - 1))
    kept_prefix = whole[-1].removesuffix(_replaced_part(words[index]))
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            complete()
    finally:
        lines = output.getvalue().splitlines(keepends=True)
        sys.stdout.write("".join(line.removeprefix(kept_prefix) for line in lines))


def join_words(words: Sequence[str]) -> list[str]:
    """Return the words as they were typed: a colon joins the word before it and the one after it.

    An empty word starts a new one.
    """
    joined: list[str] = []
    for index, word in enumerate(words):
        if index and word and (_is_colon(word) or _is_colon(words[index - 1])):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _is_colon(word: str) -> bool:
    return bool(word) and not word.strip(":")


def _replaced_part(word: str) -> str:
    """Return what bash replaces of its last word: nothing of a colon, else the word."""
    return "" if _is_colon(word) else word


ZSH_SCRIPT = r"""
#compdef %(prog_name)s

%(complete_func)s() {
  local -a offered shown ending
  local line
  for line in ${(f)"$(env %(autocomplete_var)s=complete_fish _TYPER_COMPLETE_FISH_ACTION=get-args \
      _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" ${~words[1]} 2>/dev/null)"}; do
    offered+=("${line%%%%$'\t'*}")
    shown+=("${line/$'\t'/  -- }")
  done
  (( $#offered )) || { _files; return }
  [[ $offered[1] == */ ]] && ending=(-S '')
  compadd "${ending[@]}" -l -V %(prog_name)s -d shown -a offered
}

if [[ $funcstack[1] == _%(prog_name)s ]]; then
  %(complete_func)s
else
  compdef %(complete_func)s %(prog_name)s
fi
"""
"""Offers every candidate with its help, in the order of the response; files if there is none. No
space follows a slash. If zsh loads it as a file at the first Tab, it completes at that Tab too."""


def install_zsh_script() -> None:
    """Make `--install-completion` and `--show-completion` use our script for zsh."""
    from typer import _completion_shared

    _completion_shared._completion_scripts["zsh"] = ZSH_SCRIPT
