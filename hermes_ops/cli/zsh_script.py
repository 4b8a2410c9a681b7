"""Completion in zsh: the script that `--install-completion` and `--show-completion` hand out.

typer's own leaves the first Tab of a new shell unanswered, completes ids from both ends (of two
sweeps `a:x-1` and `a:y-1` it makes `a:-1`), and asks the `hermes` of PATH, whichever was typed.
"""

from __future__ import annotations

SCRIPT = r"""
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
"""Every candidate with its help, in the order of the answer; files where there is none. No space
follows a slash. As a file of its own, which zsh loads at the first Tab, it answers that one too."""


def adopt() -> None:
    """Hand it out from now on."""
    from typer import _completion_shared

    _completion_shared._completion_scripts["zsh"] = SCRIPT
