"""Kernel tests run on a GPU where there is one, else in Triton's interpreter (chosen before Triton's import)."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("replayssm_cpu_host") is not None:
        from replayssm_cpu_host import interpreter

        interpreter.install()  # bf16, and launches that do not copy every tensor twice

if importlib.util.find_spec("replayssm_kernels") is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
