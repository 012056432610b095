"""Tests of sglang-replayssm. A package, so that `tests.harness` resolves; none of it ships in the wheel."""
