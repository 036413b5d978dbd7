"""Texts with a grammar have the target's law under that grammar: every rule, and every kind of draft."""

import itertools
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch

from engine.drafting.copying.combined import CombinedDrafter
from engine.drafting.copying.suffix import SuffixDrafter
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.registry import METHODS
from engine.laws import p_value
from engine.params import SamplingParams
from engine.sampling.grammar import Grammars
from engine.sampling.grammar_text import from_regex
from tests.engine.running import SAMPLING, make_engine, run
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


WEIGHTS = torch.randn(2, 9, 5, generator=torch.Generator().manual_seed(4)).softmax(-1)
TARGET, UNLIKE = (ContextModel(laws, eos_token_ids=[4]) for laws in WEIGHTS)
DRAFTERS = {
    "unlike": ("coupled", lambda config, grammars: ModelDrafter(DraftModel(UNLIKE, grammars=grammars), config)),
    "mixed": (
        "rejection",
        lambda config, grammars: CuttingDrafter(ModelDrafter(DraftModel(TARGET, grammars=grammars), config)),
    ),
    "model and copies": (
        "block",
        lambda config, grammars: CombinedDrafter(
            METHODS["model"].make(config, DraftModel(UNLIKE, 5, grammars)), SuffixDrafter(remembers_outputs=False)
        ),
    ),
    "trees": ("k_sequential", lambda config, grammars: METHODS["tree"].make(config, DraftModel(UNLIKE, 5, grammars))),
}
"""Each kind of draft: the rule that verifies it here, and how to make its drafter."""
PROMPT = [0, 1, 2, 1, 2, 2, 3, 0, 1, 1, 2, 2, 3, 2, 0, 2, 2, 1, 0, 3]
"""Its pieces occur in texts of the grammar; what follows them is often forbidden there."""


@pytest.mark.parametrize("draft", DRAFTERS)
def test_texts_have_the_targets_law(draft, tmp_path):
    """At 1e-5 each. Copies know no grammar."""
    source = saved(letter_tokenizer(), tmp_path)
    ours, theirs = (Grammars(source, vocab_size=5, eos_token_ids=[4]) for _ in range(2))
    verification, make = DRAFTERS[draft]
    engine = make_engine(
        TARGET,
        lambda config: make(config, theirs),
        grammars=ours,
        verification=verification,
        **SAMPLING | {"num_speculative_tokens": DRAFT_LENGTH},
    )
    # Two more: the first token and the last one are never drafted.
    params = SamplingParams(max_tokens=DRAFT_LENGTH + 2, grammar=from_regex(LETTERS.pattern))
    texts = run(engine, [(PROMPT, replace(params, seed=seed)) for seed in range(NUM_SAMPLES)])
    counts = Counter(tuple(text[:LENGTH]) for text in texts.values())
    assert p_value(counts, letters_law(TARGET, PROMPT)) > 1e-5
    assert engine.stats.num_accepted_tokens > 50
    if draft != "mixed":
        assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens
