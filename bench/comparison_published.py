"""The figures that docs/comparison.md sets its own beside."""

from __future__ import annotations

from collections.abc import Mapping

PUBLISHED: Mapping[tuple[str, str], Mapping[str, tuple[float, float]]] = {  # mean, makespan; s
    ("tiresias_60_job", "2x4"): {
        "fifo": (1556.48, 5747), "srtf": (519.87, 4901),
        "srsf": (563.38, 4962), "2d-las": (715.27, 4806),
    },
    ("tiresias_60_job", "4x4"): {
        "fifo": (200.82, 3335), "srtf": (192.12, 3271),
        "srsf": (195.90, 3315), "2d-las": (190.68, 3271),
    },
    ("philly_480", "16x4"): {
        "fifo": (225_904, 2_190_718), "srtf": (107_758, 2_092_937),
        "srsf": (105_160, 1_941_867), "2d-las": (120_269, 1_951_666),
    },
    ("muri_philly_trace3", "16x4"): {
        "fifo": (991_167, 8_171_961), "srtf": (180_116, 8_171_961),
        "srsf": (172_684, 8_171_961), "2d-las": (312_870, 8_171_961),
    },
}  # fmt: skip
THREE_JOBS = {"srsf": "2, 10, 16", "2d-gittins": "2, 12, 16", "2d-las": "5, 14, 16"}
LIMITS = {  # (queue limits, promote knob): mean completion, preemptions
    ("[300,1200]", None): (790.2, 26),
    ("[300,1200]", 1): (728.7, 41),
    ("[300,1200]", 8): (730.0, 39),
    ("[1000,2500]", None): (730.2, 7),
    ("[1000,2500]", 1): (673.7, 7),
    ("[1000,2500]", 8): (674.8, 10),
}
