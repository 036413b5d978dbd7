"""Several groups over one draft: the order, what is drafted together, and that nobody's drafts depend on the others."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from cluster.protocol.messages import (
    Drafts,
    Failure,
    Ping,
    Pong,
    PrefixDelta,
    PrefixMissing,
    Propose,
    ProposeEntry,
    Verify,
)
from cluster.remote_drafter import RemoteDrafter
from cluster.workers.draft_queue import CHUNK, DraftQueue
from cluster.workers.proposals import share_rows
from engine.config import EngineConfig
from engine.drafting.learning.learner import Learner
from engine.drafting.learning.swap_watch import SwapWatch
from engine.drafting.model.chain_drafter import ModelDrafter
from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.next_tokens import NUM_CANDIDATES
from engine.drafting.model.token_drawer import TOP_M
from engine.drafting.model.translated import TranslatedBackend
from engine.engine import Engine
from engine.params import SamplingParams
from engine.protocols import NoDrafter
from engine.verification.decider import paths
from engine.verification.verifier import ModelVerifier
from tests.cluster.fakes import FakeLink, queue_worker
from tests.engine.conftest import VOCAB, save_llama
from tests.engine.drafting.learning.texts import changed
from tests.engine.drafting.model.test_translated import Foreign
from tests.engine.drafting.proposing import Counting, Failing, check, context_model, propose, row, target_path
from tests.engine.tiny import backend_of
from tests.fakes import ContextModel

K = 4
MODEL, *OTHERS = (context_model(seed) for seed in (1, 2, 3))
PARAMS = SamplingParams(temperature=0.8, seed=3)
ORDER = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))
"""The ids of the model's tokens under another tokenizer."""


class Clock:
    """Time passes with the model's passes: 1 s each, whatever its size."""

    def __init__(self, model: Counting) -> None:
        self.model, self.waited = model, 0.0

    def __call__(self) -> float:
        return len(self.model.passes) + self.waited


class Rig:
    """A queue, what its groups were answered, and at what time."""

    def __init__(
        self,
        *,
        run_ahead: bool = False,
        num_groups: int = 4,
        num_drafts: int = 1,
        is_shared: bool = True,
        is_translated=False,
        study: "Scripted | None" = None,
        model=MODEL,
        **settings: object,
    ) -> None:
        options = {"num_blocks": 1000, "block_size": 4, "max_num_seqs": 8, "num_speculative_tokens": K} | settings
        self.config = EngineConfig(**options)
        self.model = Failing(model)
        self.clock = Clock(self.model)
        foreign = Foreign(self.model, ORDER)
        backend = TranslatedBackend(foreign, MODEL.info, ORDER, torch.arange(VOCAB)) if is_translated else self.model
        draft, options = DraftModel(backend, VOCAB, run_ahead=run_ahead), {"is_shared": is_shared, "study": study}
        drafts = [draft, *(DraftModel(other, VOCAB, run_ahead=run_ahead) for other in OTHERS[: num_drafts - 1])]
        self.queue = DraftQueue(drafts, self.config, capacity=64, clock=self.clock, **options)
        self.replies: dict[int, list] = {}
        self.times: dict[int, list[float]] = {}
        self.seen: dict[tuple[int, str], int] = {}
        self.round = Counter()
        for version in range(1, num_groups + 1):
            self.join(version)

    def join(self, version: int) -> None:
        self.replies[version], self.times[version] = [], []

    def send(self, version: int, rows, *, deadline_s: float = 1e6, released=(), runs_ahead: bool = False) -> None:
        entries = []
        for entry in rows:
            name, tokens = entry.request.request_id, entry.request.token_ids
            offset = self.seen.get((version, name), 0)
            params = None if offset else entry.request.params
            prefix = PrefixDelta(name, offset, tokens[offset:], 3, params)
            entries.append(ProposeEntry(prefix, entry.num_draft_tokens, entry.draft_index))
            self.seen[version, name] = len(tokens)
        self.round[version] += 1
        request = Propose(self.round[version], version, deadline_s, list(released), entries, runs_ahead)

        def answer(reply) -> None:
            self.replies[version].append(reply)
            self.times[version].append(self.clock())

        self.queue.submit(version, request, answer)

    def run(self) -> None:
        while self.queue.step():
            pass

    def drafts(self, version: int):
        reply = self.replies[version][-1]
        assert isinstance(reply, Drafts), reply
        return reply.drafts


