"""The tree drafter: the best nodes by shared noise, and a cache that forgets nothing it should keep."""

import random
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.drafting.model import ModelDrafter
from engine.drafting.tree import TreeDrafter
from engine.llm import run_in_process
from engine.protocols import ProposeRow, Request
from engine.sampling.logits import Run, noised, shape
from engine.sampling.params import SamplingParams
from engine.verification.verifier import paths
from tests.engine.conftest import VOCAB
from tests.engine.drafting.test_model import Counting
from tests.engine.running import make_engine, run
from tests.fakes import ContextModel, LateModel

CONFIG = EngineConfig(num_blocks=1000, block_size=4, max_num_batched_tokens=24, drafting="tree")
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "noise": SamplingParams(temperature=0.8, seed=3),
    "penalties": SamplingParams(temperature=0.8, seed=3, presence_penalty=2.0, frequency_penalty=1.0, top_k=20),
}


def context_model(seed, sharpness=2):
    """Many laws: each token of the context decides which one holds, so a wrong entry shows."""
    weights = sharpness * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(seed))
    return ContextModel(weights.softmax(-1), [1])


MODEL = context_model(1)


def row(token_ids, k, *, name="a", params=PARAMS["greedy"]):
    return ProposeRow(Request(name, list(token_ids), 3, params), k)


def propose(drafter, *rows):
    return run_in_process(drafter.propose(rows))


def scores_after(model, text, drafted, params):
    """What draft and target score the next token by, from the law itself."""
    one = [Run(Request("a", text, 3, params), [len(drafted)], [drafted], model.info.eos_token_ids)]
    return noised(shape(model.law([*text, *drafted]).log().unsqueeze(0), one), one)[0]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("num_nodes", [1, 3, 12])
def test_every_node_follows_its_own_path(params, num_nodes):
    """Its siblings are the tokens with the highest scores there, the best first."""
    drafter = TreeDrafter(MODEL, CONFIG)
    texts = {str(i): [5 + i, 9, 4, 2, 30 + i] for i in range(4)}
    rows = [row(text, num_nodes, name=name, params=params) for name, text in texts.items()]
    branching = 0
    for text, draft in zip(texts.values(), propose(drafter, *rows), strict=True):
        assert len(draft.token_ids) == num_nodes
        before = paths(draft)
        for parent in range(-1, num_nodes):
            children = [t for t, p in zip(draft.token_ids, draft.parents, strict=True) if p == parent]
            expected = scores_after(MODEL, text, before[parent + 1], params).topk(3).indices.tolist()
            assert children == expected[: len(children)]
            branching += len(children) > 1
    assert branching > 0 or num_nodes < 12


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_proposals_do_not_depend_on_what_the_drafter_remembers(params):
    """Requests committing by chance: a path of a tree, off the first branch or not, none of it, longer gaps."""
    chance = random.Random(1)
    kept = TreeDrafter(MODEL, CONFIG)
    texts = {str(i): [chance.randrange(2, VOCAB) for _ in range(chance.randrange(3, 40))] for i in range(8)}
    off_the_chain = 0
    for _ in range(12):
        names = [name for name in texts if chance.random() < 0.7]
        rows = [row(texts[name], chance.randrange(1, 9), name=name, params=params) for name in names]
        drafts = propose(kept, *rows)
        fresh = TreeDrafter(MODEL, CONFIG)
        fresh._confidence = kept._confidence
        assert drafts == propose(fresh, *rows)
        for name, draft in zip(names, drafts, strict=True):
            path = chance.choice(paths(draft))
            off_the_chain += path != draft.token_ids[: len(path)]
            texts[name] += [*path, chance.randrange(2, VOCAB)]
        for name in texts.keys() - set(names):
            texts[name] += [chance.randrange(2, VOCAB) for _ in range(chance.choice([0, 1, 12]))]
    assert off_the_chain > 5


def test_accepted_nodes_are_not_computed_again():
    model = Counting(MODEL)
    drafter, text = TreeDrafter(model, CONFIG), [5, 9, 4, 2, 30]
    draft = propose(drafter, row(text, 12))[0]
    deepest = max(paths(draft), key=len)
    model.passes.clear()
    propose(drafter, row([*text, *deepest, 7], 12))
    assert len(deepest) > 2
    assert model.passes[0] <= 2, "the token after the path, and at most the last node, which has no children"


