"""The decision service: a bundle behind HTTP, for a broker terminal that runs elsewhere.

1. One bar set at a time. It is refused whole, with a reason, or decided on.
2. The state is on disk before the answer leaves: a restart goes on behind the last answer. The same
   bars again get the same answer (a client may repeat what it did not hear back from); others of
   the same time are refused.
3. What a hierarchy leaves for later (`HierarchyPolicy.complete`) is done after the answer.
"""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from echelon import __version__
from echelon.errors import EchelonError, StaleBarsError, StoreError, bound_message
from echelon.monitoring.metrics import CONTENT_TYPE, Metrics
from echelon.serving.engine import Account, DecisionEngine

log = logging.getLogger(__name__)

MAX_BODY = 16 * 1024 * 1024
"""Bytes of a request: bars of some 50,000 symbols."""

Price = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False, strict=True)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False, strict=True)]
Symbol = Annotated[str, Field(min_length=1, max_length=64)]


class BarIn(BaseModel):
    """One symbol's bar, on the prices of the data that the agent was trained on."""

    model_config = ConfigDict(extra="forbid")

    symbol: Symbol
    close: Price
    open: Price | None = None
    high: Price | None = None
    low: Price | None = None
    volume: Amount | None = Field(None, description="shares")
    amount: Amount | None = Field(None, description="money")
    factor: Price | None = Field(None, description="start-anchored adjustment factor")
    pre_close: Price | None = Field(None, description="the exchange's reference price")
    st: bool = Field(
        False, strict=True, description="special treatment (A-shares): a narrower price limit"
    )


class AccountIn(BaseModel):
    """What the account holds at the close of the bar; without one it is simulated."""

    model_config = ConfigDict(extra="forbid")

    cash: Amount
    positions: dict[Symbol, Amount] = Field(default_factory=dict, description="symbol → shares")
    locked: dict[Symbol, Amount] = Field(
        default_factory=dict, description="of them bought today, where T+1 forbids to sell them"
    )


class BarsIn(BaseModel):
    """All bars of one time; a symbol without a bar did not trade."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "time": "2020-01-03",
                    "bars": [
                        {
                            "symbol": "AAPL",
                            "open": 74.3,
                            "high": 75.1,
                            "low": 74.1,
                            "close": 74.4,
                            "volume": 146322800,
                        }
                    ],
                }
            ]
        },
    )

    time: str = Field(
        min_length=10,
        max_length=32,
        description="2020-01-03, or 2020-01-03T09:35 for bars within the day; exchange time",
    )
    bars: list[BarIn] = Field(max_length=100_000)
    account: AccountIn | None = None
    benchmark: Price | None = Field(None, description="level of the benchmark index at this close")


class Problem(BaseModel):
    """Why a request was refused."""

    error: str


_REFUSALS: dict[int | str, dict[str, Any]] = {
    422: {"model": Problem, "description": "the bars or the account cannot be used"},
    401: {"model": Problem, "description": "no token, or another"},
    413: {"model": Problem, "description": "the body is too large"},
    503: {"model": Problem, "description": "the state cannot be kept; start the service again"},
}
_bearer = HTTPBearer(auto_error=False, description="the value of ECHELON_TOKEN")


def create_app(engine: DecisionEngine, token: str | None) -> FastAPI:
    app = FastAPI(
        title="Echelon decision service",
        version=__version__,
        docs_url=None,
        redoc_url=None,
    )
    lock, metrics = threading.Lock(), Metrics("service")

    def require_token(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    ) -> None:
        if token is None:
            return
        said = "" if given is None else given.credentials
        if not hmac.compare_digest(said.encode(), token.encode()):
            raise HTTPException(401, "a token is needed: Authorization: Bearer TOKEN")

    @app.middleware("http")
    async def bound_body(
        request: Request, call: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        size = request.headers.get("content-length", "0")
        if not size.isascii() or not size.isdigit() or int(size) > MAX_BODY:
            return _refuse(413, f"a body of at most {MAX_BODY:,} bytes is read")
        if "chunked" in request.headers.get("transfer-encoding", ""):
            return _refuse(413, "send Content-Length; bodies of unknown length are not read")
        return await call(request)

    @app.middleware("http")
    async def count(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
        status = 500
        try:
            response = await call(request)
            status = response.status_code
            return response
        finally:
            metrics.add("service_requests_total", str(status))

    @app.exception_handler(StarletteHTTPException)
    async def say_why(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status_code == 401 else None
        return _refuse(error.status_code, str(error.detail), headers)

    @app.exception_handler(EchelonError)
    async def refuse_bars(_request: Request, error: EchelonError) -> JSONResponse:
        if isinstance(error, StoreError):
            return _refuse(503, str(error))
        return _refuse(409 if isinstance(error, StaleBarsError) else 422, str(error))

    @app.exception_handler(OSError)
    async def say_disk(_request: Request, error: OSError) -> JSONResponse:
        log.error("the state cannot be written: %s", error)
        return _refuse(503, f"the state cannot be written ({error.strerror})")

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_request: Request, error: RequestValidationError) -> JSONResponse:
        # Without what was sent: that may be anything, and of any length.
        lines = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()[:20]
        ]
        return _refuse(422, bound_message("\n".join(lines)))

    guarded = {"dependencies": [Depends(require_token)]}
    conflict: dict[int | str, dict[str, Any]] = {
        409: {"model": Problem, "description": "bars of a time that has gone by"}
    }

    @app.post("/v1/bars", responses=_REFUSALS | conflict, **guarded)  # type: ignore[arg-type]
    def push_bars(body: BarsIn, later: BackgroundTasks) -> dict[str, Any]:
        """Decide on the bars of one time."""
        with lock:
            bars = engine.read_bars(
                body.time,
                [bar.model_dump(exclude_none=True) for bar in body.bars],
                benchmark=body.benchmark,
            )
            account = None if body.account is None else Account(**body.account.model_dump())
            began = time.perf_counter()
            decision = engine.answer(bars, account)
            metrics.observe("service_decision_seconds", time.perf_counter() - began)
            later.add_task(_complete, engine, lock)
            return decision

    @app.get(
        "/v1/decision",
        responses={**_REFUSALS, 404: {"model": Problem, "description": "none was made yet"}},
        **guarded,  # type: ignore[arg-type]
    )
    def last_decision() -> dict[str, Any]:
        """The last decision."""
        with lock:
            if engine.decision is None:
                raise HTTPException(404, "no decision yet: POST /v1/bars first")
            return engine.decision

    @app.get("/v1/state", responses=_REFUSALS, **guarded)  # type: ignore[arg-type]
    def state() -> dict[str, Any]:
        """What is served, and up to where."""
        with lock:
            return engine.summary()

    @app.get("/metrics", include_in_schema=False, **guarded)  # type: ignore[arg-type]
    def export_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """Whether it answers."""
        return {"status": "ok"}

    return app


def _complete(engine: DecisionEngine, lock: threading.Lock) -> None:
    with lock:
        engine.complete()


def _refuse(status: int, why: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": why}, status, headers)
