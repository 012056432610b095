"""Text to token ids, anywhere: with a model's own tokenizer, or byte by byte where there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BenchError

if TYPE_CHECKING:
    from .workloads import Vocab


@dataclass(frozen=True)
class Tokeniser:
    """``name`` is for reports; ``encode`` adds no special tokens, so that encoded parts can be joined.

    ``token_id``: the id of one token by its text, None for what is no token.
    """

    name: str
    encode: Callable[[str], list[int]]
    token_id: Callable[[str], int | None]


@functools.lru_cache(maxsize=4)
def tokeniser(source: str, vocab: Vocab) -> Tokeniser:
    """The tokenizer at ``source``: a ``tokenizer.json`` or a folder that holds one; empty gives bytes.

    A byte becomes the token id ``vocab.low + byte``, so that texts keep what they share to the token on servers
    without a tokenizer; a real tokenizer makes about four times fewer tokens of the same text. BenchError if the file
    cannot be read, or if ``vocab`` holds fewer ids than there are bytes.
    """
    if not source:
        if vocab.high - vocab.low < 256:
            raise BenchError(f"text as bytes needs 256 token ids, and {vocab.low}:{vocab.high} holds fewer")

        def encode(text: str) -> list[int]:
            return [vocab.low + byte for byte in text.encode()]

        return Tokeniser("bytes", encode, lambda text: encode(text)[0] if len(text.encode()) == 1 else None)
    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BenchError("reading a tokenizer.json needs the package tokenizers (SGLang brings it)") from None
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises Exception itself, for a missing file as for a broken one
        raise BenchError(f"cannot read the tokenizer {path}: {e}") from e
    return Tokeniser(
        path.resolve().parent.name,
        lambda text: loaded.encode(text, add_special_tokens=False).ids,
        loaded.token_to_id,
    )
