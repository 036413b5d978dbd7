"""Laws that can be written down: random tables over contexts, their joint law, and how far two laws are apart."""

import itertools
import math

import torch

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
