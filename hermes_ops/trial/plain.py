"""Plain data: what can be written down and put back without knowing any class."""

from __future__ import annotations

import collections
from typing import Any

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST_ITEMS = 100_000
_MOST_BYTES = 2 << 20  # a larger array is data; an order of samples may be longer
_MOST_INDEX_BYTES = 16 << 20


def is_plain(value: Any, depth: int = 6) -> bool:  # noqa: ANN401 - any object may be asked about
    """Whether a value is data through and through: numbers, text, arrays and containers of them."""
    if isinstance(value, _PLAIN):
        return True
    if depth == 0:
        return False
    kind = type(value)
    if kind.__module__ == "numpy":
        return not getattr(value, "dtype", None) == object  # noqa: SIM201, E721
    if kind in (list, tuple, set, frozenset, collections.deque):
        return all(is_plain(item, depth - 1) for item in value)
    if kind in (dict, collections.OrderedDict, collections.defaultdict):
        return all(is_plain(k) and is_plain(v, depth - 1) for k, v in value.items())
    return False


def is_small(value: Any) -> bool:  # noqa: ANN401 - any object may be asked about
    """Whether plain data are little enough to be kept with every checkpoint."""
    left = _MOST_ITEMS
    queue = [value]
    while queue:
        item = queue.pop()
        left -= 1
        size = getattr(item, "nbytes", None)
        if size is not None:
            is_index = getattr(item.dtype, "kind", "") in "iu"
            if size > (_MOST_INDEX_BYTES if is_index else _MOST_BYTES):
                return False
        elif isinstance(item, dict):
            queue.extend(item.values())
        elif isinstance(item, (list, tuple, set, frozenset, collections.deque)):
            if len(item) > left:
                return False
            queue.extend(item)
        if left < 0:
            return False
    return True
