"""What retrieval must not do to the machine that is measured, and says when its library is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BUILD = "from bench_rag.retrieve import Retriever; Retriever(['one text', 'another']).best('text', 1)"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | {"PYTHONPATH": str(root)} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)


def test_jax_is_kept_off_the_gpu() -> None:
    """bm25s imports JAX where it finds it, and JAX would take three quarters of the GPU from the server."""
    done = run(BUILD + "; import os; print(os.environ['JAX_PLATFORMS'])")
    assert done.stdout.strip() == "cpu", done.stderr
    done = run(BUILD + "; import os; print(os.environ['JAX_PLATFORMS'])", JAX_PLATFORMS="tpu")
    assert done.stdout.strip() == "tpu", "what the user says counts"


def test_a_missing_library_is_one_sentence() -> None:
    hide = "import sys; sys.modules['bm25s'] = None; "
    done = run(
        hide + "from bench_rag.errors import BenchError\ntry:\n    " + BUILD + "\nexcept BenchError as e: print(e)"
    )
    assert "pip install 'sglang-replayssm[bench]'" in done.stdout, done.stderr
