"""The page's routes: read-only, behind Airflow's authentication and permissions.

In its HTML everything is escaped, and no other origin is loaded.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response, status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException as StarletteHTTPException

from hermes_ops.airflow.control.decisions import read_tail
from hermes_ops.airflow.explanation import UNDECIDED, explain, ownership, parse_trial_name, short
from hermes_ops.airflow.page.access import ENTRY, Reader, dag_reader, readable_pools
from hermes_ops.airflow.page.history import NEWEST_ROWS, history
from hermes_ops.airflow.page.pool_view import PageSources, decision_row, pool_contents
from hermes_ops.airflow.page.sweep_view import (
    decisions_of,
    pool_of,
    read_sweep_view,
    sweep_contents,
)
from hermes_ops.airflow.page.usage_view import UsageQuery, UsageTable
from hermes_ops.airflow.page.what_if import current_choice, what_if
from hermes_ops.config.fields import NAME_PATTERN
from hermes_ops.core.amounts import duration, utc_text
from hermes_ops.core.usage import BY, csv_text, key_text, number_text
from hermes_ops.errors import HermesError, Unavailable, Unsupported
from hermes_ops.policies import live_policies

log = logging.getLogger(__name__)

_ASSETS = Path(__file__).parent / "assets"
REFRESH_S = 3


def draw(name: str, status: int = 200, **values: Any) -> HTMLResponse:  # noqa: ANN401 - a template's
    """Return the template's page, with headers that forbid content of other origins."""
    text = _environment().get_template(f"{name}.html.j2").render(values)
    return HTMLResponse(text, status, headers=_headers())


@cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        loader=FileSystemLoader(_ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "style": Markup(_asset("page.css")),  # noqa: S704 - our own files
        "script": Markup(_asset("page.js")),  # noqa: S704
        "refresh_s": REFRESH_S,
    }
    environment.filters |= {"clock": utc_text, "duration": duration, "short": short}
    return environment


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


DECIDED_SWEEPS = 5
"""The newest sweeps whose decisions the pool's page shows, ended ones included."""

AWAY = "Airflow's database or MLflow did not answer; the API server's log says more."

PoolName = Annotated[str | None, Query(max_length=256)]
_WITHOUT_NUL = r"^[^\x00]*$"  # PostgreSQL's driver takes no text with one
TrialName = Annotated[str, Query(max_length=512, pattern=_WITHOUT_NUL)]
SweepName = Annotated[str, Query(max_length=512, pattern=_WITHOUT_NUL)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
FilePlace = Annotated[int | None, Query(ge=1, le=2**53)]
PolicyName = Annotated[str, Query(max_length=64)]
UsageKey = Annotated[Literal["user", "team", "sweep", "day"], Query()]
UsageDays = Annotated[int, Query(ge=1, le=366)]
UsageForm = Annotated[Literal["html", "csv", "json"], Query()]
PERIODS_DAYS = (1, 7, 30, 92, 366)


def create_app(open_sources: Callable[[], PageSources] = PageSources.from_airflow) -> FastAPI:
    """Return the application; its data sources are opened at the first request."""
    entry = requires_access_dag("GET", DagAccessEntity[ENTRY])
    app = FastAPI(
        title="Hermes Ops",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(entry)],
    )
    app.state.open_sources, app.state.sources = open_sources, None
    app.add_api_route("/", pool_page, response_class=HTMLResponse)
    app.add_api_route("/sweeps", sweeps_page, response_class=HTMLResponse)
    app.add_api_route("/sweep", sweep_page, response_class=HTMLResponse)
    app.add_api_route("/explain", explain_page, response_class=HTMLResponse)
    app.add_api_route("/usage", usage_page, response_class=HTMLResponse)
    app.add_api_route("/what-if", what_if_page, response_class=HTMLResponse)
    for error in (StarletteHTTPException, RequestValidationError, HermesError):
        app.add_exception_handler(error, _failed)
    return app


def _sources(request: Request) -> PageSources:
    state = request.app.state
    if state.sources is None:
        state.sources = state.open_sources()
    opened: PageSources = state.sources
    return opened


