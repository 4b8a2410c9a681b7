"""The page's requests: each one read-only, behind Airflow's authentication and permissions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response, status
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from hermes_ops.airflow.control.decisions import read_tail
from hermes_ops.airflow.explaining import UNDECIDED, explain, parts
from hermes_ops.airflow.page import drawing
from hermes_ops.airflow.page.access import ENTRY, Reader, dag_reader, readable_pools
from hermes_ops.airflow.page.contents import contents, decision_row
from hermes_ops.airflow.page.history import NEWEST_ROWS, history
from hermes_ops.airflow.page.sight import Sight
from hermes_ops.airflow.page.sweep_contents import sweep_contents
from hermes_ops.airflow.page.sweep_sight import decisions_of, look_at_sweep
from hermes_ops.airflow.page.what_if import current_choice, what_if
from hermes_ops.errors import HermesError, Unavailable, Unsupported
from hermes_ops.policies import live_policies

log = logging.getLogger(__name__)

DECIDED_SWEEPS = 5
"""Of so many of the newest sweeps the pool's page has decisions, also when they have ended."""

AWAY = "Airflow's database or MLflow did not answer; the API server's log says more."

PoolName = Annotated[str | None, Query(max_length=256)]
TrialName = Annotated[str, Query(max_length=512)]
SweepName = Annotated[str, Query(max_length=512)]
PageNumber = Annotated[int, Query(ge=1, le=1_000_000)]
FilePlace = Annotated[int | None, Query(ge=1, le=2**53)]
PolicyName = Annotated[str, Query(max_length=64)]


def create_app(make_sight: Callable[[], Sight] = Sight.of_airflow) -> FastAPI:
    """The application; what it reads from is opened at the first request that needs it."""
    entry = requires_access_dag("GET", DagAccessEntity[ENTRY])
    app = FastAPI(
        title="Hermes Ops",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        dependencies=[Depends(entry)],
    )
    app.state.make_sight, app.state.sight = make_sight, None
    app.add_api_route("/", pool_page, response_class=HTMLResponse)
    app.add_api_route("/sweeps", sweeps_page, response_class=HTMLResponse)
    app.add_api_route("/sweep", sweep_page, response_class=HTMLResponse)
    app.add_api_route("/explain", explain_page, response_class=HTMLResponse)
    app.add_api_route("/what-if", what_if_page, response_class=HTMLResponse)
    for error in (StarletteHTTPException, RequestValidationError, HermesError):
        app.add_exception_handler(error, _failed)
    return app


def _sight(request: Request) -> Sight:
    state = request.app.state
    if state.sight is None:
        state.sight = state.make_sight()
    found: Sight = state.sight
    return found


def _reader(user: GetUserDep, sight: Annotated[Sight, Depends(_sight)]) -> Reader:
    return Reader(dag_reader(user), sight.metadata)


def _pools(user: GetUserDep, sight: Annotated[Sight, Depends(_sight)]) -> tuple[str, ...]:
    readable = readable_pools(user)
    return tuple(p for p in sight.pools() if p in readable)


SightDep = Annotated[Sight, Depends(_sight)]
ReaderDep = Annotated[Reader, Depends(_reader)]
PoolsDep = Annotated[tuple[str, ...], Depends(_pools)]


def pool_page(
    sight: SightDep, reader: ReaderDep, pools: PoolsDep, pool: PoolName = None
) -> Response:
    """The pool now; without any pool that the user may read, an empty page."""
    chosen = _chosen(pools, pool)
    if chosen is None:
        return drawing.draw("pool", pools=(), pool="", found=None, policies=())
    look = sight.look(chosen)
    past = history(sight, reader, rows=NEWEST_ROWS)
    seen = [s for s, b in look.books.items() if reader.reads_dag(b.plan.run.dag_id)]
    newest = [row.sweep for row in past.rows[:DECIDED_SWEEPS] if row.sweep not in seen]
    decisions = [d for sweep in (*seen, *newest) for d in read_tail(sweep)]
    return drawing.draw(
        "pool",
        pools=pools,
        pool=chosen,
        found=contents(look, reader, decisions),
        past=past,
        now_s=look.time_s,
        policies=live_policies(),
        current=_current(),
    )