def text(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(2, VOCAB) for _ in range(length)]


def fresh(*rows, model=MODEL, **settings):
    options = {"num_blocks": 1000, "block_size": 4, "max_num_seqs": 8, "num_speculative_tokens": K} | settings
    return propose(ModelDrafter(DraftModel(model), EngineConfig(**options)), *rows)


class Scripted:
    """Offers weights as a test says; notes the texts that have ended."""

    def __init__(self, *offers) -> None:
        self.offers, self.texts, self.watch, self.counts = [*offers], [], SwapWatch(), {"taken": 1.0}

    def taken(self):
        return self.offers.pop(0) if self.offers else None

    def ended(self, request, features_of) -> None:
        self.texts.append((request.request_id, [*request.token_ids], request.params))


class LearningModel(ContextModel):
    """A context model whose weights are its laws."""

    is_compiling = False

    @property
    def compiling(self):
        return [1] * self.is_compiling

    def assign(self, weights) -> None:
        self.laws = weights


def test_groups_whose_proposals_wait_are_drafted_in_the_same_passes_and_get_their_own_drafts():
    """All groups name their requests alike."""
    rig = Rig()
    rows = {
        version: [row(text(9, 10 * version + i), name=str(i), params=PARAMS) for i in range(2)] for version in (1, 2, 3)
    }
    for version, its in rows.items():
        rig.send(version, its)
    rig.run()
    assert rig.model.passes == [54, 6, 6, 6]  # the texts, and then a token of each row
    for version, its in rows.items():
        assert rig.drafts(version) == fresh(*its)
    assert (rig.queue.num_proposals, rig.queue.num_batches) == (3, 1)


def test_the_proposal_that_is_due_first_is_drafted_first_and_waits_for_no_longer_drafts():
    rig = Rig()
    rig.send(1, [row(text(9), K)], deadline_s=30.0)
    rig.send(2, [row(text(9), 1)], deadline_s=10.0)
    rig.send(3, [row(text(9), 1)], deadline_s=20.0)
    rig.run()
    assert rig.times[2] == rig.times[3] < rig.times[1]


def test_a_proposal_that_nobody_waits_for_any_more_costs_nothing():
    rig = Rig()
    rig.send(1, [row(text(9))], deadline_s=5.0)
    rig.clock.waited = 6.0
    rig.run()
    assert rig.replies[1] == []
    assert rig.model.passes == []


@pytest.mark.parametrize(
    ("sizes", "room", "shares"),
    [
        ([3, 2], 8, {0: 3, 1: 2}),
        ([20, 1, 1], 8, {0: 6, 1: 1, 2: 1}),
        ([20, 20, 2], 8, {0: 3, 1: 3, 2: 2}),
        ([5, 5, 5], 2, {0: 1, 1: 1}),
        ([0, 5], 2, {1: 2}),
    ],
)
def test_equal_shares_of_a_pass(sizes, room, shares):
    class Waiting:
        def __init__(self, number, size):
            self.number, self.missing = number, [None] * size

    shared = share_rows([Waiting(*numbered) for numbered in enumerate(sizes)], room)
    assert {waiting.number: count for waiting, count in shared.items()} == shares


