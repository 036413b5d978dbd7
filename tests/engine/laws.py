"""Laws that can be written down: random tables over contexts, their joint law, and how far two laws are apart."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from engine.drafting.model.token_drawer import TOP_M
from engine.sampling import noise
from engine.verification.decider import paths
from engine.verification.draft_rows import decide_by, draft_row, first_rows
from engine.verification.rule import RULES

VOCAB, K = 3, 3


def random_tables(seed, *, zeros=False):
    """A law for every context of up to K tokens; with `zeros`, each leaves out one token."""
    generator = torch.Generator().manual_seed(seed)

    def law():
        weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64) + 0.01
        if zeros:
            weights[torch.randint(VOCAB, (1,), generator=generator)] = 0
        return weights / weights.sum()

    return {c: law() for length in range(K + 1) for c in itertools.product(range(VOCAB), repeat=length)}


def joint(tables):
    """The law of K + 1 tokens."""
    return {
        tokens: float(torch.stack([tables[tokens[:i]][token] for i, token in enumerate(tokens)]).prod())
        for tokens in itertools.product(range(VOCAB), repeat=K + 1)
    }


def completed(heads, tables):
    """The law of K + 1 tokens when those after each head are drawn from the tables.

    Args:
        heads: pairs of the first tokens, at least one, and their weight.
    """
    law = dict.fromkeys(itertools.product(range(VOCAB), repeat=K + 1), 0.0)
    for head, weight in heads:
        for rest in itertools.product(range(VOCAB), repeat=K + 1 - len(head)):
            tokens, prob = (*head, *rest), weight
            for i in range(len(head), K + 1):
                prob *= float(tables[tokens[:i]][tokens[i]])
            law[tokens] += prob
    return law


def total_variation(p, q):
    return sum(abs(p[tokens] - q[tokens]) for tokens in p) / 2


def shaped_law(logits, params, committed, prompt_length, end_ids=()):
    """The law of the next token after `committed`, written down again without tensors, in double precision."""
    logits, output = list(logits), committed[prompt_length:]
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(output) < params.min_tokens:
        logits = [-math.inf if token in end_ids else logit for token, logit in enumerate(logits)]
    for token in range(len(logits)):
        if token in committed:
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    highest = max(logits)
    if params.temperature == 0:
        first = logits.index(highest)
        return [float(token == first) for token in range(len(logits))]
    weights = [math.exp((logit - highest) / params.temperature) for logit in logits]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = sum(weights[token] for token in order), 0.0, [0.0] * len(weights)
    for token in order:
        if before < params.top_p:
            kept[token] = weights[token]
        before += weights[token] / total
    return [w / sum(kept) for w in kept]


class Decisions:
    """Every decision of a rule in an engine, checked as it is made; no law is sampled, so no bias is too small.

    `accept` gets the target's own laws, and tokens that are the draws from the rows that came with them, in noise of
    this round; the path that it accepts is committed, and the draw from the law that it returns. That such an `accept`
    emits the target's law, tests/engine/verification shows by enumeration.
    """

    def __init__(self, monkeypatch, verification, model):
        self.model, self.num_nodes, self.deepest, self.most_cut = model, 0, 0, 0
        self.rule, (self.accept,) = RULES[verification], RULES[verification].decide.args
        monkeypatch.setitem(RULES, verification, replace(self.rule, decide=self.decide))

    def decide(self, logits, runs, drafts, drawn):
        given = []

        def accept(target_probs, coins, drafts):
            accepted, laws = self.accept(target_probs, coins, drafts)
            given.extend([target_probs.tolist(), accepted, laws.clone()])
            return accepted, laws

        decisions = decide_by(accept, logits, runs, drafts, drawn)
        target_probs, accepted, laws = given
        for run, draft, row, path, law, decision in zip(
            runs, drafts, first_rows(drafts), accepted, laws, decisions, strict=True
        ):
            for nth, before in enumerate(paths(draft)):
                assert target_probs[row + nth] == pytest.approx(self.law(run, before), abs=1e-5)
            self.check_draft(run, draft)
            final = self.draw(run, len(path), law.log(), noise.RESIDUAL_STREAM)
            assert decision == ([*(draft.token_ids[node] for node in path), final], path)
        return decisions

    def law(self, run, before):
        committed = [*run.request.token_ids, *before]
        logits = self.model.law(committed).log().tolist()
        return shaped_law(logits, run.params, committed, run.request.prompt_length, run.end_ids)

    def check_draft(self, run, draft):
        lanes = []  # the noise of independent chains differs by where they begin
        for node, before in enumerate(paths(draft)[1:]):
            ids, probs = draft_row(draft, node)
            logits = torch.full((len(self.model.laws[0]),), -math.inf)
            logits[ids] = torch.tensor(probs).log()
            lanes.append(lanes[draft.parents[node]] if draft.parents[node] >= 0 else node)
            lane = lanes[node] if self.rule.independent_siblings else 0
            drawn = self.draw(run, len(before) - 1, logits, noise.DRAFT_STREAM, lane)
            assert (sum(probs), drawn) == (pytest.approx(1), draft.token_ids[node])
            self.num_nodes, self.deepest = self.num_nodes + 1, max(self.deepest, len(before))
            self.most_cut += len(ids) == TOP_M

    def draw(self, run, depth, logits, stream, lane=0):
        tip, seed = len(run.request.token_ids), run.params.seed
        keys = noise.keys([noise.round_seed(seed, tip, lane)], [tip + depth], stream, logits.device)
        gumbel = noise.gumbel(keys, torch.arange(len(logits), dtype=torch.int32))[0]
        return int((logits + (gumbel if run.params.temperature else 0)).argmax())
