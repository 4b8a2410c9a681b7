"""Sweep files whose trials may be pods."""

from __future__ import annotations

from typing import Any


def data(**trial: Any) -> dict[str, Any]:
    return {
        "name": "pods",
        "objective": {"metric": "loss"},
        "search": {
            "algorithm": "random",
            "max_trials": 2,
            "space": {"rate": {"type": "uniform", "low": 0, "high": 1}},
        },
        "trial": {"command": ["python", "train.py", "{rate}"], **trial},
        "budget": {"max_epochs": 2},
    }