def test_a_long_text_is_caught_up_with_between_the_drafts_of_others_a_chunk_at_a_time():
    """Another group waits for one chunk at most; in the end the drafts are those of the whole text."""
    rig = Rig(max_num_batched_tokens=16)
    long = row(text(200), params=PARAMS)
    rig.send(1, [long])
    waits = []
    for number in range(8):
        started = rig.clock()
        rig.send(2, [row(text(9 + number, 7), 1)])
        while len(rig.replies[2]) == number:
            rig.queue.step()
        waits.append(rig.clock() - started)
    assert rig.replies[1] == []
    assert max(waits[1:]) <= 1 + 1  # a chunk, and the pass that drafts
    rig.run()
    assert rig.drafts(1) == fresh(long)
    assert max(rig.model.passes) <= 16


def test_what_a_group_lacks_or_asks_in_error_is_its_own_matter():
    rig = Rig()
    replies = []
    unknown = Propose(1, 1, 1.0, [], [ProposeEntry(PrefixDelta("a", 3, [5], 1), 2)])
    rig.queue.submit(1, unknown, replies.append)
    rig.queue.submit(1, Ping(2, 1, 1.0, []), replies.append)
    rig.queue.submit(1, Verify(3, 1, 1.0, [], []), replies.append)
    rig.queue.submit(1, Ping(4, 2, 1.0, []), replies.append)  # of another lease
    assert [type(reply) for reply in replies] == [PrefixMissing, Pong, Failure]
    assert replies[0].request_ids == ["a"]


CHAINS, TREES = {}, {"drafting": "tree"}
SAMPLED = [{"verification": "rejection"}, {"verification": "block"}]
SAMPLED_TREES = [TREES | {"verification": "rejection"}, TREES | {"verification": "k_sequential"}]


def check_right(draft, proposed, settings):
    """Assert that a draft may be short or empty, but not other than a fresh drafter's."""
    tokens, before = proposed.request.token_ids, paths(draft)
    if settings in SAMPLED_TREES:  # their shapes depend on earlier rounds
        for node, parent in enumerate(draft.parents):
            if parent not in draft.parents[:node] or settings["verification"] == "k_sequential":
                kept, ids = MODEL.law([*tokens, *before[parent + 1]]).pow(1 / PARAMS.temperature).topk(TOP_M)
                law = dict(zip(ids.tolist(), (kept / kept.sum()).tolist(), strict=True))
                row = dict(zip(draft.top_ids[node], draft.top_probs[node], strict=True))
                assert row == pytest.approx(law, rel=1e-3)
    elif settings == TREES:
        check(draft, tokens, PARAMS, MODEL)
    else:
        count = len(draft.token_ids)
        (whole,) = fresh(replace(proposed, num_draft_tokens=max(proposed.num_draft_tokens, 1)), **settings)
        assert draft.token_ids == whole.token_ids[:count]
        assert (draft.top_ids or []) == (whole.top_ids or [])[:count]


