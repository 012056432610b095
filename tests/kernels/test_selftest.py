"""The self-test that users run: it passes here, and it notices a broken kernel."""

from __future__ import annotations

import pytest
import torch

from replayssm_kernels import selftest, workload
from tests.kernels.machine import DEVICE


def test_everything_passes_and_is_finite() -> None:
    results = selftest.run(DEVICE)
    assert len(results) >= 4
    for name, error, bound, ok in results:
        assert ok and error <= bound, (name, error, bound)


@pytest.mark.parametrize("factor", [1.001, pytest.param(float("nan"), marks=pytest.mark.long)])
def test_a_wrong_output_is_reported(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output off by one part in a thousand fails every numeric line, NaN too."""
    decode = workload.decode

    def spoiled(*args: object) -> torch.Tensor:
        return decode(*args).mul_(factor)

    monkeypatch.setattr(workload, "decode", spoiled)
    failed = [r.name for r in selftest.run(DEVICE) if not r.ok]
    assert len(failed) >= 2
    assert "cursors and work lists" not in failed
