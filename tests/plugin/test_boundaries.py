"""The policy: which states a prefill leaves, and which stored states an eviction spares."""

from __future__ import annotations

import random

import pytest

from sglang_replayssm.boundaries import (
    HINTS,
    MOST_HINTS,
    MOST_STATES,
    TRIED,
    BoundaryPolicy,
    StateLedger,
    TextHistory,
    parse_hints,
    parse_policy,
)

RANDOM = random.Random(5)


def text(length: int) -> list[int]:
    return RANDOM.choices(range(100, 30_000), k=length)


# -- choose ------------------------------------------------------------------------------------------------------------


def test_an_unknown_prompt_gets_its_tail() -> None:
    assert BoundaryPolicy(tail=(64, 128)).choose(0, 2037, 2037) == [(1909, "tail"), (1973, "tail")]


def test_a_stride_comes_after_the_tail_from_the_end_back() -> None:
    policy = BoundaryPolicy(most=4, tail=(64,), stride=500)
    assert policy.choose(0, 2037, 2037) == [(500, "stride"), (1000, "stride"), (1500, "stride"), (1973, "tail")]
    assert policy.choose(0, 2037, 2037, branch=1400) == [(1400, "branch"), (1500, "stride"), (1973, "tail")]


def test_a_branch_is_kept_to_the_token_and_first() -> None:
    policy = BoundaryPolicy(most=1)
    assert policy.choose(0, 2037, 2037, branch=1937, joints=[300]) == [(1937, "branch")]


def test_a_prompt_whose_new_text_is_short_gets_no_guess() -> None:
    assert BoundaryPolicy().choose(1937, 2037, 2037) == []
    assert BoundaryPolicy().choose(0, 200, 200) == []


def test_the_last_chunk_of_a_long_prompt_gets_the_tail() -> None:
    policy = BoundaryPolicy(tail=(64, 128))
    assert policy.choose(0, 1900, 2037, cached=0) == []
    assert policy.choose(1900, 2037, 2037, cached=0) == [(1973, "tail")]
    assert policy.choose(1900, 2037, 2037, cached=1900) == [], "all before came out of the cache"


def test_hints_replace_guesses() -> None:
    assert BoundaryPolicy().choose(0, 1500, 1500, hints=[400, 777, 1333]) == [
        (400, "hint"),
        (777, "hint"),
        (1333, "hint"),
    ]


def test_what_is_hinted_is_taken_beside_the_rest() -> None:
    hints = list(range(400, 4400, 400))
    chosen = BoundaryPolicy(most=1).choose(0, 5000, 5000, branch=100, joints=[300, 350], hints=hints)
    assert chosen == [(100, "branch"), *((at, "hint") for at in hints[: MOST_STATES - 1])]


def test_a_key_names_pages() -> None:
    chosen = BoundaryPolicy(tail=(64,)).choose(0, 2037, 2037, branch=1000, page_size=64)
    assert chosen == [(960, "branch"), (1920, "tail")]


@pytest.mark.parametrize("seed", range(50))
def test_boundaries_lie_inside_the_extend_and_apart(seed: int) -> None:
    rng = random.Random(seed)
    policy = BoundaryPolicy(
        stride=rng.choice([0, 90]),
        tail=tuple(rng.sample(range(1, 600), 3)),
        most=rng.randrange(6),
        least=rng.randrange(1, 90),
        cold=0,
    )
    start = rng.randrange(500)
    end = start + rng.randrange(1, 900)
    chosen = policy.choose(
        start,
        end,
        end + rng.choice([0, 700]),
        branch=rng.randrange(1500),
        joints=[rng.randrange(1500) for _ in range(4)],
        hints=[rng.randrange(1, 1500) for _ in range(rng.randrange(4))],
        page_size=(page := rng.choice([1, 16, 64])),
    )
    at = [position for position, _ in chosen]
    assert sum(kind != "hint" for _, kind in chosen) <= policy.most
    assert at == sorted(at)
    assert all(start + policy.least <= position < end and position % page == 0 for position in at)
    assert all(later - earlier >= policy.least for earlier, later in zip(at, at[1:], strict=False))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("most", -1),
        ("most", MOST_STATES + 1),
        ("stride", -1),
        ("cold", -1),
        ("least", 0),
        ("tail", (0,)),
        ("share", 1.5),
        ("protect", -0.1),
        ("worth", 2.0),
    ],
)
def test_a_policy_without_sense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        BoundaryPolicy(**{field: value})


