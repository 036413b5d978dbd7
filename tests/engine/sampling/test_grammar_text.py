"""The texts of grammars: what is none, what is literal, and what is an annotation."""

import pytest

from engine.errors import RequestError
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_text import from_json_schema, from_regex, from_text, literal, without_annotations
from tests.engine.tokenizers import END, json_tokenizer, saved


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_regex("(a"), "unclosed group"),
        (lambda: from_regex("(?=a)b"), "look-around"),
        (lambda: from_json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (lambda: from_json_schema({"$ref": "http://127.0.0.1/x"}), "not present"),
        (lambda: from_json_schema({"type": "mouse"}), "mouse"),
        (lambda: from_text("hello world"), "neither Lark nor GBNF"),
        (lambda: from_text('start: "a" | nothing'), "nothing"),
        (lambda: from_text("start: " + "(" * 9999 + '"a"' + ")" * 9999), "too deeply nested"),
    ],
)
def test_an_invalid_grammar_is_refused(make, message, make_grammars):
    with pytest.raises(RequestError, match=message):
        make_grammars().check(make())


@pytest.mark.parametrize(("text", "are_tokens"), [("a[x]b", False), ("a[x]b", True), ("<tag>b[x]", True)])
def test_a_text_that_could_be_special_tokens_is_what_the_grammar_says(tmp_path, text, are_tokens):
    """Where one text must follow, the mask must not force a token that the matcher refuses."""
    tokenizer = json_tokenizer()
    tokenizer.add_tokens(["<tag>"])
    tokenizer.add_tokens(["[x]"], special_tokens=True)
    ids = {tag: tokenizer.convert_tokens_to_ids(tag) for tag in ("<tag>", "[x]")}
    grammars = Grammars(saved(tokenizer, tmp_path), vocab_size=len(tokenizer), eos_token_ids=[END])
    matcher = grammars.matcher("a", f"start: {literal(text, ids if are_tokens else None)}")
    output = []
    while END not in output and len(output) < 9:
        (mask,) = matcher.masks(output, [[]])
        output.append(next(token for token in range(len(tokenizer)) if mask[token // 8] >> token % 8 & 1))
    assert matcher._follows
    assert tokenizer.decode(output, skip_special_tokens=False) == f"{text}</s>"
    assert {tag for tag in ids if ids[tag] in output} == {tag for tag in ids if tag in text and are_tokens}


@pytest.mark.parametrize("name", ["path", "binary", "password", "int32", "date"])
def test_a_format_that_is_not_enforced_is_an_annotation(tmp_path, name):
    string = {"type": "string", "format": name}
    data = {"enum": [{"format": name}], "const": {"format": name}, "default": {"format": name}}
    schema = {"properties": {"format": string, "enum": {"anyOf": [string]}}, "$defs": {"const": string}, **data}
    plain = string if name == "date" else {"type": "string"}
    kept = {"properties": {"format": plain, "enum": {"anyOf": [plain]}}, "$defs": {"const": plain}, **data}
    assert without_annotations(schema) == kept
    assert from_json_schema(schema) == from_json_schema(kept)
    source = saved(json_tokenizer(), tmp_path)
    Grammars(source, vocab_size=64, eos_token_ids=[END]).check(from_json_schema({"properties": {"a": string}}))
