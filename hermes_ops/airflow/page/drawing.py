"""From contents to HTML: everything escaped, nothing from elsewhere, no script but our own."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hermes_ops.core.amounts import duration

_ASSETS = Path(__file__).parent / "assets"
REFRESH_S = 3


def draw(name: str, status: int = 200, **values: Any) -> HTMLResponse:  # noqa: ANN401 - a template's
    """The page of that template, with the headers that keep everything else out."""
    text = _environment().get_template(f"{name}.html.j2").render(values)
    return HTMLResponse(text, status, headers=_headers())


@cache
def _environment() -> Environment:
    found = Environment(
        autoescape=True,
        loader=FileSystemLoader(_ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {
        "style": Markup(_asset("page.css")),  # noqa: S704 - our own files
        "script": Markup(_asset("page.js")),  # noqa: S704
        "refresh_s": REFRESH_S,
    }
    found.filters |= {"clock": clock, "duration": duration}
    return found


@cache
def _headers() -> dict[str, str]:
    style, script = (_digest(_asset(name)) for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; "
        "img-src data:; form-action 'self'; frame-ancestors 'self'; base-uri 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"


def clock(time_s: float) -> str:
    """Unix seconds as a time of today or a date and time, in UTC."""
    return f"{datetime.fromtimestamp(time_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
