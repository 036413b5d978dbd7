"""Requests of different salts share nothing, and what requests of one salt share can be seen."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.params import SamplingParams
from tests.engine.running import chains, make_engine, step
from tests.engine.test_engine import MODEL, VOCAB, context_model

BLOCK_SIZE = 4
PROMPT = [1, 2, 3, 4, 5, 0, 1, 2, 2, 4, 3, 1, 5, 5]
NUM_CACHED = 12
"""Tokens of the prompt in full blocks that leave one token to compute."""


class TracingVerifier:
    """Passes rounds on, notes who computed each place of the KV cache, and refuses rows that read another salt's."""

    def __init__(self, verifier):
        self.verifier = verifier
        self.salts = {}
        self.computed_by = {}
        self.num_computed = 0
        self.num_shared = 0

    async def verify(self, rows):
        for row in rows:
            salt, end = self.salts[row.request.request_id], row.start + row.length
            for place in self.places(row, 0, row.start):
                author, author_salt = self.computed_by[place]
                assert author_salt == salt, f"{row.request.request_id} reads what {author} computed"
                self.num_shared += author != row.request.request_id
            for place in self.places(row, row.start, end + len(row.draft.token_ids)):
                self.computed_by[place] = row.request.request_id, salt
            self.num_computed += row.length
        return await self.verifier.verify(rows)

    def places(self, row, start, end):
        return [(row.block_ids[i // BLOCK_SIZE], i % BLOCK_SIZE) for i in range(start, end)]

    def release(self, request_id):
        self.verifier.release(request_id)


def traced_engine(drafter=None, **options):
    engine = make_engine(MODEL, drafter, block_size=BLOCK_SIZE, **options)
    engine.verifier = TracingVerifier(engine.verifier)
    return engine


def add(engine, name, prompt, salt, *, output_token_ids=(), **params):
    engine.verifier.salts[name] = salt
    engine.add(
        name, prompt, SamplingParams(temperature=0.0, **params), cache_salt=salt, output_token_ids=output_token_ids
    )


def one_token(engine, name, salt):
    """Generate one token; return how many prompt tokens were cached, how many computed, and in how many rounds."""
    before, rounds = engine.verifier.num_computed, 1
    add(engine, name, PROMPT, salt, max_tokens=1)
    while not (outputs := step(engine)):
        rounds += 1
    return outputs[0].num_cached_tokens, engine.verifier.num_computed - before, rounds


def test_a_salt_is_computed_once_and_cached_afterwards():
    """The first token of a new salt takes as many rounds as if nobody else had sent this prompt."""
    engine = traced_engine(max_num_batched_tokens=2)
    salts = [None, "a", "b", "a", None, "b"]
    seen = [one_token(engine, str(i), salt) for i, salt in enumerate(salts)]
    assert seen == [(0, 14, 7)] * 3 + [(NUM_CACHED, 2, 1)] * 3


ARRIVALS = st.lists(
    st.tuples(
        st.sampled_from([None, "a", "b"]),
        st.builds(
            lambda length, rest: PROMPT[:length] + rest,
            st.sampled_from([4, 9, 14]),
            st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
        ),
        st.integers(1, 12),  # tokens to generate
        st.integers(0, 5),  # rounds before the next one arrives
        st.booleans(),  # whether another engine has committed its first tokens
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.parametrize("num_blocks", [13, 60], ids=["preempting", "roomy"])
def test_no_request_reads_what_another_salt_computed(num_blocks):
    num_shared = 0

    @settings(max_examples=30, derandomize=True)
    @given(ARRIVALS)
    def check(arrivals):
        nonlocal num_shared
        engine = traced_engine(
            chains(context_model(1)),
            num_blocks=num_blocks,
            max_num_batched_tokens=9,
            max_num_seqs=4,
            num_speculative_tokens=3,
        )
        for i, (salt, prompt, max_tokens, pause, has_output) in enumerate(arrivals):
            output = PROMPT[:3] if has_output else ()
            add(
                engine,
                str(i),
                prompt,
                salt,
                output_token_ids=output,
                max_tokens=max_tokens + len(output),
                ignore_eos=True,
            )
            for _ in range(pause):
                step(engine)
        while engine.has_work:
            step(engine)
        num_shared += engine.verifier.num_shared

    check()
    assert num_shared > 250
