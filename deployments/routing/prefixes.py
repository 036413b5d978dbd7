"""PrefixHolders: which Routers have reported that they hold the keys and values of a prompt's first tokens.

A prefix is known by a hash of its tokens and `cache_salt`, every `PREFIX_TOKENS` tokens; hashes of integers are equal
in all processes. A wrong hit costs time only, because Routers compare the tokens' SHA-256.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence, Set

from engine.blocks.block_pool import salt_digest

PREFIX_TOKENS = 16
MAX_PREFIXES = 2**17
"""Prefixes that an Ingress remembers, in some 30 MB, for about 10,000 requests."""


def prefix_hashes(prompt: Sequence[int], cache_salt: str | None) -> tuple[int, ...]:
    """Return the hash of each prefix of a prompt, shortest first; takes some 10 ms for 100,000 tokens."""
    last, hashes = int.from_bytes(salt_digest(cache_salt)[:7]), []
    for end in range(PREFIX_TOKENS, len(prompt) + 1, PREFIX_TOKENS):
        last = hash((last, *prompt[end - PREFIX_TOKENS : end]))
        hashes.append(last)
    return tuple(hashes)


def landmarks(hashes: Sequence[int]) -> set[int]:
    """Return the hashes by which later prompts find this prompt.

    They lie 1, 2, 4, ... hashes from the start, for prompts that begin alike, and from the end, for a next turn.
    """
    steps = [2**n for n in range(len(hashes).bit_length())]
    return {hashes[index] for step in steps for index in (step - 1, len(hashes) - step)}


class PrefixHolders:
    """The Routers that hold each known prefix; the prefixes reported least recently are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, frozenset[str]] = OrderedDict()

    def note(self, hashes: Iterable[int], router: str, others: Set[str]) -> None:
        """Add a Router to the holders of prefixes; of the earlier holders, keep only Routers in `others`."""
        for prefix in hashes:
            self._holders[prefix] = (self._holders.pop(prefix, frozenset()) & others) | {router}
        while len(self._holders) > MAX_PREFIXES:
            self._holders.popitem(last=False)

    def known(self, hashes: Sequence[int]) -> Iterator[tuple[int, frozenset[str]]]:
        """Yield the known prefixes, longest first: the number of tokens, and the Routers."""
        for index in range(len(hashes) - 1, -1, -1):
            if holders := self._holders.get(hashes[index]):
                yield (index + 1) * PREFIX_TOKENS, holders
