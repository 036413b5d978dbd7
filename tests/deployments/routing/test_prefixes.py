"""Which Routers hold a prompt's first tokens; `tests/e2e/replicated/test_affinity.py` has chats meet theirs."""

import random

import pytest

from deployments.routing import prefixes
from deployments.routing.prefixes import PREFIX_TOKENS, PrefixHolders, landmarks, prefix_hashes

PROMPT = [random.Random(0).randrange(50_000) for _ in range(1000)]


def known(holders: PrefixHolders, prompt: list[int], salt: str | None = None) -> tuple[int, str]:
    """The longest known prefix and its Routers."""
    length, names = next(holders.known(prefix_hashes(prompt, salt)), (0, frozenset()))
    return length, "".join(sorted(names))


def note(holders: PrefixHolders, prompt: list[int], router: str, salt: str | None = None, others: str = "abc") -> None:
    holders.note(landmarks(prefix_hashes(prompt, salt)), router, set(others))


def test_a_hash_is_that_of_all_tokens_so_far_and_of_the_salt() -> None:
    hashes = prefix_hashes(PROMPT, None)
    assert len(set(hashes)) == len(hashes) == 1000 // PREFIX_TOKENS
    assert prefix_hashes(PROMPT[:500], None) == hashes[: 500 // PREFIX_TOKENS]
    changed = prefix_hashes([*PROMPT[:100], 0, *PROMPT[101:]], None)
    assert [a == b for a, b in zip(hashes, changed, strict=True)] == [n < 100 // PREFIX_TOKENS for n in range(62)]
    assert not set(prefix_hashes(PROMPT, "mine")) & set(hashes)
    assert prefix_hashes(PROMPT[: PREFIX_TOKENS - 1], None) == ()


def test_the_same_hash_is_made_in_every_process() -> None:
    assert prefix_hashes(list(range(32)), None) == (7173486431850257625, 3258165760307121103)


@pytest.mark.parametrize("length", [0, 1, 3, 8, 4097])
def test_landmarks_are_few_and_double_their_distances_from_both_ends(length: int) -> None:
    found = landmarks(range(1, length + 1))
    assert len(found) <= 2 * length.bit_length()
    assert found <= {*range(1, length + 1)}
    if length:
        assert {1, length, max(1, length - 1)} <= found
        for place in range(1, length + 1):
            below = max(landmark for landmark in found if landmark <= place)
            assert below * 2 > place, "a prompt that shares so much finds at least half of it"
            assert 2 * (length - below) <= 4 * (length - place) + 4, "and one that lacks the end loses little more"


def test_the_next_turn_finds_its_chat_even_if_its_prompt_lacks_the_last_tokens() -> None:
    holders = PrefixHolders()
    note(holders, PROMPT, "a")
    assert known(holders, [*PROMPT, *range(300)]) == (992, "a")
    assert known(holders, [*PROMPT[:-20], *range(300)]) == (976, "a")
    assert known(holders, PROMPT, "mine") == (0, "")


def test_prompts_of_one_system_prompt_find_its_holders() -> None:
    holders = PrefixHolders()
    for router in "ab":
        note(holders, [*PROMPT[:400], *(random.Random(router).randrange(50_000) for _ in range(200))], router)
    assert known(holders, [*PROMPT[:400], *range(100)]) == (352, "ab")


def test_stopped_routers_are_forgotten_where_another_one_is_noted() -> None:
    holders = PrefixHolders()
    note(holders, PROMPT, "a")
    note(holders, PROMPT, "b", others="bc")
    assert known(holders, PROMPT) == (992, "b")


def test_the_prefixes_that_were_reported_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_PREFIXES", 3)
    holders = PrefixHolders()
    for prefix in (1, 2, 3, 1, 4):
        holders.note([prefix], "a", set())
    assert [prefix for prefix in range(5) if next(holders.known([prefix]), None)] == [1, 3, 4]
