"""Direct steps on a server: batches of one write the state, larger ones append records, requests move between both."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.harness.events import DIRECT, Events
from tests.harness.judge import ask, ask_all, follow_transformers
from tests.harness.pool import on
from tests.harness.reference import prompt
from tests.harness.scenarios import cold_again
from tests.harness.server import Server


@on("deep-on-direct")
def test_a_request_alone_then_in_company_then_alone(server: Server) -> None:
    """Answers follow transformers, and what the cache kept of such a request equals a cold run."""
    events = Events()
    with ThreadPoolExecutor(1) as pool:
        lone = pool.submit(ask, server, prompt(40, seed=501), 60)
        events.wait_for_decoded_tokens(5)
        company = ask_all(server, [prompt(33, seed=502), prompt(21, seed=503)], [14, 9])
        first = lone.result()
    follow_transformers(server, [first, *company])
    kinds = [DIRECT in event.pending for event in events.of("decode")]
    assert kinds[0] and kinds[-1] and not all(kinds), "the batch was to grow and to shrink again"
    assert all(len(e.rows) == 1 for e, direct in zip(events.of("decode"), kinds, strict=True) if direct)
    later = ask(server, first.tokens + prompt(7, seed=504), 6)
    assert later.hit == 64
    follow_transformers(server, [later])
    cold_again(server, later)
