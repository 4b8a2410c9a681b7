"""The report as one HTML page: no script, no network, everything from users escaped."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from html import escape

from hermes_ops.core.summary import SweepSummary, TrialSummary
from hermes_ops.report.table import FACTS, parameters, rows, shown

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; margin: 2rem auto; max-width: 76rem;
       padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem;
     margin: 2rem 0 .5rem; }
.facts { display: flex; flex-wrap: wrap; gap: .75rem; padding: 0; list-style: none; }
.facts li { background: #f3f5f8; border-radius: .5rem; padding: .5rem .9rem; }
.facts b { display: block; font-size: 1.15rem; } .facts span { color: #5b6675; font-size: .85rem; }
img { max-width: 100%; height: auto; border: 1px solid #e3e7ed; border-radius: .5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .88rem; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e3e7ed;
         max-width: 20rem; overflow-wrap: anywhere; }
th { position: sticky; top: 0; background: #fff; color: #5b6675; font-weight: 600; }
td { font-variant-numeric: tabular-nums; } .text { text-align: left; }
tr.best td { background: #fff4d6; font-weight: 600; }
.state { border-radius: 1rem; padding: .1rem .6rem; font-size: .8rem; white-space: nowrap;
         background: #e8ebf0; }
.finished { background: #d9f0df; } .failed { background: #f9d9d6; }
.running { background: #d8e8fb; }
.stopped_early { background: #fdeacb; }
"""
_HEADINGS = {
    "number": "trial",
    "preemptions": "preempted",
    "gpu_seconds": "GPU-seconds",
}


def page(summary: SweepSummary, curves_png: bytes, gpus_png: bytes) -> str:
    """Return the page; the pictures are PNG and become part of it."""
    title = escape(summary.sweep)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title} – Hermes Ops</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
<ul class="facts">{_facts(summary)}</ul>
{_best(summary)}
<h2>Learning curves</h2>{_image(curves_png, "Learning curves of all trials")}
<h2>Who held which GPU</h2>{_image(gpus_png, "GPUs over time, one bar for each segment")}
<h2>Trials</h2><div class="wide">{_table(summary)}</div>
</body></html>
"""


def _facts(summary: SweepSummary) -> str:
    states = Counter(t.state for t in summary.trials)
    ends = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.most_common())
    gpu_s = sum(t.gpu_seconds for t in summary.trials)
    used = "–" if summary.max_slots_used is None else str(summary.max_slots_used)
    slots = "–" if summary.pool_slots is None else str(summary.pool_slots)
    facts = (
        (summary.state, "state"),
        (str(len(summary.trials)), f"trials: {ends}"),
        (duration(summary.wall_seconds), "wall time"),
        (duration(gpu_s), "GPU time"),
        (str(sum(t.preemptions for t in summary.trials)), "preemptions"),
        (f"{used} of {slots}", "slots used at most"),
    )
    return "".join(f"<li><b>{escape(v)}</b><span>{escape(n)}</span></li>" for v, n in facts)


def _best(summary: SweepSummary) -> str:
    best = summary.best
    if best is None:
        return f"<p>No trial has reported <b>{escape(summary.metric)}</b>.</p>"
    config = ", ".join(f"{name} = {shown(value)}" for name, value in (best.config or {}).items())
    return (
        f"<p>Best: <b>trial {best.number}</b> with {escape(summary.metric)} "
        f"<b>{escape(shown(best.best))}</b> ({escape(summary.direction)}d): {escape(config)}</p>"
    )


def _image(png: bytes, text: str) -> str:
    return f'<img alt="{escape(text)}" src="data:image/png;base64,{b64encode(png).decode()}">'


def _table(summary: SweepSummary) -> str:
    facts = "".join(f"<th>{escape(_HEADINGS.get(f, f))}</th>" for f in FACTS)
    names = "".join(f"<th>{escape(name)}</th>" for name in parameters(summary))
    body = "".join(_row(t, cells, t is summary.best) for t, cells in rows(summary))
    return f"<table><thead><tr>{facts}{names}</tr></thead><tbody>{body}</tbody></table>"


def _row(trial: TrialSummary, cells: list[object], is_best: bool) -> str:
    mark = ' class="best"' if is_best else ""
    texts = [_cell(name, value) for name, value in zip(FACTS, cells, strict=False)]
    texts += [f"<td>{escape(shown(value))}</td>" for value in cells[len(FACTS) :]]
    return f'<tr{mark} id="trial-{trial.number}">{"".join(texts)}</tr>'


def _cell(name: str, value: object) -> str:
    text = escape(shown(value))
    if name == "state":
        return f'<td class="text"><span class="state {text}">{text.replace("_", " ")}</span></td>'
    if name == "gpu_seconds" and isinstance(value, float):
        text = f"{value:,.1f}"
    return f"<td>{text}</td>"


def duration(seconds: float) -> str:
    """Return a time for people: `42 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3_600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3_600} h {whole % 3_600 // 60:02d} min"
