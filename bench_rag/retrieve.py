"""BM25 over a corpus: the passages that answer a question best."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import BenchError


class Retriever:
    """An index over ``passages`` (texts). Ties go to the earlier passage, so a ranking is a function of its input."""

    def __init__(self, passages: Sequence[str]) -> None:
        # bm25s imports JAX where it is installed, and JAX takes most of a GPU's memory: it belongs to the server.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        try:
            import bm25s
        except ModuleNotFoundError as error:
            raise BenchError(
                f"rag needs the package {error.name} for its retrieval: pip install 'sglang-replayssm[bench]', or "
                "leave rag out of --workload"
            ) from None

        self._bm25s = bm25s
        self._index = bm25s.BM25()
        self._count = len(passages)
        words = bm25s.tokenize(list(passages), stopwords="en", show_progress=False)
        if not words.vocab:
            raise BenchError("the corpus has no words to search for")
        self._index.index(words, show_progress=False)

    def best(self, question: str, count: int) -> list[int]:
        """Numbers of the ``count`` best passages, best first; passages without a common word fill the end in order."""
        import numpy as np

        words = self._bm25s.tokenize(question, stopwords="en", return_ids=False, show_progress=False)[0]
        scores = self._index.get_scores(words) if words else np.zeros(self._count)
        return [int(i) for i in np.argsort(-scores, kind="stable")[:count]]
