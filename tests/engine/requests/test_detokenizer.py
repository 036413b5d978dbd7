"""Text as tokens come, one by one or several at once; `test_sequence` cuts it at random over several tokenizers."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.requests.detokenizer import Detokenizer
from tests.engine.tokenizers import sentencepiece_tokenizer
from tests.fakes import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def ids(tokenizer, text):
    return tokenizer.encode(text).ids


def pieces(detokenizer, token_ids, **settings):
    return [detokenizer.append([token], **settings) for token in token_ids]


def test_a_character_is_shown_when_its_last_byte_is_there(tokenizer):
    detokenizer = Detokenizer(tokenizer, [])
    assert [text for text, _ in pieces(detokenizer, ids(tokenizer, "a漢b"))] == ["a", "", "", "漢", "b"]


@pytest.mark.parametrize("length", [1, 7, 100])
@pytest.mark.parametrize("name", ["bytes", "sentencepiece"])
def test_a_prompt_that_ends_inside_a_character_does_not_spoil_what_follows_it(tokenizer, length, name):
    if name == "sentencepiece":  # two broken bytes are two characters
        tokenizer = sentencepiece_tokenizer(strips=True)
    *prompt, last = ids(tokenizer, "漢字" * length)
    detokenizer = Detokenizer(tokenizer, prompt)
    assert detokenizer.append([last]) == ("", None)  # begun in the prompt, so it belongs to that
    assert [detokenizer.append([token]) for token in ids(tokenizer, "ab")] == [("a", None), ("b", None)]
    assert "".join(detokenizer.append([token])[0] for token in ids(tokenizer, "ü漢")) == "ü漢"
    after = Detokenizer(tokenizer, prompt)
    assert "".join(after.append([token])[0] for token in [last, *ids(tokenizer, "ü漢")]) == "ü漢"


def test_no_text_of_the_prompt_comes_out_again(tokenizer):
    for length in range(60):
        detokenizer = Detokenizer(tokenizer, ids(tokenizer, "x" * length))
        assert detokenizer.append(ids(tokenizer, "y")) == ("y", None)
        assert detokenizer.finish() == ""


def test_a_long_text_is_not_decoded_again_for_every_token(tokenizer):
    detokenizer = Detokenizer(tokenizer, ids(tokenizer, "say "))
    for _ in range(100):
        detokenizer.append(ids(tokenizer, "xy"))
        assert len(detokenizer._ids) < 10


def test_a_space_that_only_stands_between_words_is_kept():
    """A decoder that drops the first piece's space must see the word before."""
    tokenizer = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1}, unk_token="▁one"))
    tokenizer.decoder = decoders.Metaspace()
    detokenizer = Detokenizer(tokenizer, [0])
    assert detokenizer.append([1]) == (" two", None)
    assert detokenizer.append([0, 1]) == (" one two", None)


def test_what_may_become_a_stop_string_waits_until_it_is_decided(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], stop=["abc"])
    texts = [text for text, _ in pieces(detokenizer, ids(tokenizer, "xababd"))]
    assert texts == ["x", "", "", "ab", "", "abd"]


def test_the_first_of_several_stop_strings_wins_and_none_counts_below_min_tokens(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], stop=["cd", "bc", "bcd"])
    assert detokenizer.append(ids(tokenizer, "xbcb"), may_stop=False) == ("xbcb", None)
    assert detokenizer.append(ids(tokenizer, "cab")) == ("ca", None)  # begun before it counted
    assert detokenizer.append(ids(tokenizer, "cd")) == ("", "bc")


def test_the_longest_beginning_of_any_stop_string_is_held_back(tokenizer):
    detokenizer = Detokenizer(tokenizer, [], stop=["b!", "aab?"])
    assert detokenizer.append(ids(tokenizer, "xaab")) == ("x", None)
    assert detokenizer.append(ids(tokenizer, "!")) == ("aa", "b!")


@pytest.mark.parametrize("size", [1, 2, 12])
def test_marks_stay_in_the_text_and_hide_no_stop_string(size):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", "<mark>")])
    end, mark = map(tokenizer.token_to_id, ("<end>", "<mark>"))
    token_ids = [*ids(tokenizer, "a"), end, mark, *ids(tokenizer, "b<"), mark, *ids(tokenizer, "c<m")]
    detokenizer = Detokenizer(tokenizer, [end], stop=["<m"], marks=[mark])
    fed = [detokenizer.append(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]
    assert "".join(text for text, _ in fed) == "a<mark>b<<mark>c"
    assert fed[-1][1] == "<m"
