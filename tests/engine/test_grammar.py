"""Texts with a grammar: they match it, and no draft, rule or path changes them.

| mutant | caught by |
|---|---|
| mask: the draft's path is ignored | test_a_mask_is_that_of_a_fresh_matcher, test_text_does_not_depend_on_the_draft |
| mask: no rollback after a path | the same two |
| matcher: a restart keeps the old output | test_a_mask_is_that_of_a_fresh_matcher |
| drafter: no grammar | test_a_target_that_drafts_for_itself_is_always_right |
| verifier: no grammar | test_text_does_not_depend_on_the_draft, test_two_rules_have_the_targets_law |
| engine: the matcher of an ended request is kept | test_nothing_is_kept_of_requests_that_ended |
"""

import itertools
import json
import re
from dataclasses import replace

import jsonschema
import pytest
import torch

from engine import grammar as grammar_module
from engine.drafters.model import ModelDrafter
from engine.drafters.run_ahead import RunAheadDrafter
from engine.errors import ModelError, RequestError
from engine.grammar import Grammars, from_choice, from_json_schema, from_regex, from_text
from engine.llm import LLM
from engine.sampling import SamplingParams
from tests.engine.conftest import VOCAB
from tests.engine.laws import p_value
from tests.engine.running import make_engine, run
from tests.engine.tokenizers import END, json_tokenizer, letter_tokenizer, saved
from tests.fakes import ContextModel, CuttingDrafter, ForgetfulDrafter, InterruptedDrafter, TreeDrafter

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{2,5}(ab|12)*-[0-9]{3}"
CHOICES = ["abc", "abcabc", "ab12", "true", "{}"]
GRAMMARS = {
    "json": from_json_schema(SCHEMA),
    "regex": from_regex(REGEX),
    "choice": from_choice(CHOICES),
    "gbnf": from_text('root ::= "[" item ("," item)? "]"\nitem ::= [a-c]+ | root'),
    "lark": from_text('start: "{" start "}" | /[0-9]{1,3}/'),
}


def matches(name, text):
    if name == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if name == "choice":
        return text in CHOICES
    patterns = {"regex": REGEX, "gbnf": r"[\[\]a-c,]+", "lark": r"\{*[0-9]{1,3}\}*"}
    return re.fullmatch(patterns[name], text) is not None and text.count("{") == text.count("}")


@pytest.fixture(scope="module")
def make_grammars(tmp_path_factory):
    """Makes what one process has; drafter and verifier get one each, as on the wire."""
    config = saved(json_tokenizer(), tmp_path_factory.mktemp("json"))
    return lambda: Grammars(config, vocab_size=VOCAB, eos_token_ids=[END])


# --- Masks ----------------------------------------------------------------------------------------------------------


def allowed(grammars, grammar, tokens):
    """The tokens after `tokens`, by a matcher that saw nothing else."""
    matcher = grammars.compile(grammar)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    mask = matcher.compute_bitmask()
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}


def masked(matcher, output, paths):
    logits = torch.zeros(len(paths), VOCAB)
    matcher.mask(logits, output, paths)
    return [{token for token in range(VOCAB) if row[token] == 0} for row in logits]


def random_walk(grammars, grammar, length, generator):
    """Tokens that the grammar allows one after the other; the end is left out."""
    tokens = []
    while len(tokens) < length and (choices := sorted(allowed(grammars, grammar, tokens) - {END})):
        tokens.append(choices[int(torch.randint(len(choices), (1,), generator=generator))])
    return tokens


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_mask_is_that_of_a_fresh_matcher(name, make_grammars):
    """After every path, allowed or not, in any order of requests, and when committed tokens are taken back."""
    generator = torch.Generator().manual_seed(0)
    grammars, grammar = make_grammars(), GRAMMARS[name]
    matcher = grammars.matcher("a", grammar)
    for _ in range(20):
        text = random_walk(grammars, grammar, 12, generator)
        other = random_walk(grammars, grammar, 12, generator)
        for tip in range(len(text) + 1):
            tails = [text[tip : tip + length] for length in range(4)]
            if other[:tip] == text[:tip]:
                tails += [other[tip : tip + length] for length in range(4)]
            rows = masked(matcher, text[:tip], tails)
            assert rows == [allowed(grammars, grammar, text[:tip] + tail) for tail in tails]


def test_only_the_end_follows_a_text_that_is_complete(make_grammars):
    grammars = make_grammars()
    matcher = grammars.matcher("a", GRAMMARS["choice"])
    ids = json_tokenizer().convert_tokens_to_ids
    text = [ids("true")]
    assert masked(matcher, text, [[], [END], [END, 7]]) == [{END}] * 3
    assert masked(matcher, [], [[ids("true")]]) == [{END}]


def test_a_row_below_a_forbidden_token_stays_as_it_is(make_grammars):
    matcher = make_grammars().matcher("a", GRAMMARS["choice"])
    first, below, deeper = masked(matcher, [], [[], [0], [0, 5]])
    assert len(first) < VOCAB
    assert below == deeper == set(range(VOCAB))


