"""Counts requests that compute no tokens among those that a tenant may make."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from serve_app.core.errors import ServeError
from serve_app.core.tenants import Amount
from serve_app.http.rate_headers import rate_headers
from serve_app.router.router import Router

Endpoint = Callable[[Request], Awaitable[Response]]


def counted(endpoint: Endpoint, router: Router) -> Endpoint:
    """The same, for one of the requests per minute and in flight of the router's tenant; what fails costs none.

    Raises as `Quotas.reserve`.
    """

    async def answer(request: Request) -> Response:
        try:
            permit = await router.reserve_one()
        except ServeError:
            request.scope["state"]["beside"] = rate_headers(router.rates)
            raise
        spent = Amount()
        try:
            response = await endpoint(request)
            spent = Amount(requests=1)
        finally:
            if permit is not None:
                permit.settle(spent)
        response.raw_headers.extend(rate_headers(router.rates))
        return response

    return answer