# -- text --------------------------------------------------------------------------------------------------------------


def test_the_second_prompt_of_a_group_shows_the_branch() -> None:
    history, shared = TextHistory(), text(1937)
    assert history.read(shared + text(64)) == (0, [])
    assert history.read(shared + text(100)) == (1937, [])


def test_repeated_documents_show_their_edges_at_any_place() -> None:
    history = TextHistory()
    system, first, second, third = text(128), text(333), text(777), text(501)
    history.read(system + first + second + text(64))
    history.read(system + third + text(64))
    assert history.read(system + third + second + text(80)) == (128 + 501, [128 + 501, 128 + 501 + 777])


def test_what_came_out_of_the_cache_is_not_read_again() -> None:
    history, shared, more = TextHistory(), text(1000), text(300)
    history.read(shared + more + text(40))
    size = len(history._young)
    assert history.read(shared + more + text(50), start=1000) == (1300, [])
    assert len(history._young) == size + 50
    other = text(200)
    assert history.read(shared + other + more[:100] + text(9), start=1000) == (0, [1200, 1300])


def test_an_identical_prompt_has_no_edges() -> None:
    history, prompt = TextHistory(), text(500)
    history.read(prompt)
    assert history.read(prompt) == (0, [])


def test_prompts_of_another_salt_are_strangers() -> None:
    history, shared = TextHistory(), text(500)
    history.read(shared + text(64), "one")
    assert history.read(shared + text(64), "two") == (0, [])


def test_history_forgets() -> None:
    history, shared = TextHistory(capacity=1000), text(500)
    history.read(shared + text(64))
    for _ in range(5):
        history.read(text(900))
    assert history.read(shared + text(64)) == (0, [])
    assert len(history._young) + len(history._old) < 4000


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33])
def test_short_prompts(length: int) -> None:
    history, prompt = TextHistory(), text(length)
    assert history.read(prompt) == (0, [])
    assert history.read(prompt) == (0, [])


# -- ledger ------------------------------------------------------------------------------------------------------------


class Lru:
    """A cache that evicts its oldest, and the ledger beside it."""

    def __init__(self, **policy: float) -> None:
        self.order: list[str] = []
        self.ledger = StateLedger(BoundaryPolicy(**policy))  # type: ignore[arg-type]

    def store(self, name: str, kind: str = "tail") -> None:
        self.order.append(name)
        self.ledger.stored(name, kind)

    def use(self, name: str) -> None:
        self._touch(name, None)
        self.ledger.used(name, lambda: None)

    def evict(self, count: int = 1) -> list[str]:
        self.ledger.spare(self._touch, count)
        gone, self.order = self.order[:count], self.order[count:]
        self.ledger.prune(self.order.__contains__)
        return gone

    def _touch(self, name: str, key: None) -> bool:
        if name not in self.order:
            return False
        self.order.remove(name)
        self.order.append(name)
        return True


def test_states_nobody_used_go_first() -> None:
    cache = Lru(protect=1.0)
    for name in "abcd":
        cache.store(name)
    cache.use("a")
    cache.use("b")
    assert cache.evict(2) == ["c", "d"]
    assert cache.evict() == ["a"], "the used ones in the order of their use"


def test_a_branch_counts_as_used() -> None:
    cache = Lru(protect=1.0)
    cache.store("shared", "branch")
    cache.store("guess")
    assert cache.evict() == ["guess"]


def test_old_used_states_go_where_nearly_all_are_used() -> None:
    cache = Lru(protect=0.5)
    for name in "abcd":
        cache.store(name)
    for name in "abc":
        cache.use(name)
    assert cache.order == ["d", "a", "b", "c"]
    cache.store("e")
    assert cache.evict(2) == ["d", "a"], "three of four are proven, more than the policy spares"


def test_a_state_that_went_by_itself_is_forgotten() -> None:
    cache = Lru(protect=1.0)
    cache.store("a")
    cache.store("b")
    cache.use("a")
    cache.store("c")
    cache.order.remove("a")
    assert cache.evict() == ["b"]
    assert cache.ledger.proven <= len(cache.ledger)
    assert cache.evict() == ["c"]
    assert len(cache.ledger) == cache.ledger.proven == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_never_costs_a_used_state_while_an_unused_one_is_left(seed: int) -> None:
    rng = random.Random(seed)
    cache, used, made = Lru(protect=1.0), set(), 0
    for _ in range(500):
        action = rng.random()
        if action < 0.5:
            made += 1
            cache.store(str(made))
        elif action < 0.75 and cache.order:
            cache.use(name := rng.choice(cache.order))
            used.add(name)
        elif cache.order:
            unused = set(cache.order) - used
            for name in cache.evict():
                assert name not in used or not unused
        assert set(cache.ledger._states) >= set(cache.order)
        assert cache.ledger.proven == sum(state.proven for state in cache.ledger._states.values())