def _reader(user: GetUserDep, sources: Annotated[PageSources, Depends(_sources)]) -> Reader:
    return Reader(dag_reader(user), sources.metadata)


def _pools(
    user: GetUserDep,
    sources: Annotated[PageSources, Depends(_sources)],
    pool: PoolName = None,
) -> tuple[str, ...]:
    """Return the pools that the user may choose; the requested one also without a running sweep."""
    readable = readable_pools(user)
    asked: set[str] = {pool} if pool and re.fullmatch(NAME_PATTERN, pool) else set()
    return tuple(sorted(p for p in {*sources.pools(), *asked} if p in readable))


SourcesDep = Annotated[PageSources, Depends(_sources)]
ReaderDep = Annotated[Reader, Depends(_reader)]
PoolsDep = Annotated[tuple[str, ...], Depends(_pools)]


def pool_page(
    sources: SourcesDep, reader: ReaderDep, pools: PoolsDep, pool: PoolName = None
) -> Response:
    """Show the pool now; an empty page where the user may read no pool."""
    chosen = _chosen(pools, pool)
    if chosen is None:
        return draw("pool", pools=(), pool="", contents=None, policies=())
    pool_view = sources.pool_view(chosen)
    past = history(sources, reader, rows=NEWEST_ROWS)
    seen = [s for s, b in pool_view.sweep_states.items() if reader.reads_dag(b.spec.run.dag_id)]
    newest = [row.sweep for row in past.rows[:DECIDED_SWEEPS] if row.sweep not in seen]
    decisions = [d for sweep in (*seen, *newest) for d in read_tail(sweep)]
    return draw(
        "pool",
        pools=pools,
        pool=chosen,
        contents=pool_contents(pool_view, reader, decisions),
        past=past,
        now_s=pool_view.time_s,
        policies=live_policies(),
        current=_current(),
    )


def sweeps_page(
    sources: SourcesDep, reader: ReaderDep, pools: PoolsDep, page: PageNumber = 1
) -> Response:
    """Show all sweeps that the user may see, newest first."""
    return draw(
        "sweeps",
        pools=pools,
        pool=next(iter(pools), ""),
        past=history(sources, reader, page),
        now_s=sources.clock(),
    )


def sweep_page(
    sources: SourcesDep,
    reader: ReaderDep,
    pools: PoolsDep,
    sweep: SweepName,
    *,
    page: PageNumber = 1,
    before: FilePlace = None,
) -> Response:
    """Show a sweep's trials, curves, timeline and decisions, while it runs and after its end."""
    past = sources.metadata.sweep(sweep)
    if past is None:
        raise HTTPException(404, f"Airflow knows no sweep {sweep!r}.")
    if not reader.reads_sweep(sweep):
        raise HTTPException(403, "You may not read the trials of this sweep's DAG.")
    view = read_sweep_view(sources, past)
    return draw(
        "sweep",
        pools=pools,
        pool=view.row.pool if view.row.pool in pools else next(iter(pools), ""),
        contents=sweep_contents(
            view,
            page=page,
            decisions=decisions_of(sources, past, before),
            reader=reader,
        ),
        before=before,
        now_s=sources.clock(),
    )


def explain_page(
    sources: SourcesDep,
    reader: ReaderDep,
    pools: PoolsDep,
    trial: TrialName,
    pool: PoolName = None,
) -> Response:
    """Show why a trial runs, waits or has ended."""
    sweep, _ = parse_trial_name(trial)
    if not reader.knows(sweep):
        raise HTTPException(404, f"Airflow knows no sweep of the trial {trial!r}.")
    if not reader.reads_sweep(sweep):
        raise HTTPException(403, "You may not read the trials of this sweep's DAG.")
    pool_of_sweep = pool_of(sources.metadata.sweep(sweep))
    chosen = pool_of_sweep if pool_of_sweep in pools else _chosen(pools, pool) or ""
    explanation = explain(chosen, sources.tracker, trial)
    return draw(
        "explain",
        pools=pools,
        pool=chosen,
        contents=explanation,
        undecided=UNDECIDED,
        owner=ownership(explanation.standing or {}),
        redacted=reader.redacted,
        decisions=[decision_row(d, reader) for d in explanation.decisions[:200]],
        now_s=sources.clock(),
    )


