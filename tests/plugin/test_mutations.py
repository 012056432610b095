"""Every fold, reset and guard of the plugin is missed by the judge when it is taken out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import host
from tests.plugin import twins
from tests.plugin.judge import attempt, random_trace
from tests.plugin.mutations import MUTATIONS, Mutation, applied
from tests.plugin.test_judge import GRID, SETTINGS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(host.has_gpu(), reason="the judge's launches are twins on the host"),
]


@pytest.fixture(autouse=True)
def fast(isolated: None) -> Iterator[None]:
    with twins.in_place_of_kernels():
        yield


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_the_judge_notices(mutation: Mutation) -> None:
    with applied(mutation):
        outcomes = (attempt(random_trace(1000, seed), chunk=GRID, **SETTINGS[mutation.setting]) for seed in range(8))
        assert any(outcome.error is not None for outcome in outcomes), f"{mutation.where} without {mutation.old!r}"
