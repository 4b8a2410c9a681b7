"""What the controller publishes of a sweep, and what its summary says of a trial."""

from __future__ import annotations

from typing import Any


def job(number: int, phase: str = "running", **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": f"digits-1/{number}", "phase": phase, "gpus": [0], "step": 3, "total_steps": 20,
        "value": 0.51239, "preemptions": 2, "rank": 1, "reason": "it leads",
        "terms": {"convergence": 0.04}, "runner_up": None, "would_change": "",
    }  # fmt: skip
    return {**facts, **changes}


def view(*jobs: dict[str, Any], **facts: Any) -> dict[str, Any]:
    sweep = {"trials": 9, "ended": 3, "open": 2, "closing": None, **facts}
    return {"policy": "hermes", "sweeps": {"digits-1": sweep}, "jobs": list(jobs)}


def facts(number: int, **changes: Any) -> dict[str, Any]:
    plain = {"number": number, "state": "finished", "steps": 3, "final": 0.5, "best": 0.4,
             "segments": 1, "preemptions": 0, "gpu_seconds": 2.0, "config": {}}  # fmt: skip
    return {**plain, **changes}