def usage_page(
    sources: SourcesDep,
    reader: ReaderDep,
    pools: PoolsDep,
    *,
    pool: PoolName = None,
    by: UsageKey = "user",
    days: UsageDays = 30,
    form: UsageForm = "html",
) -> Response:
    """Show who used how much of a pool, of the sweeps that the user may see; also as CSV, JSON."""
    chosen = _chosen(pools, pool)
    if chosen is None:
        raise HTTPException(404, "There is no pool that you may read.")
    dags = sources.metadata.sweep_dags()
    readable = frozenset(dag for dag in dags if reader.reads_dag(dag))
    query = UsageQuery(chosen, days, by, readable, len(readable) == len(dags))
    table, trouble = sources.usage.get(query)
    if form != "html":
        if table is None:
            raise HTTPException(503, trouble or "It is being read: ask again in a moment.")
        return _usage_file(table, form)
    return draw(
        "usage",
        pools=pools,
        pool=chosen,
        query=query,
        table=table,
        trouble=trouble,
        now_s=sources.clock(),
        keys=BY,
        periods=PERIODS_DAYS,
        key_text=key_text,
        number_text=number_text,
    )


def _usage_file(table: UsageTable, form: str) -> Response:
    """Return the table as a file to keep."""
    by = table.query.by
    if form == "csv":
        text, kind = csv_text(by, table.rows, table.columns), "text/csv; charset=utf-8"
    else:
        shown = [{"key": r["key"], **{name: r[name] for name in table.columns}} for r in table.rows]
        document = {"by": by, "days": table.query.days, "read_s": table.read_s, "usage": shown}
        text, kind = json.dumps(document), "application/json"
    name = f"usage-by-{by}-{table.query.days}-days.{form}"
    disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(text, media_type=kind, headers=_headers() | disposition)


def what_if_page(
    sources: SourcesDep,
    reader: ReaderDep,
    pools: PoolsDep,
    policy: PolicyName,
    pool: PoolName = None,
) -> Response:
    """Show what that policy would decide now; apply nothing."""
    chosen = _chosen(pools, pool)
    if chosen is None:
        raise HTTPException(404, "There is no pool that you may read.")
    answer = what_if(sources, chosen, policy, reader)
    return draw(
        "what_if",
        pools=pools,
        pool=chosen,
        contents=answer,
        now_s=answer.time_s,
        policies=live_policies(),
        current=policy,
    )


def _chosen(pools: tuple[str, ...], asked: str | None) -> str | None:
    """Return the requested pool, else the first; HTTP 404 for one that the user may not read."""
    if asked and asked not in pools:
        raise HTTPException(404, f"There is no pool {asked!r} that you may read.")
    return asked or next(iter(pools), None)


def _current() -> str:
    try:
        return current_choice().name
    except HermesError:
        return ""


def _failed(request: Request, error: Any) -> Response:  # noqa: ANN401 - of the three kinds
    """Return the page of an error: a fact and a remedy, never a traceback."""
    code, words = _describe(error)
    login = ""
    if code == status.HTTP_401_UNAUTHORIZED:
        login = get_auth_manager().get_url_login(next_url=str(request.url))
    return draw("error", code, pools=(), pool="", code=code, words=words, login=login)


def _describe(error: Any) -> tuple[int, str]:  # noqa: ANN401 - of the three kinds
    if isinstance(error, StarletteHTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, RequestValidationError):
        fields = ", ".join(str(e["loc"][-1]) for e in error.errors())
        return 422, f"The address lacks or has a wrong {fields}."
    if isinstance(error, Unavailable):
        log.warning("The page cannot be shown: %s", error)  # it may name users and hosts
        return 503, AWAY
    return (503 if isinstance(error, Unsupported) else 400), str(error)
