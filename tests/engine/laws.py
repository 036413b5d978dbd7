"""Laws that can be written down: random tables over contexts, their joint law, and how far two laws are apart."""

import itertools

import torch
from scipy.stats import chi2

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


def p_value(counts, law):
    """Chi-square of counts against a law, rare outcomes put together; an impossible outcome is a failure by itself."""
    assert all(law[tokens] > 0 for tokens in counts)
    samples = sum(counts.values())
    rare = [tokens for tokens, prob in law.items() if prob * samples < 5]
    cells = [(counts.get(t, 0), p * samples) for t, p in law.items() if t not in rare]
    expected = sum(law[t] for t in rare) * samples
    if expected > 1:
        cells.append((sum(counts.get(t, 0) for t in rare), expected))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    return float(chi2.sf(statistic, len(cells) - 1))
