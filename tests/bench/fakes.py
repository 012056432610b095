"""Stand-ins for SGLang that need no model: an HTTP server with exact timings, and a process that will not die."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeSglang:
    """Answers ``/generate`` like SGLang, one event per entry of ``events`` (seconds to wait, tokens it brings).

    ``/v1/completions`` likewise: ``foreign`` leaves out what OpenAI's endpoint does not have (token ids, counts before
    the end, SGLang's split of hits), ``cache_report`` adds its count of cached tokens. A prompt of text counts one
    token per word, and answers in words. ``whole``: what to answer where no stream is asked for.

    ``cached``: prefix tokens to report per request, in order of arrival, then 0. ``incremental``: send only new ids per
    event. ``metrics``: pages to show in turn, the last one from then on; empty for a server that has none. Output
    token i of a prompt is ``sum(prompt) + i``, so the client's ids can be checked. ``most_in_flight``, ``prompts`` and
    ``metrics_asked`` record what the client did.
    """

    events: list[tuple[float, int]]
    cached: list[int] = field(default_factory=list)
    incremental: bool = False
    foreign: bool = False
    cache_report: bool = False
    whole: dict[str, Any] | None = None
    fail_with: dict[str, Any] | None = None
    prompts: list[list[int] | str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    flushes: int = 0
    most_in_flight: int = 0
    in_flight: int = 0
    port: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)
    metrics_asked: int = 0

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_get("/server_info", self._info)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body.get("text", body.get("input_ids")), self._stream)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], self._openai_stream)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int] | str, stream: Any
    ) -> web.StreamResponse:
        self.bodies.append(body)
        if not body.get("stream"):
            return web.json_response(self.whole)
        cached = self.cached[len(self.prompts)] if len(self.prompts) < len(self.cached) else 0
        self.prompts.append(prompt)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            if self.fail_with is not None:
                await self._send(response, self.fail_with)
            else:
                limit = body["max_tokens"] if "prompt" in body else body["sampling_params"]["max_new_tokens"]
                await stream(response, prompt, cached, limit)
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.in_flight -= 1

    @staticmethod
    def _tokens(prompt: list[int] | str) -> list[int]:
        return [len(word) for word in prompt.split()] if isinstance(prompt, str) else prompt

    async def _stream(self, response: web.StreamResponse, prompt: list[int] | str, cached: int, limit: int) -> None:
        ids: list[int] = []
        prompt_ids = self._tokens(prompt)
        for wait, tokens in self.events:
            await asyncio.sleep(wait)
            fresh = [sum(prompt_ids) + i for i in range(len(ids), min(limit, len(ids) + tokens))]
            ids += fresh
            done = len(ids) >= limit
            meta = {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(ids),
                "cached_tokens": cached,
                "cached_tokens_details": {"device": cached, "host": 0},
                "finish_reason": {"type": "length"} if done else None,
            }
            shown = fresh if self.incremental else ids
            text = "".join(f"w{i} " for i in shown)
            await self._send(response, {"output_ids": shown, "text": text, "meta_info": meta})
            if done:
                return

    async def _openai_stream(
        self, response: web.StreamResponse, prompt: list[int] | str, cached: int, limit: int
    ) -> None:
        prompt_ids, made = self._tokens(prompt), 0
        usage: dict[str, Any] = {"prompt_tokens": len(prompt_ids)}
        for wait, tokens in self.events:
            await asyncio.sleep(wait)
            fresh = [sum(prompt_ids) + i for i in range(made, min(limit, made + tokens))]
            made += len(fresh)
            usage["completion_tokens"] = made
            choice = {"text": "".join(f"w{i} " for i in fresh), "token_ids": None if self.foreign else fresh}
            await self._send(response, {"choices": [choice], "usage": None if self.foreign else usage})
            if made >= limit:
                break
        if not self.foreign:
            tiers = {"device": cached, "host": 0}
            await self._send(response, {"choices": [], "sglext": {"cached_tokens_details": tiers}})
        if self.cache_report:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._send(response, {"choices": [], "usage": usage})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-model"}]})

    @staticmethod
    async def _send(response: web.StreamResponse, payload: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushes += 1
        return web.Response()

    async def _metrics(self, request: web.Request) -> web.Response:
        self.metrics_asked += 1
        if not self.metrics:
            return web.Response(status=404)
        return web.Response(text=self.metrics[min(self.metrics_asked, len(self.metrics)) - 1])

    async def _info(self, request: web.Request) -> web.Response:
        state = {"effective_max_running_requests_per_dp": 4}
        return web.json_response({"version": "fake", "internal_states": [state], "page_size": 1, **self.info})


def main() -> None:
    """Run as a process in the place of a server: ``fakes.py PORT [arguments]``.

    ``--die`` prints a reason and ends at once, ``--die-after N`` at the N-th prompt; ``--hit PERCENT`` of every prompt
    is reported cached, ``--foreign`` reports none on OpenAI's endpoint; ``--refuse`` answers every request with an
    error; ``--slots`` and ``--tokens`` are its pools; ``--no-plugin`` leaves ``--enable-linear-replayssm`` to SGLang
    itself.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--hit", type=float, default=0)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--enable-linear-replayssm", action="store_true")
    parser.add_argument("--no-plugin", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--tokens", type=int)
    options, _ = parser.parse_known_args()
    if options.die:
        print("ValueError: these arguments do not go together", flush=True)
        raise SystemExit(3)

    class Fake(FakeSglang):
        async def _generate(self, request: web.Request) -> web.StreamResponse:
            if options.die_after and len(self.prompts) + 1 >= options.die_after:
                print("CUDA error: out of luck", flush=True)
                os._exit(7)
            return await super()._generate(request)

        async def _answer(self, request: web.Request, body: dict, prompt: list[int] | str, stream: Any) -> Any:
            hits = int(len(self._tokens(prompt)) * options.hit / 100)
            self.cached = [*([0] * len(self.prompts)), hits]
            return await super()._answer(request, body, prompt, stream)

    async def serve() -> None:
        refusal = {"error": {"message": "not today"}} if options.refuse else None
        info = {
            "launch_command": " ".join(sys.argv),
            "enable_linear_replayssm": options.enable_linear_replayssm and options.no_plugin,
            "enable_hierarchical_cache": options.enable_hierarchical_cache,
            "max_mamba_cache_size": options.slots,
            "max_total_num_tokens": options.tokens,
        }
        pages = [f"sglang:mamba_usage {share}\n" for share in (0.25, 0.5)] if options.enable_metrics else []
        fake = Fake(
            events=[(0.01, 1)] * 64,
            fail_with=refusal,
            port=options.port,
            info=info,
            metrics=pages,
            foreign=options.foreign,
        )
        async with fake:
            await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
