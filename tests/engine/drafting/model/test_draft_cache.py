"""What a drafter holds of a text: the longest common prefix, and committed tokens that are compared once."""

from hypothesis import given
from hypothesis import strategies as st

from engine.drafting.model.draft_cache import CachedPrefix, Text, common_length


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 60))
def test_common_length_is_the_length_of_the_longest_common_prefix(known, other, shared):
    tokens = [*known[:shared], *other, 0]
    prefix = CachedPrefix(known)
    for num_committed in range(len(tokens) + 1):
        text = Text(tokens[:num_committed], tokens[num_committed:])
        length = common_length(prefix, text)
        assert known[:length] == tokens[:length]
        assert length == min(len(known), len(tokens) - 1) or known[length] != tokens[length]
        assert prefix.num_committed == min(length, num_committed)


def test_committed_tokens_are_compared_once():
    class Counted(list):
        num_read = 0

        def __getitem__(self, index):
            Counted.num_read += len(range(*index.indices(len(self))))
            return list.__getitem__(self, index)

    known = list(range(1000))
    prefix, text = CachedPrefix(list(known)), Text(Counted([*known, 5]), [7])
    assert common_length(prefix, text) == 1000
    Counted.num_read = 0
    assert common_length(prefix, text) == 1000
    assert Counted.num_read == 0
