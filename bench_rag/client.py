"""HTTP to one server: streamed generation by SGLang's own endpoint or OpenAI's, and the few control calls needed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from .errors import BenchError

# One event of a stream that repeats all output ids so far can be long; aiohttp's default line limit is 128 KiB.
_LINE_LIMIT = 16 << 20


@dataclass(frozen=True)
class Completion:
    """An answer as a whole: token ids and, where asked for, their log-probabilities (nats) and the prompt's."""

    ids: list[int]
    cached_tokens: int
    logprobs: list[float]
    prompt_logprobs: list[float]


@dataclass
class Reply:
    """What one request did, in seconds of :func:`time.perf_counter` and in tokens.

    ``events``: for each streamed event that brought tokens, its arrival time and the output tokens so far.
    ``waited``: seconds the request was held back by the client's own concurrency limit before ``sent``; no other
    figure includes them. ``cached_tokens``: None where the endpoint does not report them. ``cached_by_tier``: the
    server's split of cached tokens (device, host, storage), empty where it gives none. ``output_ids`` is empty where
    an endpoint answers with text only, ``output_text`` where a server has no tokenizer. ``ramp``: sent while the limit
    on requests in flight was still rising; no figure includes it.
    """

    conversation: int = 0
    turn: int = 0
    sent: float = 0.0
    waited: float = 0.0
    ended: float = 0.0
    events: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    output_text: str = ""
    ramp: bool = False
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


class Client:
    """Async client of the server at ``base_url``; use it as an async context manager.

    ``timeout`` bounds each request in seconds, from send to the end of its stream. ``api``: ``native`` for SGLang's
    ``/generate`` or ``openai`` for ``/v1/completions``, where ``model`` is the name to ask for (empty: the first one
    that the server lists).
    """

    def __init__(self, base_url: str, timeout: float = 600.0, api: str = "native", model: str = "") -> None:
        self.base_url = base_url.rstrip("/")
        self._api, self._model = api, model
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_LINE_LIMIT,
            trust_env=False,  # a proxy between the client and a server on this machine would be measured too
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use the client as an async context manager")
        return self._session

    async def generate(self, prompt: list[int] | str, output_len: int) -> Reply:
        """Greedy answer of exactly ``output_len`` tokens to token ids or a text.

        A failure ends up in ``Reply.error``, not as an exception.
        """
        reply = Reply(prompt_tokens=0 if isinstance(prompt, str) else len(prompt))
        openai = self._api == "openai"
        body = self._openai_body(prompt, output_len) if openai else _native_body(prompt, output_len)
        reply.sent = time.perf_counter()
        try:
            async with self._open.post(self.endpoint, json=body) as response:
                if response.status != 200:
                    reply.error = f"HTTP {response.status}: {_short(await response.text())}"
                elif openai:
                    await _read_openai_stream(response, reply)
                else:
                    await _read_stream(response, reply)
        except asyncio.TimeoutError:
            reply.error = f"no answer within {self._timeout.total:g} s"
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as e:
            reply.error = _short(f"{type(e).__name__}: {e}")
        reply.ended = time.perf_counter()
        answered = reply.events[-1][1] if reply.events else 0
        if reply.ok and (answered != output_len or len(reply.output_ids) not in (0, output_len)):
            reply.error = f"{answered} output tokens instead of {output_len}"
        if reply.ok and not isinstance(prompt, str) and reply.prompt_tokens != len(prompt):
            reply.error = f"the server counted {reply.prompt_tokens} prompt tokens instead of {len(prompt)}"
        if reply.ok and reply.prompt_tokens < 1:
            reply.error = "the server did not count the prompt's tokens"
        return reply

    @property
    def endpoint(self) -> str:
        """Where requests go."""
        return f"{self.base_url}{'/v1/completions' if self._api == 'openai' else '/generate'}"

    def _openai_body(self, prompt: list[int] | str, output_len: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            # Beside OpenAI's own fields: exact lengths, and what SGLang says of hits and of token ids only if asked.
            "ignore_eos": True,
            "return_token_ids": True,
            "return_cached_tokens_details": True,
        }

    async def choose_model(self) -> None:
        """Ask the server which model it serves, if none was named and the endpoint wants a name. BenchError if none."""
        if self._api != "openai" or self._model:
            return
        try:
            async with self._open.get(f"{self.base_url}/v1/models") as r:
                listed = (await r.json(content_type=None))["data"]
            self._model = str(listed[0]["id"])
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError, KeyError, IndexError, TypeError) as e:
            raise BenchError(f"{self.base_url}/v1/models names no model: name it with --served-model") from e

    async def complete(
        self,
        input_ids: list[int],
        output_len: int,
        *,
        temperature: float = 0.0,
        logprobs: bool = False,
        score_from: int | None = None,
    ) -> Completion:
        """Exactly ``output_len`` tokens, not streamed. BenchError if the server fails or answers something else.

        ``logprobs``: with the log-probability of each token. ``score_from``: with those of the prompt's tokens from
        this position on, given what stands before them; the prefix cache then supplies nothing behind it.
        """
        body: dict[str, Any] = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": temperature, "max_new_tokens": output_len, "ignore_eos": True},
        }
        if logprobs or score_from is not None:
            body["return_logprob"] = True
        if score_from is not None:
            body["logprob_start_len"] = max(0, score_from - 1)  # SGLang gives none for the first one asked for
        try:
            async with self._open.post(f"{self.base_url}/generate", json=body) as response:
                if response.status != 200:
                    raise BenchError(f"the server answered HTTP {response.status}: {_short(await response.text())}")
                reply = await response.json(content_type=None)
            meta = reply["meta_info"]
            # [log-probability, token id, text] for each
            answered, prompt = (
                [float(entry[0]) for entry in meta.get(key) or () if entry[0] is not None]
                for key in ("output_token_logprobs", "input_token_logprobs")
            )
            scored = 0 if score_from is None else len(input_ids) - score_from
            cached = int(meta.get("cached_tokens") or 0)
            found = Completion(list(reply["output_ids"]), cached, answered, prompt[-scored:] if scored else [])
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            raise BenchError(f"{self.base_url} gave no answer: {_reason(e)}") from e
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise BenchError(f"{self.base_url}/generate answered something else than expected: {e!r}") from e
        if len(found.prompt_logprobs) != scored:
            raise BenchError(f"the server scored {len(found.prompt_logprobs)} tokens of the prompt instead of {scored}")
        if len(found.ids) != output_len or (logprobs and len(found.logprobs) != output_len):
            raise BenchError(f"the server answered {len(found.ids)} tokens instead of {output_len}")
        return found

    async def healthy(self, timeout: float = 30.0) -> bool:
        """Whether the server can generate; a server that is not there counts as not healthy.

        SGLang answers this call by running one token through the model, so it may take seconds on a slow machine.
        """
        try:
            async with self._open.get(f"{self.base_url}/health", timeout=aiohttp.ClientTimeout(timeout)) as r:
                return r.status == 200
        except (aiohttp.ClientError, asyncio.TimeoutError):
            return False

    async def flush(self, timeout: float = 30.0) -> None:
        """Empty the prefix cache, waiting up to ``timeout`` seconds for running requests. BenchError if refused."""
        try:
            async with self._open.post(f"{self.base_url}/flush_cache", params={"timeout": str(timeout)}) as r:
                if r.status != 200:
                    raise BenchError(f"the server refused to flush its prefix cache: {_short(await r.text())}")
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            raise BenchError(f"could not flush the prefix cache of {self.base_url}: {_reason(e)}") from e

    async def server_info(self) -> dict[str, Any]:
        """The server's resolved configuration and state; empty where it has no such page."""
        try:
            async with self._open.get(f"{self.base_url}/server_info") as r:
                info = await r.json(content_type=None) if r.status == 200 else {}
                return info if isinstance(info, dict) else {}
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
            return {}

    async def metrics(self, timeout: float = 10.0) -> str:
        """The server's Prometheus page; empty where it has none (SGLang: ``--enable-metrics``)."""
        try:
            # SGLang redirects /metrics to /metrics/.
            async with self._open.get(f"{self.base_url}/metrics", timeout=aiohttp.ClientTimeout(timeout)) as r:
                return await r.text() if r.status == 200 else ""
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
            return ""