@pytest.mark.parametrize(
    ("is_shared", "settings", "is_translated", "run_ahead", "num_blocks", "chunk", "k"),
    [
        (True, CHAINS, False, False, 60, 1024, 4),
        (True, CHAINS, False, True, 60, 24, 10),
        (True, CHAINS, True, True, 1000, 24, 10),
        (True, TREES, False, True, 90, 24, 10),
        (True, TREES, True, True, 1000, 24, 4),
        *((True, settings, False, True, 1000, 24, 4) for settings in (*SAMPLED, *SAMPLED_TREES)),
        (False, CHAINS, False, False, 1000, 24, 4),
        (False, TREES, False, True, 1000, 24, 10),
    ],
)
def test_whatever_others_do_and_whichever_passes_fail_drafts_are_those_of_a_fresh_drafter(
    is_shared, settings, is_translated, run_ahead, num_blocks, chunk, k
):
    """Groups at random: verdicts of every kind, texts of every length that grow without drafts, too, leave, join.

    No block is used twice or lost. Two rounds after the last failure, every draft is whole again.
    """
    chance = random.Random(4)
    settings_of_all = {"num_blocks": num_blocks, "max_num_batched_tokens": chunk, "num_speculative_tokens": k}
    num_groups = 4 if is_shared else 1
    rig = Rig(
        run_ahead=run_ahead,
        num_groups=num_groups,
        is_shared=is_shared,
        is_translated=is_translated,
        **settings_of_all,
        **settings,
    )
    texts = {(v, str(i)): text(chance.randrange(3, 60), 10 * v + i) for v in rig.replies for i in range(3)}
    next_version, num_whole, num_failed = 5, 0, 0

    def drafted(version, counts):
        """Have drafts made for some requests of a group; return them, or nothing if a pass failed."""
        rows = [row(texts[key], count, name=key[1], params=PARAMS) for key, count in counts.items()]
        rig.send(version, rows, runs_ahead=run_ahead and chance.random() < 0.8)
        for _ in range(chance.randrange(12)):
            rig.queue.step()
        if chance.random() < 0.3:
            rig.run()
        if len(rig.replies[version]) < rig.round[version] or isinstance(rig.replies[version][-1], Failure):
            return {}
        for proposed, draft in zip(rows, rig.drafts(version), strict=True):
            check_right(draft, proposed, settings)
        return dict(zip(counts, rig.drafts(version), strict=True))

    for _ in range(150):
        version = chance.choice(list(rig.replies))
        if len(rig.replies[version]) < rig.round[version]:
            rig.queue.step()
            continue
        if chance.random() < 0.2:
            rig.model.num_left = chance.randrange(8)
        counts = {key: chance.choice([0, 1, 3, k, k]) for key in texts if key[0] == version and chance.random() < 0.8}
        drafts = drafted(version, counts) if counts else {}
        num_failed += isinstance((rig.replies[version] or [None])[-1], Failure)
        for key, draft in drafts.items():
            num_whole += bool(draft.token_ids)
            expected = target_path(texts[key], draft, PARAMS, MODEL)
            texts[key] += (
                expected if chance.random() < 0.5 else [*chance.choice(paths(draft)), chance.randrange(2, VOCAB)]
            )
        for key in chance.sample(sorted(texts), 2 if chance.random() < num_groups / 4 else 0):
            texts[key] += text(12, len(texts[key]))
        held = [block for prefix in rig.queue.caches[0].prefixes.values() for block in prefix.block_ids]
        assert sorted([*held, *rig.queue.caches[0].free_blocks]) == list(range(1, num_blocks + 1))
        if chance.random() < 0.1 and is_shared:
            rig.queue.leave(version)
            del rig.replies[version]
            rig.join(next_version)
            texts |= {(next_version, str(i)): text(chance.randrange(3, 60), next_version + i) for i in range(3)}
            next_version += 1
    assert num_whole > 50
    assert num_failed > 0
    rig.model.num_left = -1
    for version in list(rig.replies) * (num_blocks == 1000):
        rig.run()
        for _ in range(2):
            counts = {key: k for key in texts if key[0] == version}
            drafted(version, counts)
            rig.run()
        assert all(
            len(draft.token_ids) == k or MODEL.info.eos_token_ids[0] in draft.token_ids for draft in rig.drafts(version)
        )
    for version in list(rig.replies):
        rig.queue.leave(version)
    assert sorted(rig.queue.caches[0].free_blocks) == list(range(1, num_blocks + 1))


def test_a_text_that_grew_while_its_pass_ahead_waited_is_computed_whole():
    """Two groups' passes do not fit together, so one waits; its tokens count as cached, and are not."""
    rig = Rig(run_ahead=True, num_groups=2, max_num_seqs=3)
    texts = {name: text(9, seed) for seed, name in enumerate("ab")}
    for version in (1, 2):
        rig.send(version, [row(tokens, params=PARAMS, name=name) for name, tokens in texts.items()], runs_ahead=True)
    waiting = None
    while waiting is None and rig.queue.step():
        waiting = next((v for v, lease in rig.queue._groups.items() if lease.aheads[0]._next_pass is not None), None)
    grown = [
        row([*tokens, *draft.token_ids, *text(12)], params=PARAMS, name=name)
        for (name, tokens), draft in zip(texts.items(), rig.drafts(waiting), strict=True)
    ]
    rig.send(waiting, grown, runs_ahead=True)
    rig.run()
    assert rig.drafts(waiting) == fresh(*grown)


