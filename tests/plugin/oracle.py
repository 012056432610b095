"""A plain recurrence over token ids: what a slot must hold after any text. A layer's inputs depend on the id alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from replayssm_kernels import reference
from tests.plugin.machine import Sizes

WINDOW = 3  # tokens of a conv window
_VOCABULARY = 509  # ids beyond share the inputs of smaller ones
_REMEMBERED = 6000  # states


class Oracle:
    """States, conv windows and outputs after a text, in float64; one key head and one v-head per layer.

    Attributes:
        mixed, a, b: float32 inputs by token id, [ids, layers, 2 K + V], [ids, layers, 1] twice.
        A_log, dt_bias: per layer, [1].
    """

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        layers, width = len(sizes.layer_ids), 2 * sizes.key_dim + sizes.value_dim

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=random)

        self.mixed, self.a, self.b = (draw(_VOCABULARY, layers, n) for n in (width, 1, 1))
        self.A_log, self.dt_bias = [draw(1) - 1.0 for _ in range(layers)], [draw(1) for _ in range(layers)]
        self.scale = sizes.key_dim**-0.5
        tokens = [
            reference.token(
                self.mixed[:, layer],
                reference.gdn_gate(self.a[:, layer], self.A_log[layer], self.dt_bias[layer]),
                reference.update_rate(self.b[:, layer], rounded=True),
                1,
                sizes.key_dim,
                self.scale,
            )
            for layer in range(layers)
        ]
        self._q, self._k, self._v, gates, self._beta = (
            torch.stack(part, 1)[:, :, 0].numpy() for part in zip(*tokens, strict=True)
        )
        self._decay = np.exp(gates)  # [ids, layers, 1]
        self._zeros = np.zeros((layers, sizes.value_dim, sizes.key_dim))
        self._windows = self.mixed.numpy()
        self._known: dict[int, np.ndarray] = {}

    def state(self, text: Sequence[int]) -> np.ndarray:
        """[layers, V, K] after the text's last token."""
        names, name = [], 0
        for token in text:
            name = hash((name, token))
            names.append(name)
        start = len(text)
        while start and names[start - 1] not in self._known:
            start -= 1
        state = self._known[names[start - 1]] if start else self._zeros
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        for name, token in zip(names[start:], text[start:], strict=True):
            state = self._known[name] = self._step(state, token % _VOCABULARY)
        return state

    def _step(self, state: np.ndarray, token: int) -> np.ndarray:
        k = self._k[token]
        state = state * self._decay[token][:, :, None]
        u = self._beta[token][:, None] * (self._v[token] - (state @ k[:, :, None])[..., 0])
        return state + u[:, :, None] * k[:, None, :]

    def output(self, text: Sequence[int]) -> np.ndarray:
        """[layers, V] of the text's last token."""
        return (self.state(text) @ self._q[text[-1] % _VOCABULARY][:, :, None])[..., 0]

    def window(self, text: Sequence[int]) -> np.ndarray:
        """[layers, 2 K + V, WINDOW]: the raw inputs of the last tokens, zeros before the first."""
        columns = [self._windows[token % _VOCABULARY] for token in text[-WINDOW:]]
        columns = [np.zeros_like(self._windows[0])] * (WINDOW - len(columns)) + columns
        return np.stack(columns, -1)

    def inputs(self, tokens: Sequence[int], layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """mixed_qkv, a and b of some tokens in one layer."""
        index = torch.tensor([token % _VOCABULARY for token in tokens], dtype=torch.int64)
        return self.mixed[index, layer], self.a[index, layer], self.b[index, layer]