def test_a_kind_that_nobody_uses_is_kept_seldom() -> None:
    ledger = StateLedger(BoundaryPolicy(worth=0.1))
    for number in range(TRIED):
        assert ledger.worth("finish", slots=100, free=0)
        ledger.stored(number, "finish")
    assert [ledger.worth("finish", slots=100, free=24) for _ in range(8)] == [False] * 7 + [True]
    assert ledger.worth("finish", slots=100, free=25), "room enough"
    for number in range(TRIED):
        ledger.stored(TRIED + number, "tail")
    assert not ledger.worth("tail", slots=100, free=100), "room does not pay for a prefill's time"
    for number in range(TRIED // 8):
        ledger.used(number, lambda: None)
    assert ledger.worth("finish", slots=100, free=0)


def test_unproven_states_leave_room() -> None:
    ledger = StateLedger(BoundaryPolicy(share=0.1))
    assert ledger.allowance(slots=100, free=40, evictable=0) == 30
    for number in range(20):
        ledger.stored(number, "branch")
    assert ledger.allowance(slots=100, free=5, evictable=25) == 0, "20 of the 25 are proven"
    assert ledger.allowance(slots=100, free=8, evictable=25) == 3


# -- settings ----------------------------------------------------------------------------------------------------------


def test_hints_are_token_counts() -> None:
    assert parse_hints({HINTS: [900, 300, 300]}) == ([300, 900], None)
    assert parse_hints(None) == parse_hints({}) == parse_hints("text") == ([], None)


@pytest.mark.parametrize(
    "hints", [7, "1,2", [0], [-3], [1.5], [True], ["9"], [None], {1: 2}, list(range(1, MOST_HINTS + 2))]
)
def test_other_hints_are_ignored_with_a_sentence(hints: object) -> None:
    found, problem = parse_hints({HINTS: hints})
    assert found == []
    assert problem is not None and HINTS in problem and problem.endswith(".")


def test_settings() -> None:
    assert parse_policy("") == BoundaryPolicy()
    assert parse_policy("off") is None
    assert parse_policy("tail=64:128:256,most=2,share=0.5,finish=0") == BoundaryPolicy(
        tail=(64, 128, 256), most=2, share=0.5, finish=False
    )
    assert parse_policy("tail=") == BoundaryPolicy(tail=())


@pytest.mark.parametrize("setting", ["most", "most=", "most=x", "tail=1:x", "finish=yes", "speed=3", "share=2"])
def test_a_wrong_setting_is_named(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        parse_policy(setting)


def test_events_tell_what_became_of_states_at_boundaries() -> None:
    """Only of those: what SGLang stored by itself (kind "") is none of ours."""
    ledger = StateLedger(BoundaryPolicy())
    for name, kind in (("a", "tail"), ("b", ""), ("c", "branch"), ("a", "tail")):  # the last one again
        ledger.stored(name, kind)
    for name in ("a", "a", "b", "unknown", "c"):
        ledger.used(name, lambda: None)
    assert ledger.events == {"taken": 2, "hit": 3}
    ledger.prune(lambda name: name in ("unknown", "c"))
    assert ledger.events == {"taken": 2, "hit": 3, "evicted": 1}


@pytest.mark.parametrize("seed", range(5))
def test_every_state_at_a_boundary_is_there_or_counted_as_evicted(seed: int) -> None:
    """However it went: as the victim of an eviction, or by itself, proven or not."""
    rng, cache = random.Random(seed), Lru(protect=0.75)
    for number in range(300):
        cache.store(str(number), rng.choice(["tail", "branch", "joint"]))
        if rng.random() < 0.5:
            cache.use(rng.choice(cache.order))
        if rng.random() < 0.3:
            cache.order.remove(rng.choice(cache.order))
        while len(cache.order) > 12:
            cache.evict(rng.randint(1, 3))
    cache.ledger.prune(lambda name: False)  # a flush
    assert len(cache.ledger) == 0
    assert cache.ledger.events["evicted"] == cache.ledger.events["taken"] == 300