def test_the_group_with_most_of_a_full_cache_makes_room():
    """The other's requests are older, and stay."""
    rig = Rig(num_blocks=19, num_groups=3)
    rig.send(1, [row(text(9), 1, name="old")])
    rig.run()
    for number in range(3):
        rig.send(2, [row(text(14, number), 1, name=str(number))])
        rig.run()
    rig.send(3, [row(text(17, 9), 1)])
    rig.run()
    assert rig.drafts(3) == fresh(row(text(17, 9), 1))
    assert set(rig.queue.caches[0].prefixes) == {"1/old", "2/1", "2/2", "3/a"}


def test_running_ahead_prepares_the_drafts_of_every_group():
    rig = Rig(run_ahead=True)
    texts = {version: text(9, version) for version in (1, 2, 3)}
    for _ in range(6):
        for version, tokens in texts.items():
            rig.send(version, [row(tokens, params=PARAMS)], runs_ahead=True)
        rig.run()
        for version, tokens in texts.items():
            (draft,) = rig.drafts(version)
            tokens = [*tokens, *draft.token_ids]
            texts[version] = [*tokens, *fresh(row(tokens, 1, params=PARAMS))[0].token_ids]  # what the draft expects
    for version in texts:
        assert rig.replies[version][-1].run_ahead.hits >= 4


@pytest.mark.parametrize("settings", [{}, {"drafting": "tree"}], ids=["chains", "trees"])
def test_a_proposal_that_does_not_run_ahead_drops_what_was_prepared_and_prepares_nothing(settings):
    rig, tokens = Rig(run_ahead=True, num_groups=1, is_shared=False, **settings), text(9)
    for runs_ahead in (True, False, False, True, False):
        rig.send(1, [row(tokens, params=PARAMS)], runs_ahead=runs_ahead)
        rig.queue.step()
        num_passes = len(rig.model.passes)
        rig.run()
        assert (len(rig.model.passes) > num_passes) == runs_ahead
        (draft,) = rig.drafts(1)
        assert len(draft.token_ids) == K
        check_right(draft, row(tokens, params=PARAMS), settings)
        tokens = [*tokens, *draft.token_ids[:2], 7]


def test_the_group_whose_next_proposal_is_due_first_runs_ahead_first():
    rig = Rig(run_ahead=True, num_groups=2)
    order = []

    def launch(version):
        order.append(version)
        yield None

    for version, due in ((1, 90.0), (2, 50.0)):
        ahead = rig.queue._join(version).aheads[0]
        ahead._pace._gap_s = due
        ahead._pace._answered = ahead.clock()
        ahead._work = launch(version)
    rig.run()
    assert order == [2, 1]


def test_all_chains_of_groups_are_planned_before_the_warm_up_of_which_there_is_one():
    model, planned = Counting(MODEL), []
    model.device = torch.device("meta")  # where rankings are cut, as on a GPU
    model.plan_chains = lambda *plan: planned.append(plan) or False
    queue = DraftQueue(
        [DraftModel(model, run_ahead=True)], EngineConfig(num_blocks=100, num_speculative_tokens=K), capacity=8
    )
    known = {*planned}
    assert known == {(K, 0), (K, min(NUM_CANDIDATES, VOCAB))}
    queue._join(1)
    assert {*planned} == known


def test_a_chunk_is_short_even_if_the_target_takes_long_ones():
    rig = Rig(max_num_batched_tokens=4096, num_blocks=4000)
    rig.send(1, [row(text(1000))])
    rig.run()
    assert max(rig.model.passes) == CHUNK


