"""Talks to a Tangram engine over HTTP. Plain httpx: no torch, no vLLM.

One client per engine process; safe for many tasks at once.

    async with EngineClient("http://127.0.0.1:8001") as engine:
        async for chunk in engine.stream(CompletionRequest(model="m", prompt=(1, 2, 3), max_tokens=16)):
            print(chunk.text, chunk.token_ids)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Self

import httpx

from tangram.completion import CompletionChunk, CompletionRequest, TokenLogprob, Usage, parse_event
from tangram.errors import EngineRejected, EngineUnavailable

__all__ = ["CompletionChunk", "CompletionRequest", "EngineClient", "TokenLogprob", "Usage"]


class EngineClient:
    """Asynchronous client of one engine.

    Raises:
        EngineUnavailable: the engine cannot be reached, or vanished in the middle of an answer.
        EngineRejected: the engine answered with an error status (or an error event in a stream).
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(30.0, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,
            verify=self.base_url.startswith("https"),  # loading certificates takes a while
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections; running streams end with EngineUnavailable."""
        await self._http.aclose()

    async def health(self) -> bool:
        """Whether the engine says that it can serve. Never raises for an engine that is down."""
        try:
            response = await self._http.get("/health", timeout=5.0)
        except (httpx.HTTPError, RuntimeError):
            return False
        return response.status_code == 200

    async def models(self) -> list[dict[str, Any]]:
        """The served models: dicts with `id` and `max_model_len`, as in OpenAI's list."""
        data = (await self._get("/v1/models")).get("data")
        return list(data) if isinstance(data, list) else []

    async def status(self) -> dict[str, Any]:
        """GET /tangram/status: versions, model, configuration, uptime, pool, counters."""
        return await self._get("/tangram/status")

    async def profile(self) -> dict[str, Any]:
        """GET /tangram/profile: each head's statistics and budget, and what they cost."""
        return await self._get("/tangram/profile")

    async def memory(self, sequence: str | None = None) -> dict[str, Any]:
        """GET /tangram/memory: geometry, pool, heads, sequences, counters.

        Args:
            sequence: the id of one conversation, as ``sequences`` lists them; EngineRejected with status 404
                where it is not in the pool. None: all of them.
        """
        options = {} if sequence is None else {"params": {"sequence": sequence}}
        return self._json(await self._send("GET", "/tangram/memory", **options))

    async def preview(self, **changes: Any) -> dict[str, Any]:
        """What other settings would mean (retention, group_size, alpha, scope) for conversations of some
        ``lengths``. Nothing is changed."""
        return self._json(await self._send("POST", "/tangram/preview", json=changes))

    async def evict(
        self, *, sequence: str | None = None, idle_seconds: float | None = None, everything: bool = False
    ) -> dict[str, Any]:
        """POST /tangram/evict: drop idle conversations, by exactly one of the arguments.

        Args:
            sequence: this one.
            idle_seconds: those that have been idle for so long.
            everything: all.

        Returns:
            How many ``conversations`` and ``pages`` were freed.
        """
        wanted = {"sequence": sequence, "idle_seconds": idle_seconds, "all": everything or None}
        body = {name: value for name, value in wanted.items() if value is not None}
        return self._json(await self._send("POST", "/tangram/evict", json=body))

    async def pin(self, sequence: str, pinned: bool = True) -> dict[str, Any]:
        """POST /tangram/pin: keep a conversation when room is made for others, or let it go.

        EngineRejected with status 404 where it is not in the pool, 409 where too much is pinned already.
        """
        body = {"sequence": sequence, "pinned": pinned}
        return self._json(await self._send("POST", "/tangram/pin", json=body))

    async def metrics_text(self) -> str:
        """GET /metrics in Prometheus' text format."""
        return (await self._send("GET", "/metrics")).text

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Generate. Closing the iterator (or cancelling its task) aborts the request in the engine."""
        waits = httpx.Timeout(30.0, connect=5.0, read=None)
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=request.body(), headers=request.headers(), timeout=waits
            ) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _rejected(response)
                finished = False
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        finished = True
                        break
                    yield parse_event(data)
                if not finished:
                    raise EngineUnavailable("The engine closed the connection in the middle of the answer.")
        except (httpx.HTTPError, httpx.StreamError, RuntimeError) as error:
            raise _unavailable(error) from error

    async def _get(self, path: str) -> dict[str, Any]:
        return self._json(await self._send("GET", path))

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = await self._http.request(method, path, **options)
        except (httpx.HTTPError, RuntimeError) as error:
            raise _unavailable(error) from error
        if response.status_code >= 400:
            raise _rejected(response)
        return response

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        try:
            data = response.json()
        except ValueError as error:
            raise EngineUnavailable("The engine's answer is not JSON.") from error
        if not isinstance(data, dict):
            raise EngineUnavailable("The engine's answer is not a JSON object.")
        return data


def _unavailable(error: Exception) -> EngineUnavailable:
    # httpx raises RuntimeError for a client that was closed under a caller's feet.
    return EngineUnavailable(f"The engine does not answer ({type(error).__name__}).")


def _rejected(response: httpx.Response) -> EngineRejected:
    message = ""
    try:
        body = response.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error", body)
        message = (
            str(error.get("message") or error.get("detail") or "") if isinstance(error, dict) else str(error)
        )
    return EngineRejected(response.status_code, message or f"The engine answered {response.status_code}.")