def sweeps_page(
    sight: SightDep, reader: ReaderDep, pools: PoolsDep, page: PageNumber = 1
) -> Response:
    """All sweeps that the user may see, newest first."""
    return drawing.draw(
        "sweeps",
        pools=pools,
        pool=next(iter(pools), ""),
        past=history(sight, reader, page),
        now_s=sight.clock(),
    )


def sweep_page(
    sight: SightDep,
    reader: ReaderDep,
    pools: PoolsDep,
    sweep: SweepName,
    *,
    page: PageNumber = 1,
    before: FilePlace = None,
) -> Response:
    """One sweep: its trials, curves, timeline and decisions, while it runs and after its end."""
    past = sight.metadata.sweep(sweep)
    if past is None:
        raise HTTPException(404, f"Airflow knows no sweep {sweep!r}.")
    if not reader.reads_sweep(sweep):
        raise HTTPException(403, "You may not read the trials of this sweep's DAG.")
    found = look_at_sweep(sight, past)
    return drawing.draw(
        "sweep",
        pools=pools,
        pool=found.row.pool if found.row.pool in pools else next(iter(pools), ""),
        found=sweep_contents(
            found,
            page=page,
            decisions=decisions_of(sight, past, before),
            reader=reader,
        ),
        before=before,
        now_s=sight.clock(),
    )


def explain_page(
    sight: SightDep,
    reader: ReaderDep,
    pools: PoolsDep,
    trial: TrialName,
    pool: PoolName = None,
) -> Response:
    """Why a trial runs, waits or has ended."""
    sweep, _ = parts(trial)
    if not reader.knows(sweep):
        raise HTTPException(404, f"Airflow knows no sweep of the trial {trial!r}.")
    if not reader.reads_sweep(sweep):
        raise HTTPException(403, "You may not read the trials of this sweep's DAG.")
    chosen = _chosen(pools, pool) or ""
    found = explain(chosen, sight.tracker, trial)
    return drawing.draw(
        "explain",
        pools=pools,
        pool=chosen,
        found=found,
        undecided=UNDECIDED,
        veiled=reader.veiled,
        decisions=[decision_row(d, reader) for d in found.decisions[:200]],
        now_s=sight.clock(),
    )


def what_if_page(
    sight: SightDep,
    reader: ReaderDep,
    pools: PoolsDep,
    policy: PolicyName,
    pool: PoolName = None,
) -> Response:
    """What that policy would decide now; nothing is applied."""
    chosen = _chosen(pools, pool)
    if chosen is None:
        raise HTTPException(404, "There is no pool that you may read.")
    found = what_if(sight, chosen, policy, reader)
    return drawing.draw(
        "what_if",
        pools=pools,
        pool=chosen,
        found=found,
        now_s=found.time_s,
        policies=live_policies(),
        current=policy,
    )


def _chosen(pools: tuple[str, ...], asked: str | None) -> str | None:
    """The pool to show: the one asked for, else the first."""
    if asked and asked not in pools:
        raise HTTPException(404, f"There is no pool {asked!r} that you may read.")
    return asked or next(iter(pools), None)


def _current() -> str:
    try:
        return current_choice().name
    except HermesError:
        return ""


def _failed(request: Request, error: Any) -> Response:  # noqa: ANN401 - of the three kinds
    """What went wrong, as a page: a fact and a remedy, never a traceback."""
    code, words = _said(error)
    login = ""
    if code == status.HTTP_401_UNAUTHORIZED:
        login = get_auth_manager().get_url_login(next_url=str(request.url))
    return drawing.draw("error", code, pools=(), pool="", code=code, words=words, login=login)


def _said(error: Any) -> tuple[int, str]:  # noqa: ANN401 - of the three kinds
    if isinstance(error, StarletteHTTPException):
        return error.status_code, str(error.detail)
    if isinstance(error, RequestValidationError):
        fields = ", ".join(str(e["loc"][-1]) for e in error.errors())
        return 422, f"The address lacks or has a wrong {fields}."
    if isinstance(error, Unavailable):
        log.warning("The page cannot be shown: %s", error)  # it may name users and hosts
        return 503, AWAY
    return (503 if isinstance(error, Unsupported) else 400), str(error)