def by_draft(rows):
    """What each of several drafts drafts for the rows that name it."""
    return [fresh(each, model=(MODEL, *OTHERS)[each.draft_index])[0] for each in rows]


@pytest.mark.parametrize("num_blocks", [1000, 24])
@pytest.mark.parametrize("settings", [{}, {"run_ahead": True}, {"num_groups": 1, "is_shared": False}])
def test_each_row_gets_the_draft_that_it_names_whatever_other_rows_and_rounds_name(settings, num_blocks):
    """The texts of requests grow while their drafts change; a small cache evicts what another round needs again."""
    rig, chance = Rig(num_drafts=3, num_blocks=num_blocks, **settings), random.Random(0)
    texts = {(version, name): text(9, 7 * version) for version in rig.replies for name in "abc"}
    for turn in range(8):
        sent = {
            version: [
                replace(row(texts[version, name], params=PARAMS, name=name), draft_index=chance.randrange(3))
                for name in chance.sample("abc", chance.randrange(1, 4))
            ]
            for version in rig.replies
        }
        for version, rows in sent.items():
            rig.send(version, rows, runs_ahead=turn % 3 > 0)
        rig.run()
        for version, rows in sent.items():
            expected, drafts = by_draft(rows), rig.drafts(version)
            able = [draft == right for draft, right in zip(drafts, expected, strict=True) if draft.token_ids]
            assert all(able)
            assert len(able) == len(rows) or num_blocks == 24
            for entry, draft in zip(rows, expected, strict=True):
                texts[version, entry.request.request_id] += [*draft.token_ids[:2], chance.randrange(2, VOCAB)]
    for version in rig.replies:
        rig.queue.leave(version)
    assert [len(cache.free_blocks) for cache in rig.queue.caches] == [num_blocks] * 3


def test_a_draft_prepares_what_the_next_round_needs_if_it_names_the_same_draft():
    rig, tokens = Rig(run_ahead=True, num_drafts=2, num_groups=1), text(9)
    for index in (1, 1, 1, 0, 1):
        rows = [replace(row(tokens, params=PARAMS), draft_index=index)]
        rig.send(1, rows, runs_ahead=True)
        rig.run()
        (draft,) = rig.drafts(1)
        assert [draft] == by_draft(rows)
        tokens = [*tokens, *draft.token_ids]
        tokens += fresh(row(tokens, 1, params=PARAMS), model=(MODEL, *OTHERS)[index])[0].token_ids
    stats = rig.replies[1][-1].run_ahead
    assert (stats.hits, stats.misses) == (2, {"stale": 3})


def test_a_row_that_names_no_draft_fails_its_proposal_alone():
    rig = Rig(num_drafts=2)
    for index in (2, -1):
        rig.send(1, [replace(row(text(9)), draft_index=index)])
        assert "of 2" in rig.replies[1][-1].message
    rig.send(2, [replace(row(text(9)), draft_index=1)])
    rig.run()
    assert rig.drafts(2) == fresh(row(text(9)), model=OTHERS[0])


def test_a_cache_that_is_full_takes_nothing_from_another_drafts():
    rig = Rig(num_drafts=2, num_blocks=5, num_groups=1)
    rig.send(1, [replace(row(text(9), name="a"), draft_index=0)])
    rig.send(1, [replace(row(text(9), name="a"), draft_index=1)])
    rig.run()
    rig.send(1, [replace(row(text(9, 5), name="b"), draft_index=1)])
    rig.run()
    assert [set(cache.prefixes) for cache in rig.queue.caches] == [{"1/a"}, {"1/b"}]


@pytest.mark.parametrize("run_ahead", [False, True])
def test_learned_weights_take_over_while_nothing_waits_and_the_cache_forgets_the_former(run_ahead):
    new = context_model(2)
    study, model = Scripted(), LearningModel(MODEL.laws, MODEL.info.eos_token_ids)
    rig = Rig(run_ahead=run_ahead, study=study, model=model)
    rows = [row(text(30, i), name=str(i), params=PARAMS) for i in range(2)]
    rig.send(1, rows, runs_ahead=run_ahead)
    study.offers.append(new.laws)
    model.is_compiling = True
    rig.run()
    assert rig.drafts(1) == fresh(*rows)
    assert study.offers  # what is compiled now is compared with the weights of now
    model.is_compiling = False
    rig.run()
    assert not rig.queue.caches[0].prefixes
    for entry, draft in zip(rows, rig.drafts(1), strict=True):
        entry.request.token_ids.extend([draft.token_ids[0], 7])
    rig.send(1, rows, runs_ahead=run_ahead)
    rig.run()
    assert rig.drafts(1) == fresh(*rows, model=new)


@pytest.mark.parametrize("is_shared", [False, True])
def test_texts_teach_when_their_requests_have_ended(is_shared):
    study = Scripted()
    rig = Rig(study=study, model=LearningModel(MODEL.laws), is_shared=is_shared)
    first, second = text(9), text(12)
    rig.send(1, [row(first, name="a", params=PARAMS), row(second, name="b", params=PARAMS)])
    rig.run()
    assert rig.replies[1][-1].learning == ({} if is_shared else {"taken": 1.0})
    assert set(study.watch._drafts) == {"1/a", "1/b"}
    first = [*first, 7]
    rig.send(1, [row(first, name="a", params=PARAMS)])
    assert study.watch._requests["1/a"].compared
    rig.run()
    rig.send(1, [row(second, name="b", params=PARAMS)], released=["a", "unknown"])
    rig.run()
    assert study.texts == [("1/a", first, PARAMS)]


@pytest.mark.parametrize("run_ahead", [False, True])
async def test_no_swap_changes_a_text_nor_does_the_loss_of_a_worker_that_swaps(run_ahead, tmp_path):
    """Weights change two times out of three when nothing waits; the worker is replaced in mid-text."""
    target = backend_of(save_llama(tmp_path / "target", seed=1))
    config = EngineConfig(num_blocks=200, block_size=4, num_speculative_tokens=K, speculation="fixed")
    swaps, links = [], []

    def start_worker(drafter) -> None:
        draft = backend_of(tmp_path / "target")
        learner, study = Learner(draft, K), Scripted()
        kinds = itertools.cycle([None, *(changed(learner.loaded, scale, seed=len(links)) for scale in (0.1, 1.0))])
        study.taken = lambda: (swaps.append(weights := next(kinds)), weights)[1]
        ahead = replace(config, drafting="model")
        queue = DraftQueue([DraftModel(draft, run_ahead=run_ahead)], ahead, capacity=16, is_shared=False, study=study)
        links.append(FakeLink(queue_worker(queue)))
        drafter.connect(links[-1], [].append)

    async def texts(drafter):
        engine = Engine(config, target.info, drafter=drafter, verifier=ModelVerifier(target, config), num_blocks=201)
        for seed in range(4):
            params = SamplingParams(temperature=0.8 * (seed > 0), seed=seed, max_tokens=40, ignore_eos=True)
            engine.add(str(seed), text(5 + seed, seed), params)
        written = {str(seed): [] for seed in range(4)}
        rounds = 0
        while engine.has_work:
            if drafter is remote and rounds % 7 == 0:
                start_worker(drafter)
            rounds += 1
            for output in await engine.step():
                written[output.request_id] += output.token_ids
        return written, engine.stats

    remote = RemoteDrafter(vocab_size=VOCAB, timeout_s=60)
    drafted, stats = await texts(remote)
    plain, _ = await texts(NoDrafter())
    assert drafted == plain
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert len(links) > 1
    assert sum(weights is not None for weights in swaps) > 5