def _native_body(prompt: list[int] | str, output_len: int) -> dict[str, Any]:
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True},
    }


async def _read_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """Fill ``reply`` from a ``/generate`` stream."""
    async for arrived, event in _events(response):
        if "error" in event:
            reply.error = _short(json.dumps(event["error"]))
            return
        meta = event["meta_info"]
        ids, so_far = event.get("output_ids") or [], int(meta["completion_tokens"])
        # A server repeats all ids so far in every event, unless it runs with incremental streaming.
        fresh = len(ids) < so_far
        reply.output_ids = reply.output_ids + ids if fresh else ids
        text = event.get("text") or ""
        reply.output_text = reply.output_text + text if fresh else text
        if so_far > (reply.events[-1][1] if reply.events else 0):
            reply.events.append((arrived, so_far))
        reply.prompt_tokens = int(meta["prompt_tokens"])
        if meta.get("cached_tokens") is not None:
            reply.cached_tokens = int(meta["cached_tokens"])
        tiers = meta.get("cached_tokens_details") or {}
        reply.cached_by_tier = {k: int(v) for k, v in tiers.items() if isinstance(v, int)}
        finish = meta.get("finish_reason") or {}
        if isinstance(finish, dict) and finish.get("type") == "abort":
            reply.error = _short(f"aborted by the server: {finish.get('message', '')}")


async def _read_openai_stream(response: aiohttp.ClientResponse, reply: Reply) -> None:
    """Fill ``reply`` from a ``/v1/completions`` stream.

    A server that counts tokens only at the end gives one event per piece of text; its tokens are spread over them.
    """
    pieces, total, counted = 0, 0, True
    async for arrived, event in _events(response):
        if "error" in event:
            reply.error = _short(json.dumps(event["error"]))
            return
        usage = event.get("usage") or {}
        for choice in event.get("choices") or ():
            reply.output_text += choice.get("text") or ""
            reply.output_ids += choice.get("token_ids") or []
            so_far = int(usage.get("completion_tokens") or 0)
            if not usage and choice.get("text"):
                counted, so_far = False, pieces + 1
            if so_far > pieces:
                pieces = so_far
                reply.events.append((arrived, so_far))
        if usage:
            reply.prompt_tokens, total = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
            told = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            reply.cached_tokens = reply.cached_tokens if told is None else int(told)
        tiers = (event.get("sglext") or {}).get("cached_tokens_details") or {}
        if tiers:
            reply.cached_by_tier = {k: int(v) for k, v in tiers.items() if isinstance(v, int)}
            reply.cached_tokens = sum(reply.cached_by_tier.values())
    if not counted and pieces:
        reply.events = [(arrived, max(1, round(n * total / pieces))) for arrived, n in reply.events]


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Arrival time and payload of each server-sent event, up to ``[DONE]``."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        arrived = time.perf_counter()
        payload = line[5:].strip()
        if payload == b"[DONE]":
            return
        yield arrived, json.loads(payload)


def _short(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _reason(error: BaseException) -> str:
    return _short(str(error)) or type(error).__name__
