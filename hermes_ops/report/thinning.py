"""Long curves with fewer points, that look the same."""

from __future__ import annotations

from collections.abc import Collection

from hermes_ops.core.summary import CurvePoints


def thinned(points: CurvePoints, most: int, keep: Collection[int] = ()) -> CurvePoints:
    """Return about `most` points at the most (at least 4), in their order.

    The ends, the least and the most value of each stretch, and the points at the steps of `keep`
    stay. A curve with no more points is returned as it is.
    """
    if len(points) <= most:
        return points
    stretch = -(-len(points) // max(1, (most - 2) // 2))
    chosen = {0, len(points) - 1}
    chosen |= {index for index, point in enumerate(points) if point[0] in keep}
    for begin in range(0, len(points), stretch):
        indices = range(begin, min(begin + stretch, len(points)))
        chosen.add(min(indices, key=lambda index: points[index][1]))
        chosen.add(max(indices, key=lambda index: points[index][1]))
    return tuple(points[index] for index in sorted(chosen))
