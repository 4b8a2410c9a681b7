"""Warnings on a valid sweep file: likely mistakes, reported before they cost anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hermes_ops.config.files import KeyPath, dotted, printable
from hermes_ops.config.model import Algorithm, SweepConfig
from hermes_ops.config.workers import Workers
from hermes_ops.core.amounts import counted
from hermes_ops.search.feasible import size_of

WARNINGS_TAG = "hermes.warnings"
"""Tag of a sweep's MLflow run: its warnings as a JSON list, as far as a tag holds them."""

MOST_OF_A_TAG = 4_000

_REPEATS = re.compile(r"[*+?{]")
_NO_MATCH, _MATCH_S = 3, 20.0
_MATCH = f"""import re, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
sys.exit(0 if re.fullmatch(sys.argv[1], sys.argv[2]) else {_NO_MATCH})"""


@dataclass(frozen=True, slots=True)
class SweepWarning:
    """One likely mistake: where it stands, what was found, what it leads to, the fix."""

    path: KeyPath
    found: str
    leads_to: str
    fix: str

    def __str__(self) -> str:
        return self.at(None)

    def at(self, line: str | None) -> str:
        """Return the warning in one line, with the place in the file if it is known."""
        return sentence(self.document(), line)

    def document(self) -> dict[str, str]:
        """Return it as a JSON object."""
        return {
            "where": dotted(self.path),
            "found": self.found,
            "leads_to": self.leads_to,
            "fix": self.fix,
        }


def sentence(document: Mapping[str, str], line: str | None = None) -> str:
    """Return a warning's document in one line."""
    where = f"{line} {document['where']}" if line else document["where"]
    return f"{where}: {document['found']}; {document['leads_to']}. Fix: {document['fix']}"


def as_tag(warnings: Sequence[SweepWarning]) -> dict[str, str]:
    """Return the tag of a sweep's run; none without warnings."""
    kept = [warning.document() for warning in warnings]
    while len(text := json.dumps(kept)) > MOST_OF_A_TAG:
        kept.pop()
    return {WARNINGS_TAG: text} if kept else {}


def from_tag(text: str) -> list[dict[str, str]]:
    """Return the documents that a tag holds; an empty list for a tag that is not valid."""
    try:
        documents = json.loads(text or "[]")
    except ValueError:
        return []
    return documents if isinstance(documents, list) else []


def config_warnings(config: SweepConfig, pool_slots: int | None) -> Iterator[SweepWarning]:
    """Yield the warnings that follow from the configuration; `pool_slots`: None if not known."""
    yield from _gpus(config, pool_slots)
    yield from _workers(config)
    yield from _trials(config)
    yield from _direction(config)
    yield from _objective(config)


def never_fits(gpus: int, pool: str, slots: int) -> str | None:
    """Say why no trial with that number of GPUs can ever start in the pool; None if one can."""
    if slots <= 0:
        return f"the pool {pool} has {_none(slots)}: no trial can start while it has none"
    if gpus > slots:
        have = counted(slots, "slot")
        return f"a trial needs {gpus} GPUs and the pool {pool} has {have}: no trial can ever start"
    return None


def _none(slots: int) -> str:
    return "0 slots" if slots == 0 else f"no number of slots ({slots})"


def _gpus(config: SweepConfig, pool_slots: int | None) -> Iterator[SweepWarning]:
    if pool_slots is None:
        return
    gpus, pool = config.trial.gpu_range.least, config.pool
    if pool_slots <= 0:
        found = f"the pool {pool} has {_none(pool_slots)}"
        leads_to = "no trial can start while it has none"
        yield SweepWarning(("pool",), found, leads_to, "give the pool slots, one for each GPU")
    elif gpus > pool_slots:
        found = f"{gpus} GPUs a trial, and the pool {pool} has {pool_slots}"
        fix = f"write `gpus: {pool_slots}` or less, or give the pool {gpus} slots or more"
        yield SweepWarning(("trial", "gpus"), found, "no trial can ever start", fix)


def _workers(config: SweepConfig) -> Iterator[SweepWarning]:
    if config.trial.workers is Workers.ONE_PER_GPU and config.trial.gpu_range.most == 1:
        found = "one_per_gpu for trials of one GPU"
        fix = "write `gpus: 2`, or a range such as `gpus: {min: 1, max: 4}`"
        yield SweepWarning(("trial", "workers"), found, "no trial ever has several workers", fix)


def _trials(config: SweepConfig) -> Iterator[SweepWarning]:
    search = config.search
    size = None if search.algorithm is Algorithm.GRID else size_of(search.to_feasible())
    if size is not None and size < search.max_trials:
        are = "1 configuration" if size == 1 else f"{size:,} configurations"
        found = f"{search.max_trials:,} trials, and the space has {are}"
        leads_to = f"from number {size:,} on configurations are tried again"
        fix = f"write `max_trials: {size}`, or widen the space"
        yield SweepWarning(("search", "max_trials"), found, leads_to, fix)


def _direction(config: SweepConfig) -> Iterator[SweepWarning]:
    objective = config.objective
    if "direction" in objective.model_fields_set or not is_higher_better(objective.metric):
        return
    found = f"no direction for {printable(objective.metric)}, which is better the higher it is"
    leads_to = "without one it is minimised: the worst trial is the best"
    fix = "write `direction: maximize` (or `direction: minimize`, if that is meant)"
    yield SweepWarning(("objective", "direction"), found, leads_to, fix)


def _objective(config: SweepConfig) -> Iterator[SweepWarning]:
    metric, pattern = config.objective.metric, config.trial.metric_pattern
    leads_to = "no line of output can report it: each trial trains to its end and fails"
    if not metric.isprintable() or metric != metric.strip():
        found = (
            f"the name '{printable(metric)}', with blanks or control characters that are not read"
        )
        fix = "write the name as the script prints it, without them"
        yield SweepWarning(("objective", "metric"), found, leads_to, fix)
    elif pattern is not None and not can_name(pattern, metric):
        found = f"a pattern whose group name never is {printable(metric)}"
        fix = "change the pattern, so that its group name is the objective where the script says it"
        yield SweepWarning(("trial", "metric_pattern"), found, leads_to, fix)


def can_name(pattern: str, metric: str) -> bool:
    """Return False if the pattern's group `name` can never be that metric."""
    group = _group(pattern, "name")
    return group is None or _matches(group, metric)


def _matches(pattern: str, text: str) -> bool:
    """Return False if the pattern does not match the whole text; True where that is not known.

    All but the simplest patterns are tried in a separate process: a match may never end.
    """
    if "(" not in pattern and len(_REPEATS.findall(pattern)) < 2:
        try:
            return re.fullmatch(pattern, text) is not None
        except re.error:  # it depends on other groups
            return True
    command = [sys.executable, "-I", "-S", "-c", _MATCH, pattern, text]
    try:
        code = subprocess.run(command, timeout=_MATCH_S, capture_output=True, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return True
    return code.returncode != _NO_MATCH


def _group(pattern: str, name: str) -> str | None:
    """Return what stands in a named group of the pattern, which each match has.

    None where that cannot be told: with flags, looks around or alternatives outside the group.
    """
    if re.search(r"\(\?(?!P<|:)", pattern):
        return None
    before, marker, rest = pattern.partition(f"(?P<{name}>")
    if not marker:
        return None
    end = _closing(rest)
    behind = rest[end + 1 :]
    may_lack = behind.startswith(("?", "*", "{")) or "|" in before + behind
    return None if may_lack else rest[:end]


def _closing(rest: str) -> int:
    """Return the index of the parenthesis that closes the group at whose content `rest` begins."""
    depth, escaped, in_class = 1, False, False
    for place, letter in enumerate(rest):
        if escaped or letter == "\\":
            escaped = not escaped
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter in "()":
            depth += 1 if letter == "(" else -1
        if depth == 0:
            return place
    return len(rest)


HIGHER = re.compile(
    r"acc(uracy)?|(pr|roc)?auc|au(roc|prc)|f[12](score)?|fbeta|precision|recall|r2|m?ap\d*"
    r"|(sacre)?bleu|rouge[12l]?|meteor|chrf|bertscore|rewards?|returns?|m?iou|dice|jaccard|ndcg|mrr"
    r"|hits|psnr|ssim|kappa|mcc|sensitivity|specificity|winrate|top[15]"
)
"""Words of names whose metric is better the higher it is."""

LOWER = re.compile(
    r"loss(es)?|err(ors?)?|nll|neg(ative)?|rate|f[pn]r|regret|cost|distance|perplexity|r?mse|mape"
    r"|mae|time|seconds|s|ms|latency|drop|gap|diff(erence)?|std|var(iance)?|false|miss(es)?"
)
"""Words with which a name says nothing, or the contrary: `accuracy_loss`, `recall_time`."""


def is_higher_better(metric: str) -> bool:
    """Return True if the name is one whose metric is surely better the higher it is."""
    words = words_of(metric)
    return any(map(HIGHER.fullmatch, words)) and not any(map(LOWER.fullmatch, words))


def words_of(metric: str) -> tuple[str, ...]:
    """Return the words of a name in lower case: `val_topKAccuracy` has val, top, k and accuracy.

    A word of capitals alone (`AUC`), `mAP` and `IoU` are one word; digits end a word.
    """
    parts = re.split(r"[^A-Za-z0-9]+", metric.replace("mAP", "Map").replace("IoU", "Iou"))
    words = (w for part in parts for w in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", part))
    return tuple(word.lower() for word in words)
