"""Texts with a grammar have the target's law under that grammar, by both rules.

| mutant | caught by |
|---|---|
| verifier: no grammar | test_two_rules_have_the_targets_law |
"""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from engine.drafting.model import ModelDrafter
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
    counts = {}
    for token_ids in tokens.values():
        first = tuple(token_ids[:LENGTH])
        counts[first] = counts.get(first, 0) + 1
    assert p_value(counts, letters_law(model, prompt)) > 1e-5
    accepted = engine.stats.num_accepted_tokens_per_pos
    # Drafts of every length were there, and some held so many tokens that were right.
    assert len(accepted) == DRAFT_LENGTH
    assert accepted[2] > 20


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
