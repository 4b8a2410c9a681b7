"""Which way a metric is better, as far as its name tells."""

from __future__ import annotations

import re

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
