"""Drafts with another tokenizer: as good as with the target's where tokens are shared, lawful where they are not."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import BUNDLED_DRAFT, ModelConfig
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.translated import TranslatedBackend, translated
from engine.drafting.registry import METHODS
from engine.errors import ModelMismatchError
from engine.execution.backend import PassOutput
from engine.llm import LLM
from engine.models.registry import open_model
from engine.models.shared_tokens import shared_tokens
from engine.params import SamplingParams
from engine.verification.rule import RULES
from tests.engine.running import SAMPLING, make_engine, run
from tests.engine.test_exactness import LAWS, TARGET, UNLIKE, check_law
from tests.engine.tokenizers import json_tokenizer, letter_tokenizer, saved

ORDER = torch.tensor([3, 5, 0, 4, 1])
"""The draft's id of each of the target's five tokens; it has six."""


class Foreign:
    """A model with other ids: those of `order`, and one more."""

    def __init__(self, model, order=ORDER):
        self.model, self.order, self.info = model, order, replace(model.info, vocab_size=len(order) + 1)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run(self, batch, draws=None):
        own = torch.zeros(self.info.vocab_size, dtype=torch.int64)
        own[self.order] = torch.arange(len(self.order))
        assert batch.needs_logits
        output = self.model.run(replace(batch, token_ids=own[batch.token_ids]))
        logits = output.logits.new_full((len(output.logits), self.info.vocab_size), 2.0)
        logits[:, self.order] = output.logits
        return PassOutput(logits, logits, logits.argmax(-1))


def drafted_by(model, shared, drafting="model"):
    backend = TranslatedBackend(Foreign(model), model.info, ORDER, torch.tensor(shared))
    return lambda config: METHODS[drafting].make(config, DraftModel(backend, 5))


@pytest.mark.parametrize("drafting", ["model", "tree"])
@pytest.mark.parametrize("shared", [[0, 1, 2, 3, 4], [0, 2, 4]], ids=["all shared", "some shared"])
def test_coupled_texts_are_equal_and_a_draft_that_is_the_target_is_right_where_tokens_are_shared(shared, drafting):
    requests = [([i % 5, 1, 3], replace(LAWS["plain"], seed=i, max_tokens=20, ignore_eos=True)) for i in range(40)]
    engine = make_engine(TARGET, drafted_by(TARGET, shared, drafting), num_speculative_tokens=4)
    assert run(engine, requests) == run(make_engine(TARGET), requests)
    stats = engine.stats
    assert stats.num_accepted_tokens > stats.num_drafts / 2
    if len(shared) == 5 and drafting == "model":
        assert stats.num_accepted_tokens == stats.num_draft_tokens


@pytest.mark.parametrize("verification", [name for name in RULES if name != "coupled"])
def test_the_joint_law_is_the_targets_by_every_rule(verification):
    drafting = "tree" if verification == "k_sequential" else "model"
    engine = make_engine(
        TARGET, drafted_by(UNLIKE, [0, 2, 4], drafting), **SAMPLING, verification=verification, drafting=drafting
    )
    check_law(engine)
    assert engine.stats.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def renumbered(tmp_path_factory):
    """The bundled draft with its ids in another order."""
    path = shutil.copytree(BUNDLED_DRAFT, tmp_path_factory.mktemp("renumbered") / "draft")
    content = json.loads((path / "tokenizer.json").read_text())
    added = {entry["id"] for entry in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]
    movable = [token_id for token_id in vocabulary.values() if token_id not in added]
    moved = dict(zip(movable, reversed(movable), strict=True))
    content["model"]["vocab"] = {token: moved.get(token_id, token_id) for token, token_id in vocabulary.items()}
    (path / "tokenizer.json").write_text(json.dumps(content))
    weights = load_file(path / "model.safetensors")
    size = open_model(ModelConfig(str(path))).vocab_size
    order = torch.tensor([moved.get(token_id, token_id) for token_id in range(size)])
    for name, weight in weights.items():
        if len(weight) == size:
            weights[name] = weight[order].contiguous()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_draft_whose_ids_are_in_another_order_is_as_good_as_before(renumbered):
    params = [SamplingParams(temperature=t, seed=1, max_tokens=32) for t in (0.0, 0.7)]
    prompts = ["Up betimes and to my office,", "This PEP proposes"]
    settings = {"compile": "off", "speculation": "fixed"}  # or times would count
    other, same = LLM(draft_model=renumbered, **settings), LLM(**settings)
    texts = [[result.outputs[0].text for result in llm.generate(prompts, params)] for llm in (other, same)]
    assert texts[0] == texts[1]
    assert other.stats.num_accepted_tokens == same.stats.num_accepted_tokens > 20


def source(tokenizer, path, size, end=1):
    found = saved(tokenizer, path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size, "eos_token_id": end}))
    return found


def test_tokens_are_the_same_if_their_texts_are_and_ends_are_ends(tmp_path):
    target = source(json_tokenizer(), tmp_path / "target", 64)
    draft = source(letter_tokenizer(), tmp_path / "draft", 5)
    ids = json_tokenizer().get_vocab()
    assert shared_tokens(target, draft) == {1: 4, ids["a"]: 0, ids["b"]: 1, ids["c"]: 2, ids["d"]: 3}
    assert shared_tokens(target, target) is None
    ends = source(json_tokenizer(), tmp_path / "target 2", 64, end=0), source(letter_tokenizer(), tmp_path / "2", 5, 3)
    assert shared_tokens(*ends)[0] == 3, "the texts of the two ends differ"
    with pytest.raises(ModelMismatchError, match=r"have 5 tokens in common, 8% of the draft's 64; at least half"):
        shared_tokens(draft, target)


def test_tokens_that_the_draft_lacks_are_read_as_the_last_piece_of_their_text(tmp_path):
    target = source(json_tokenizer(), tmp_path / "target", 64)
    draft = source(letter_tokenizer(), tmp_path / "draft", 5)
    backend = translated(Foreign(UNLIKE), target, draft, shared_tokens(target, draft))
    ids = json_tokenizer().get_vocab()
    assert [int(backend._reads[ids[token]]) for token in ("a", "ab", "abc", "</s>")] == [0, 1, 2, 4]
    assert (backend.info.vocab_size, backend.info.eos_token_ids) == (64, [1])
    assert translated(UNLIKE, target, target, None) is UNLIKE
