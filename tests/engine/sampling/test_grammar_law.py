"""Texts with a grammar have the target's law under that grammar, by every rule and with every kind of draft.

| mutant | caught by |
|---|---|
| verifier: no grammar | test_two_rules_have_the_targets_law, test_copies_... |
"""

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.ngram import NgramDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model import ModelDrafter
from engine.drafting.registry import METHODS, DraftModel
from engine.sampling.grammar import Grammars, from_regex
from engine.sampling.params import SamplingParams
from engine.verification.rule import RULES
from tests.engine.laws import p_value
from tests.engine.running import make_engine, run
from tests.engine.tokenizers import letter_tokenizer, saved
from tests.fakes import ContextModel, CuttingDrafter

LETTERS = re.compile(r"a[bc]*d?|(ba|c)[abd]c*")
COMPLETE = {
    text
    for length in range(7)
    for text in map("".join, itertools.product("abcd", repeat=length))
    if LETTERS.fullmatch(text)
}
NUM_SAMPLES, LENGTH, DRAFT_LENGTH = 800, 4, 4


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


@pytest.mark.parametrize("verification", RULES)
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
        num_speculative_tokens=DRAFT_LENGTH,
        max_num_seqs=1500,
        max_num_batched_tokens=10**6,
        num_blocks=6000,
        block_size=4,
    )
    # Two more: the first token and the last one are never drafted.
    params = SamplingParams(max_tokens=DRAFT_LENGTH + 2, grammar=from_regex(LETTERS.pattern))
    prompt = [3, 1, 2, 1, 0, 2, 2]
    tokens = run(engine, [(prompt, replace(params, seed=seed)) for seed in range(NUM_SAMPLES)])
    assert p_value(first_tokens(tokens), letters_law(model, prompt)) > 1e-5
    accepted = engine.stats.num_accepted_tokens_per_pos
    # Drafts of every length were there, and some held so many tokens that were right.
    assert len(accepted) == DRAFT_LENGTH
    assert accepted[2] > 20


def first_tokens(texts):
    return Counter(tuple(text[:LENGTH]) for text in texts.values())


COPIES = {
    "n-grams": lambda *_: NgramDrafter(),
    "suffixes": lambda *_: SuffixDrafter(remembers_outputs=False),
    "model and copies": lambda config, draft: CombinedDrafter(
        METHODS["model"].make(config, draft), SuffixDrafter(remembers_outputs=False)
    ),
    "trees": lambda config, draft: METHODS["tree"].make(config, draft),
}
RULES_OF = {name: METHODS["tree" if name == "trees" else "suffix"].rules for name in COPIES}
PROMPT_WITH_TEXTS = [0, 1, 2, 1, 2, 2, 3, 0, 1, 1, 2, 2, 3, 2, 0, 2, 2, 1, 0, 3]
"""Its pieces occur in texts of the grammar; what follows them is often forbidden there."""


@pytest.mark.parametrize(("draft", "verification"), [(name, rule) for name in COPIES for rule in RULES_OF[name]])
def test_copies_and_trees_have_the_targets_law(draft, verification, tmp_path):
    """Twelve tests at 1e-5 each. Copies know no grammar; trees follow one."""
    weights = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(4)).softmax(-1)
    model, unlike = (ContextModel(rows, eos_token_ids=[4]) for rows in weights)
    config = saved(letter_tokenizer(), tmp_path)

    def make():
        return Grammars(config, vocab_size=5, eos_token_ids=[4])

    engine = make_engine(
        model,
        lambda engine_config: COPIES[draft](engine_config, DraftModel(unlike, 5, make())),
        grammars=make(),
        verification=verification,
        num_speculative_tokens=DRAFT_LENGTH,
        max_num_seqs=1500,
        max_num_batched_tokens=10**6,
        num_blocks=12_000,
        block_size=4,
    )
    params = SamplingParams(max_tokens=DRAFT_LENGTH + 2, grammar=from_regex(LETTERS.pattern))
    tokens = run(engine, [(PROMPT_WITH_TEXTS, replace(params, seed=seed)) for seed in range(NUM_SAMPLES)])
    assert p_value(first_tokens(tokens), letters_law(model, PROMPT_WITH_TEXTS)) > 1e-5
    assert engine.stats.num_accepted_tokens > 50
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens


class Unconstrained:
    """Drafts as if there were no grammar: forbidden tokens, and rows below them."""

    def __init__(self, drafter):
        self._drafter = drafter

    async def propose(self, rows):
        return await self._drafter.propose([replace(row, request=self._free(row.request)) for row in rows])

    @staticmethod
    def _free(request):
        return replace(request, params=replace(request.params, grammar=None))

    def release(self, request_id):
        self._drafter.release(request_id)