def test_a_draft_that_knows_no_allowed_token_is_left_alone(make_grammars):
    matcher = make_grammars().matcher("a", from_regex("a"))
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, 0] = 0.0
    matcher.mask(logits, [], [[]])
    assert logits[0, 0] == 0.0


# --- Texts ----------------------------------------------------------------------------------------------------------


def requests(temperatures=(0.0, 0.7, 1.0)):
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, (name, temperature) in enumerate(itertools.product([*GRAMMARS] * 4, temperatures)):
        prompt = torch.randint(2, VOCAB, (3 + i % 20,), generator=generator).tolist()
        params = SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=120,
            grammar=GRAMMARS[name],
            num_speculative_tokens=1 + i % 8,
            repetition_penalty=1.3 if i % 4 == 0 else 1.0,
            top_k=5 if i % 5 == 0 else 0,
            top_p=0.9 if i % 3 == 0 else 1.0,
        )
        found.append((prompt, params))
        if i % 4 == 1:  # a neighbour without a grammar
            found.append((prompt, replace(params, grammar=None, max_tokens=10)))
    return found


DRAFTERS = {
    "the target itself": lambda target, _, grammars: lambda config: ModelDrafter(target, config, grammars=grammars),
    "a random draft": lambda _, draft, grammars: lambda config: ModelDrafter(draft, config, grammars=grammars),
    "running ahead": lambda target, _, grammars: (
        lambda config: InterruptedDrafter(RunAheadDrafter(target, config, grammars=grammars))
    ),
    "trees": lambda *_: lambda _: TreeDrafter(range(1, VOCAB)),
    "forgetful": lambda target, _, grammars: (
        lambda config: ForgetfulDrafter(ModelDrafter(target, config, grammars=grammars))
    ),
}


@pytest.fixture(scope="module")
def plain(target, make_grammars):
    """The texts without speculation."""
    return run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), requests())


def test_texts_match_their_grammar(plain):
    tokenizer = json_tokenizer()
    ended = dict.fromkeys(GRAMMARS, 0)
    for tokens, (_, params) in zip(plain.values(), requests(), strict=True):
        if params.grammar is not None and tokens[-1] == END:
            name = next(name for name in GRAMMARS if GRAMMARS[name] == params.grammar)
            assert matches(name, tokenizer.decode(tokens[:-1])), tokenizer.decode(tokens)
            ended[name] += 1
    assert all(count >= 6 for count in ended.values()), ended


@pytest.mark.parametrize("name", DRAFTERS)
def test_text_does_not_depend_on_the_draft(name, target, draft, make_grammars, plain):
    drafter = DRAFTERS[name](target, draft, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=8)
    assert run(engine, requests()) == plain
    assert engine.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["the target itself", "a random draft", "running ahead"])
def test_greedy_text_is_the_same_by_the_rejection_rule(name, target, draft, make_grammars):
    greedy = requests(temperatures=(0.0,))
    plain = run(make_engine(target, grammars=make_grammars(), num_speculative_tokens=0), greedy)
    drafter = DRAFTERS[name](target, draft, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=8, verification="rejection")
    assert run(engine, greedy) == plain


def test_a_target_that_drafts_for_itself_is_always_right(target, make_grammars):
    drafter = DRAFTERS["the target itself"](target, None, make_grammars())
    engine = make_engine(target, drafter, grammars=make_grammars(), num_speculative_tokens=4)
    run(engine, [one for one in requests() if one[1].grammar is not None])
    ended_inside_a_draft = 1 - engine.stats.acceptance_rate
    assert ended_inside_a_draft < 0.1


def test_text_survives_the_loss_of_every_matcher(target, make_grammars, plain):
    grammars = make_grammars()
    engine = make_engine(target, grammars=grammars, num_speculative_tokens=0)
    assert run(engine, requests(), between=lambda *_: grammars._matchers.clear()) == plain


def test_nothing_is_kept_of_requests_that_ended(target, make_grammars):
    ours, theirs = make_grammars(), make_grammars()
    engine = make_engine(
        target, DRAFTERS["running ahead"](target, None, theirs), grammars=ours, num_speculative_tokens=4
    )
    run(engine, requests())
    assert not ours._matchers
    assert not theirs._matchers
    assert len(ours._compiled) <= grammar_module.NUM_COMPILED


# --- Law ------------------------------------------------------------------------------------------------------------

LETTERS = re.compile(r"a[bc]*d?|(ba|c)[abd]c*")
COMPLETE = {
    text
    for length in range(7)
    for text in map("".join, itertools.product("abcd", repeat=length))
    if LETTERS.fullmatch(text)
}
NUM_SAMPLES, LENGTH = 2000, 4


