"""Servers by configuration name, at most one alive at a time, and answers that outlive them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.harness import tiny
from tests.harness.configs import CONFIGS
from tests.harness.server import Answer, Server


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test once per configuration: its `server` fixture takes each of them in turn."""
    return pytest.mark.parametrize("server", names, indirect=True)


class ServerPool:
    """Starts the server of a configuration when it is asked for, ending the one before it."""

    def __init__(self) -> None:
        self._name = ""
        self._server: Server | None = None
        self._answers: dict[tuple[object, ...], Answer] = {}

    def get(self, name: str) -> Server:
        """The running server of this configuration; a dead one is started anew."""
        if self._server is not None and (self._name != name or not self._server.alive()):
            self.close()
        if self._server is None:
            config = CONFIGS[name]
            draft = () if config.draft is None else ("--speculative-draft-model-path", str(tiny.build(config.draft)))
            server = Server(tiny.build(config.model), (*config.args, *draft), config.env, plugin=config.plugin)
            self._server, self._name = server.__enter__(), name
        return self._server

    def answer(self, name: str, prompt: Sequence[int], max_new_tokens: int) -> Answer:
        """What a server of this configuration with an empty prefix cache answers; remembered for the session.

        Ask in a test of that configuration first, where its server runs anyway: asked only from another's, it
        costs two server starts.
        """
        key = (name, tuple(prompt), max_new_tokens)
        if key not in self._answers:
            server = self.get(name)
            server.flush()
            self._answers[key] = server.generate(prompt, max_new_tokens)
        return self._answers[key]

    def close(self) -> None:
        """End the running server, if there is one."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