def test_width_one_is_the_chain():
    narrow = EngineConfig(num_blocks=1000, drafting="tree", tree_width=1)
    chain_config = EngineConfig(num_blocks=1000)
    one = row([5, 9, 4, 2], 6, params=PARAMS["noise"])
    assert propose(TreeDrafter(MODEL, narrow), one) == propose(ModelDrafter(MODEL, chain_config), one)


@pytest.mark.parametrize(
    ("changes", "ends"),
    [({}, {1}), ({"ignore_eos": True}, set()), ({"stop_token_ids": [7]}, {1, 7})],
    ids=["end of text", "ignored", "stop tokens"],
)
def test_nothing_is_drafted_after_a_token_that_ends_the_text(changes, ends):
    """The law of a model that ends its texts often, and draws another token as often."""
    law = torch.full((101, VOCAB), 0.1 / (VOCAB - 2))
    law[:, 1] = law[:, 7] = 0.45
    drafter = TreeDrafter(ContextModel(law, [1]), CONFIG)
    rows = [row([5 + i, 9, 4], 12, name=str(i), params=replace(PARAMS["noise"], seed=i, **changes)) for i in range(8)]
    tokens_with_children = set()
    for draft in propose(drafter, *rows):
        assert {1, 7} <= set(draft.token_ids)
        tokens_with_children |= {draft.token_ids[parent] for parent in draft.parents if parent >= 0}
    assert tokens_with_children & {1, 7} == {1, 7} - ends


def test_rows_get_as_many_nodes_as_they_asked_for_and_blocks_come_back():
    drafter = TreeDrafter(MODEL, EngineConfig(num_blocks=30, block_size=4, drafting="tree"))
    free = drafter._pool.num_free
    drafts = propose(drafter, *(row([4, 5, 6 + i], i, name=str(i)) for i in range(5)))
    assert [len(draft.token_ids) for draft in drafts] == [0, 1, 2, 3, 4]
    for i in range(5):
        drafter.release(str(i))
    assert drafter._pool.num_free == free
    assert not drafter._sent


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_a_tree_keeps_to_the_blocks_there_are(num_blocks):
    """The draft itself fits; of the nodes that turn out not to be of it, only some can be computed."""
    model, params = context_model(1, sharpness=1), PARAMS["noise"]
    drafter = TreeDrafter(model, EngineConfig(num_blocks=num_blocks, block_size=4, drafting="tree"))
    text = [5, 9, 4, 2, 30]
    for _ in range(2):
        (draft,) = propose(drafter, row(text, min(8, num_blocks * 4 - len(text) - 1), params=params))
        before = paths(draft)
        for parent in range(-1, len(draft.token_ids)):
            children = [t for t, p in zip(draft.token_ids, draft.parents, strict=True) if p == parent]
            expected = scores_after(model, text, before[parent + 1], params).topk(3).indices.tolist()
            assert children == expected[: len(children)]
        text += [*max(before, key=len), 3]


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["noise"]], ids=["greedy", "noise"])
def test_a_device_that_computes_while_the_host_goes_on_drafts_the_same(params):
    rows = [row([5, 9, 4], 4, params=params), row([7, 7, 2, 8], 6, name="b", params=params)]
    assert propose(TreeDrafter(LateModel(MODEL), CONFIG), *rows) == propose(TreeDrafter(MODEL, CONFIG), *rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_nodes", [4, 8, 16])
def test_a_tree_has_more_accepted_than_a_chain_of_as_many_nodes(num_nodes, temperature):
    """A draft that is like the target, but not the same."""
    weights = 2 * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(1))
    other = 2 * torch.randn(101, VOCAB, generator=torch.Generator().manual_seed(2))
    target, draft = (ContextModel(table.softmax(-1)) for table in (weights, weights + 0.4 * other))
    requests = [
        ([5 + i, 9, 4], SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True))
        for i in range(24)
    ]
    lengths = []
    for drafting, drafter in (("model", ModelDrafter), ("tree", TreeDrafter)):
        engine = make_engine(
            target,
            lambda config, drafter=drafter: drafter(draft, config),
            num_speculative_tokens=num_nodes,
            drafting=drafting,
        )
        run(engine, requests)
        lengths.append(engine.stats.num_accepted_tokens / engine.stats.num_drafts)
    assert lengths[1] > lengths[0]
