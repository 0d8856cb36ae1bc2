"""HTTP to an OpenAI-compatible server. What goes wrong on the way is one sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

from redraft.errors import ServerError
from redraft.verify.answer import Answer, Assembly, Query
from redraft.verify.counters import Counters, parse_counters

TIMEOUT_S = 300.0
EXTRA_FIELDS = {"sglang": {"return_spec_tokens_details": True}}  # by the owner of a model in /v1/models


class RefusedError(Exception):
    """The server understood a request and will not serve it: a feature it does not have."""


class Client:
    """One server, or one way to use it: `fields` are added to every request.

    Use as an async context manager. Raises `ServerError` where there is nothing to talk to.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, fields: Mapping[str, Any] | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ServerError(f"'{url}' is no URL of a server: write it like http://127.0.0.1:8080")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = ""
        self.answers: list[Answer] = []
        self._fields = dict(fields or {})
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S, connect=10)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None, "left before it was entered"
        await self._session.close()

    async def choose_model(self, name: str | None) -> None:
        """Use the named model, or the first that the server lists."""
        listing = _json(await self._text("GET", "/v1/models"), f"{self.url}/v1/models")
        entries = listing.get("data") if isinstance(listing, Mapping) else None
        if not isinstance(entries, list) or not entries:
            raise ServerError(f"{self.url} lists no models: is this an OpenAI-compatible server?")
        served = {str(entry.get("id")): str(entry.get("owned_by")) for entry in entries}
        if name is not None and name not in served:
            raise ServerError(f"model '{name}' is not served at {self.url}; these are: {', '.join(served)}")
        self.model = name or next(iter(served))
        self._fields |= EXTRA_FIELDS.get(served[self.model], {})

    async def ask(self, query: Query) -> Answer:
        """Send one request. Raises `RefusedError` if the server does not serve its kind."""
        path = f"/v1/{query.path}"
        body = {"model": self.model, **query.body(), **self._fields}
        assembly = Assembly()
        try:
            if query.stream:
                async for event in self._events(path, body):
                    assembly.add(event)
            else:
                assembly.add(_json(await self._text("POST", path, body), self.url + path))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(f"{self.url}{path} gave an answer of another form: {error!r}") from None
        answer = assembly.answer()
        self.answers.append(answer)
        return answer

    async def counters(self) -> Counters | None:
        """Speculation counters from /metrics; None where there are none."""
        try:
            return parse_counters(await self._text("GET", "/metrics"))
        except RefusedError:
            return None

    async def _text(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> str:
        async with _Exchange(self, method, path, body) as response:
            return await response.text()

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """The chunks of a stream of server-sent events."""
        async with _Exchange(self, "POST", path, body) as response:
            async for line in response.content:
                data = line.decode().strip()
                if data == "data: [DONE]":
                    return
                if data.startswith("data:"):
                    yield _json(data.removeprefix("data:"), self.url + path)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        """An open exchange of the HTTP library."""
        assert self._session is not None, "used before it was entered"
        return self._session.request(method, self.url + path, json=body)


class _Exchange:
    """One request and its response, with every failure in between said in one sentence."""

    def __init__(self, client: Client, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        self._url = client.url + path
        self._context = client.request(method, path, body)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ServerError(f"{self._url} cannot be reached: {error or type(error).__name__}") from None
        if response.status >= 400:
            said = _message(await response.text(errors="replace"))
            await self._context.__aexit__(None, None, None)
            _raise_for(response.status, self._url, said)
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, (aiohttp.ClientError, TimeoutError, UnicodeDecodeError)):
            raise ServerError(f"{self._url} broke off: {error or type(error).__name__}") from None


def _raise_for(status: int, url: str, said: str) -> None:
    if status in (401, 403):
        raise ServerError(f"{url} refuses access ({status}): give the right key with --api-key")
    if status >= 500 and status != 501:
        raise ServerError(f"{url} failed with {status}: {said}")
    if url.endswith("/v1/models"):
        raise ServerError(f"{url} answers {status}: no OpenAI-compatible server at this address")
    raise RefusedError(f"{status} {said}")


def _message(text: str) -> str:
    """The sentence in an error body, cut to a line."""
    try:
        error = json.loads(text).get("error", {})
        text = error.get("message", text) if isinstance(error, Mapping) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:160]


def _json(text: str, url: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ServerError(f"{url} does not answer in JSON: no OpenAI-compatible server there") from None