def letters_law(model, prompt):
    """The law of the first tokens under the grammar, from every text that it accepts."""
    law = {(): 1.0}
    for _ in range(LENGTH):
        longer = {}
        for tokens, weight in law.items():
            if tokens and tokens[-1] == 4:
                longer[tokens] = longer.get(tokens, 0.0) + weight
                continue
            text = "".join("abcd"[token] for token in tokens)
            probs = model.law([*prompt, *tokens])
            may = [any(whole.startswith(text + letter) for whole in COMPLETE) for letter in "abcd"]
            kept = [float(p) if ok else 0.0 for p, ok in zip(probs, [*may, text in COMPLETE], strict=True)]
            for token, prob in enumerate(kept):
                if prob:
                    longer[(*tokens, token)] = weight * prob / sum(kept)
        law = longer
    return law


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("draft", ["itself", "unlike", "itself, without the grammar", "mixed"])
def test_two_rules_have_the_targets_law(draft, verification, tmp_path):
    """Eight tests at 1e-5 each."""
    weights = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(4)).softmax(-1)
    model = ContextModel(weights[0], eos_token_ids=[4])
    config = saved(letter_tokenizer(), tmp_path)

    def make():
        return Grammars(config, vocab_size=5, eos_token_ids=[4])

    def drafter(engine_config):
        drafting = ContextModel(weights[1], eos_token_ids=[4]) if draft == "unlike" else model
        if draft == "mixed":
            return CuttingDrafter(ModelDrafter(drafting, engine_config, grammars=make()))
        if draft == "itself, without the grammar":
            return Unconstrained(ModelDrafter(drafting, engine_config))
        return ModelDrafter(drafting, engine_config, grammars=make())

    engine = make_engine(
        model,
        drafter,
        grammars=make(),
        verification=verification,
        num_speculative_tokens=3,
        max_num_seqs=1500,
        max_num_batched_tokens=10**6,
        num_blocks=6000,
        block_size=4,
    )
    params = SamplingParams(max_tokens=LENGTH, grammar=from_regex(LETTERS.pattern))
    prompt = [3, 1, 2, 1, 0, 2, 2]
    tokens = run(engine, [(prompt, replace(params, seed=seed)) for seed in range(NUM_SAMPLES)])
    counts = {}
    for found in tokens.values():
        counts[tuple(found)] = counts.get(tuple(found), 0) + 1
    assert p_value(counts, letters_law(model, prompt)) > 1e-5


class Unconstrained:
    """Drafts as if there were no grammar: forbidden tokens, and rows below them."""

    def __init__(self, drafter):
        self._drafter = drafter

    async def propose(self, rows):
        return await self._drafter.propose([replace(row, params=replace(row.params, grammar=None)) for row in rows])

    def release(self, request_id):
        self._drafter.release(request_id)


# --- Errors ---------------------------------------------------------------------------------------------------------


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
def test_what_is_no_grammar_is_refused(make, message, make_grammars):
    with pytest.raises(RequestError, match=message):
        make_grammars().check(make())


def test_a_grammar_for_a_model_that_cannot_follow_one_is_refused(tmp_path):
    grammars = Grammars(saved(json_tokenizer(), tmp_path), vocab_size=VOCAB, eos_token_ids=[])
    with pytest.raises(RequestError, match="no end-of-sequence token"):
        grammars.check(GRAMMARS["json"])


def test_a_grammar_that_no_grammars_were_loaded_for_is_an_error(target):
    with pytest.raises(ModelError, match="without grammars"):
        run(make_engine(target), [([3, 4], SamplingParams(grammar=GRAMMARS["json"]))])


def test_a_text_whose_grammar_gets_too_complex_ends_and_says_so(target, make_grammars, monkeypatch, caplog):
    grammars = make_grammars()
    monkeypatch.setitem(grammar_module.LIMITS, "step_max_items", 150)
    ambiguous = from_text('start: start start start | "a" | "b" | start "c"?')
    engine = make_engine(target, grammars=grammars, num_speculative_tokens=0)
    (tokens,) = run(engine, [([3, 4], SamplingParams(grammar=ambiguous, max_tokens=60, temperature=0))]).values()
    assert 1 < len(tokens) < 60
    assert tokens[-1] == END
    assert "too complex" in caplog.text


@pytest.mark.parametrize("field", ["min_tokens", "ignore_eos"])
def test_what_would_go_on_past_the_end_is_refused(field):
    with pytest.raises(RequestError) as error:
        SamplingParams(grammar=GRAMMARS["json"], **{field: 1})
    assert error.value.param == field


# --- In one process -------------------------------------------------------------------------------------------------


def test_the_bundled_pair_writes_json():
    llm = LLM(dtype="float32", device="cpu", compile="off")
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=200, grammar=from_json_schema(SCHEMA))
    (result,) = llm.generate(["The answer is "], params)
    output = result.outputs[0]
    assert output.finish_reason == "stop"
    jsonschema.validate(json.loads(output.text), SCHEMA)
    assert output.stats.num_accepted_tokens > 0
    with pytest.raises(RequestError, match="unclosed group"):
        llm.generate(["x"], SamplingParams(grammar=from_regex("(a")))
