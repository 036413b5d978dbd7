"""Chains grow by what passes drew, each from its own row and to its own length."""

import torch

from engine.drafting.chain import Chain, Drawn, RankedRow, Ranking, extend, joined
from engine.protocols import Draft


def step(*tokens, with_top=False, with_ranking=False):
    column = torch.tensor(tokens)
    top = (torch.stack([column, column + 1], -1), torch.tensor([[0.75, 0.25]] * len(tokens))) if with_top else None
    ranking = Ranking(column.float().unsqueeze(-1) * torch.tensor([1.0, 2.0])) if with_ranking else None
    return Drawn(column, top, ranking)


def test_each_chain_takes_its_own_rows_first_tokens():
    chains = [Chain([9]), Chain(), Chain()]
    extend(chains, [step(1, 2, 3), step(4, 5, 6)], [2, 0, 1], [2, 1, 0])
    assert [chain.token_ids for chain in chains] == [[9, 3, 6], [1], []]


def test_draft_rows_and_rankings_come_with_their_tokens():
    [chain] = chains = [Chain()]
    extend(
        chains, [step(1, 2, with_top=True, with_ranking=True), step(3, 4, with_top=True, with_ranking=True)], [1], [2]
    )
    assert chain.token_ids == [2, 4]
    assert chain.top_ids == [[2, 3], [4, 5]]
    assert chain.top_probs == [[0.75, 0.25]] * 2
    assert [ranking.scores[row].tolist() for ranking, row in chain.rankings] == [[2, 4], [4, 8]]


def test_no_passes_leave_chains_as_they_are():
    chains = [Chain([5])]
    extend(chains, [], [0], [0])
    assert chains == [Chain([5])]


def test_a_cut_chain_is_the_shorter_draft():
    chains = [Chain()]
    extend(chains, [step(1, with_top=True), step(2, with_top=True), step(3, with_top=True)], [0], [3])
    chains[0].cut(2)
    assert chains[0].draft() == Draft([1, 2], [-1, 0], [[1, 2], [2, 3]], [[0.75, 0.25]] * 2)


def test_a_draft_is_no_part_of_its_chain():
    """The draft is sent while the chain may still be cut."""
    chain = Chain([1, 2])
    draft = chain.draft()
    chain.cut(0)
    assert draft == Draft([1, 2], [-1, 0])


def test_the_top_of_a_ranking_names_its_own_tokens():
    scores = torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0]])
    best, ids = Ranking(scores).top(2)
    assert (best.tolist(), ids.tolist()) == ([[3, 2], [6, 5]], [[1, 2], [0, 2]])
    best, ids = Ranking(scores, torch.tensor([[7, 8, 9], [4, 5, 6]])).top(2)
    assert (best.tolist(), ids.tolist()) == ([[3, 2], [6, 5]], [[8, 9], [4, 6]])


def test_a_ranking_of_few_tokens_has_no_more_than_those():
    assert Ranking(torch.tensor([[1.0, 2.0]])).top(5)[1].tolist() == [[1, 0]]


def test_joined_rankings_keep_the_order_of_their_rows():
    whole = Ranking(torch.tensor([[1.0, 3.0], [6.0, 4.0]]), torch.tensor([[7, 8], [4, 5]]))
    one = Ranking(torch.tensor([[7.0, 9.0]]), torch.tensor([[1, 2]]))
    together = joined([RankedRow(whole, 1), RankedRow(one, 0), RankedRow(whole, 0)])
    assert together.scores.tolist() == [[6, 4], [7, 9], [1, 3]]
    assert together.top(1)[1].tolist() == [[4], [2], [8]]
    assert joined([RankedRow(Ranking(torch.ones(1, 3)), 0)]).token_ids is None
