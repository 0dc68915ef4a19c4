"""What both clients share of httpx: options, requests, and what its errors mean. Sends nothing itself."""

from typing import Any

import httpx

from service.client.calls import Call, StreamCall
from service.client.errors import ApiError, BrokenAnswerError, ClientError, UnreachableError
from service.client.reading import REQUEST_ID, read_error
from service.client.retrying import Clock, parse_retry_after

# What httpx raises before the first byte of a request is out.
UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.UnsupportedProtocol)


def http_options(base_url: str, api_key: str | None, timeout: float, max_connections: int | None) -> dict[str, Any]:
    """Arguments of `httpx.Client` and `httpx.AsyncClient`.

    Args:
        base_url: the server's address, with or without `/v1` at its end.
        api_key: sent as a bearer key.
        timeout: seconds that the server may be silent.
        max_connections: at a time; None for no limit.

    Raises:
        ValueError: the address is none.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{base_url!r} is no address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"{base_url!r} is no address: it must begin with http:// or https:// and name a host")
    return {
        "base_url": str(url).rstrip("/").removesuffix("/v1"),
        "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        "timeout": timeout,
        "limits": httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
    }


def request_options(call: Call[Any] | StreamCall[Any], request_id: str | None) -> dict[str, Any]:
    """Arguments of `build_request`."""
    return {
        "method": call.method if isinstance(call, Call) else "POST",
        "url": call.path,
        "json": call.body,
        "headers": {} if request_id is None else {REQUEST_ID: request_id},
    }


def error_of(response: httpx.Response, clock: Clock) -> ApiError:
    """What an answer that has been read says that is not successful."""
    return read_error(
        response.status_code,
        response.content,
        request_id=request_id_of(response),
        retry_after=parse_retry_after(response.headers.get("Retry-After"), response.headers.get("Date"), clock),
    )


def request_id_of(response: httpx.Response) -> str | None:
    """The request's id, as the server has it."""
    value: str | None = response.headers.get(REQUEST_ID)
    return value


def failure_of(error: httpx.HTTPError, base_url: httpx.URL, timeout: float) -> ClientError:
    """What an error of httpx means."""
    reason = str(error) or type(error).__name__
    if isinstance(error, UNSENT):
        return UnreachableError(f"cannot connect to {base_url}: {reason}")
    if isinstance(error, httpx.TimeoutException):
        return BrokenAnswerError(f"{base_url} was silent for {timeout:g} seconds")
    return BrokenAnswerError(f"the connection to {base_url} broke: {reason}")
