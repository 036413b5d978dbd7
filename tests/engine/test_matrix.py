"""What a client sees depends on no draft, rule, schedule or loss: every method and head, compared with plain decoding.

By rules that share no noise, only greedy texts are the same; `test_exactness` shows the law of drawn texts.
"""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import BambaConfig, T5Config

from engine.drafting.model.draft_model import DraftModel
from engine.drafting.model.feature_store import FeatureStore
from engine.drafting.registry import METHODS
from engine.heads.registry import HEADS
from engine.verification.rule import RULES
from tests.engine.conftest import VOCAB
from tests.engine.features import Output
from tests.engine.features import requests as feature_requests
from tests.engine.heads.cold_starts import KINDS, SPOILED, backend_of_kind
from tests.engine.heads.tiny_heads import alone, features_of
from tests.engine.hybrids.models import BAMBA
from tests.engine.running import make_engine
from tests.engine.targets import OrderedTarget, alternating
from tests.engine.test_exactness import varied_requests
from tests.engine.tiny import T5_SIZES, backend_of, save
from tests.engine.tokenizers import json_tokenizer
from tests.fakes import ConstantDrafter, InterruptedDrafter, LosableDrafter, TreeDrafter, erratic_clock

K = 8
FAKES = {"random trees": TreeDrafter(range(2, 20)), "always wrong": ConstantDrafter(0)}
SCHEDULES = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "preempted": {"num_blocks": 45, "block_size": 4, "max_num_seqs": 8},
    "unshared": {"enable_prefix_caching": False},
    "adaptive": {"speculation": "adaptive", "max_num_seqs": 4},
    "two cohorts": {"num_blocks": 90, "block_size": 4, "max_num_seqs": 12},
    "two keys": {"block_size": 4, "max_num_seqs": 8},
}
OTHER_TARGETS = {
    "t5": [("model", ""), ("suffix", "")],
    "hybrid": [("model", ""), ("suffix", ""), ("random trees", ""), ("head", "eagle3"), ("head_tree", "eagle3")],
}
"""Methods, and the heads that they draft with, for an encoder-decoder and for a model with linear layers."""
FEW_SCHEDULES = ("chunked", "preempted", "two cohorts")
FIRST_HEADS = ("", "eagle3", "dspark")
"""A method has all schedules and rules without a head, with one of chains and one of blocks, and few with others."""
LOSSES = ("nothing", "the draft dies", "the draft hangs", "the target resets", "the engine dies")


class Contender(NamedTuple):
    """A method with the head that it drafts with, if any, whether it runs ahead, and its target."""

    method: str
    head: str = ""
    runs_ahead: bool = False
    target: str = "llama"

    def __str__(self):
        return " ".join(filter(None, (self.method, self.head, "ahead" * self.runs_ahead, self.target)))


class Cell(NamedTuple):
    """One test."""

    contender: Contender
    rule: str
    schedule: str
    loss: str

    def __str__(self):
        return ", ".join(map(str, self))


def contenders():
    """Every method with each head that it takes, and ahead where it runs ahead, with its rules."""
    for name, method in METHODS.items():
        heads = [""]
        if (method.make_in_target or method.reads_features) and name != "self":
            kinds = ["mtp"] if name == "mtp" else KINDS
            heads = [kind for kind in kinds if not (method.drafts_trees and HEADS[KINDS[kind]().kind].drafts_blocks)]
        if method.reads_features:
            heads.remove("mtp")  # a layer in the target's checkpoint
        for head in heads:
            yield Contender(name, head), method.rules if head in FIRST_HEADS or name == "mtp" else method.rules[::2]
        if method.runs_ahead and not method.reads_features:
            yield Contender(name, runs_ahead=True), method.runs_ahead
    for name in FAKES:
        yield Contender(name), ("coupled",)
    for kind, spoiled in itertools.product(KINDS, SPOILED):
        if spoiled != "not a number" and kind not in ("eagle3", "dspark"):
            continue  # as others that draft token by token, or block by block
        yield Contender("head", f"{kind}, {spoiled}"), ("coupled",)
    for target, methods in OTHER_TARGETS.items():
        for method, head in methods:
            yield Contender(method, head, target=target), ("coupled",)


def cells():
    """Return all or few schedules for rules that share noise, one for the others; losses change from cell to cell."""
    nth, found = itertools.count(), []
    for contender, rules in contenders():
        for rule in rules:
            schedules = [*SCHEDULES]
            is_shown_elsewhere = contender.method == "head_worker" or contender.head.endswith(tuple(SPOILED))
            if not RULES[rule].shares_noise or is_shown_elsewhere:
                schedules = [schedules[next(nth) % len(schedules)]]
            elif contender.target in OTHER_TARGETS or (contender.head not in FIRST_HEADS and contender.method != "mtp"):
                schedules = FEW_SCHEDULES
            for schedule in schedules:
                found.append(Cell(contender, rule, schedule, LOSSES[next(nth) % len(LOSSES)]))
    return found


def has_chains(cell):
    """Whether a cell is one for vLLM, too: of chains, from elsewhere."""
    method, (name, head, _, target) = METHODS.get(cell.contender.method), cell.contender
    is_chain = name == "always wrong" if method is None else method.runs_in != "target" and not method.drafts_trees
    return is_chain and target == "llama" and not head


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        is_tried = has_chains if metafunc.config.getoption("execution") == "vllm" else bool
        metafunc.parametrize("cell", [*filter(is_tried, cells())], ids=str)


@pytest.fixture(scope="module")
def target_paths(target_path, tmp_path_factory):
    t5 = save(T5Config(**T5_SIZES), tmp_path_factory.mktemp("t5"), seed=1, factor=3.0)
    return {"llama": target_path, "t5": t5, "hybrid": save(BambaConfig(**BAMBA), tmp_path_factory.mktemp("bamba"))}


@pytest.fixture(scope="module")
def backend(target_paths):
    """Returns a target, or a target with a head."""

    @functools.cache
    def backend(target, head):
        kinds = head.rsplit(", ", 1) if head not in KINDS else [head]
        return backend_of_kind(target_paths[target], *kinds) if head else backend_of(target_paths[target])

    return backend


@pytest.fixture(scope="module")
def nearly(target_paths):
    """Returns a draft that agrees with a target about half of the time."""

    @functools.cache
    def nearly(target):
        backend = backend_of(target_paths[target])
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in backend.model.module.parameters():
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.1)
        return backend

    return nearly


@pytest.fixture(scope="module")
def start(backend, nearly, make_grammars, make_verifier):
    """Makes the engine of a cell."""

    def start(cell, **settings):
        contender = cell.contender
        settings = {"num_speculative_tokens": K, "verification": cell.rule} | SCHEDULES[cell.schedule] | settings
        method, target, sent = METHODS.get(contender.method), backend(contender.target, contender.head), []
        if method is not None:
            settings["drafting"] = contender.method
            settings |= {"self_draft_layers": 1} if contender.method == "self" else {}

        def make(config):
            if method is None:
                return FAKES[contender.method]
            model = None
            if method.runs_in == "draft":
                part = nearly(contender.target) if not method.reads_features else alone(target)
                features = FeatureStore(0.0) if method.reads_features else None
                sent.append(features)
                model = DraftModel(part, None, make_grammars(), contender.runs_ahead, features)
            drafter = method.make(config, model)
            return method.drafter_of_engine(config, InterruptedDrafter(drafter) if contender.runs_ahead else drafter)

        engine = make_engine(
            target,
            lambda config: LosableDrafter(lambda: make(config), cell.loss),
            tokenizer=json_tokenizer(),
            grammars=make_grammars(),
            clock=erratic_clock(),
            make_verifier=make_verifier,
            **settings,
        )
        if method is not None and method.reads_features:
            engine.verifier = SendingTarget(engine.verifier, sent)
        return alternating(engine) if cell.schedule == "two cohorts" else engine

    return start


class SendingTarget:
    """A verifier that hands the features of computed tokens to the last drafter, as rank 0 does."""

    def __init__(self, verifier, stores):
        self.verifier, self.stores = verifier, stores
        self.release = verifier.release

    async def verify(self, rows):
        verdicts = await self.verifier.verify(rows)
        for row, verdict in zip(rows, verdicts, strict=True):
            end, size = row.start + row.length + verdict.num_accepted, self.verifier.kv.states[0, 0].nbytes
            rows = features_of(self.verifier, row.block_ids, range(end))
            self.stores[-1].put(row.request.request_id, 0, end, rows, dtype="float32", row_bytes=size)
        return verdicts


def verifier_of(engine):
    verifier = engine.verifier
    while isinstance(verifier, OrderedTarget | SendingTarget):
        verifier = verifier.verifier
    return verifier


def caches(engine):
    """The tensors of keys and values, block by block."""
    verifier = verifier_of(engine)
    return [*verifier.kv.keys, *verifier.kv.values] if hasattr(verifier, "kv") else verifier._runner._runner.kv_caches


def reset(engine):
    """Do as a target that is started again: whatever it held is lost, and what is in flight."""
    for cache in caches(engine):
        cache.fill_(7.0)
    if hasattr(verifier := verifier_of(engine), "kv"):
        for layer in getattr(verifier.kv.extras, "layers", ()):
            for states in (layer.inputs, layer.matrices, *layer.updates):
                states[1:] = 7.0  # slot 0 is the empty context
    if isinstance(engine.verifier, OrderedTarget):
        engine.verifier.restart()
    engine.reset()


def add(engine, name, request, cell, output_token_ids=(), predicted=()):
    prompt, params = request
    key = "ab"[int(name) % 2] if cell.schedule == "two keys" else ""
    engine.add(
        name,
        prompt,
        params,
        cache_salt=key or None,
        owner=key,
        output_token_ids=output_token_ids,
        predicted_token_ids=predicted,
    )


async def written(start, cell, requests, predicted):
    """Generate everything; return the last engine, and each request's output."""
    engine = start(cell)
    rounds = {name: [] for name in requests}
    for name, request in requests.items():
        add(engine, name, request, cell, predicted=predicted.get(name, ()))
    for number in itertools.count(1):
        if not engine.has_work:
            break
        for output in await engine.step():
            rounds[output.request_id].append(output)
        if cell.loss == "the target resets" and number % 5 == 0:
            reset(engine)
        if cell.loss == "the engine dies" and number == 9:
            reset(engine)
            engine = start(cell)
            for name, request in requests.items():
                if not rounds[name] or rounds[name][-1].finish_reason is None:
                    resumed = Output(rounds[name]).token_ids if rounds[name] else ()
                    add(engine, name, request, cell, resumed, predicted.get(name, ()))
        if cell.schedule == "unshared":
            for cache in caches(engine):
                cache[list(engine.scheduler.pool._free)] = 50.0
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return engine, {name: Output(outputs) for name, outputs in rounds.items()}


@pytest.fixture(scope="module")
def requests():
    """Every sampling parameter, grammar and kind of stop, at temperatures of 0, 0.7, 0.8 and 1."""
    every = varied_requests(6) + feature_requests((0.0, 0.8))[::3]
    return {
        str(nth): (prompt, replace(params, traces_rounds=nth % 2 > 0)) for nth, (prompt, params) in enumerate(every)
    }


@pytest.fixture(scope="module")
def requests_to(requests):
    """Returns the requests for a target; an encoder reads a prompt in one pass."""
    return lambda target: {
        name: (prompt[:30] if target == "t5" else prompt, params) for name, (prompt, params) in requests.items()
    }


@pytest.fixture(scope="module")
async def plain(backend, make_grammars, requests_to):
    """The outputs of plain decoding by each target, without shared prefixes."""

    def start(cell):
        settings = {"num_speculative_tokens": 0, "enable_prefix_caching": False}
        target = backend(cell.contender.target, "")
        return make_engine(target, tokenizer=json_tokenizer(), grammars=make_grammars(), **settings)

    outputs = {}
    for target in ("llama", *OTHER_TARGETS):
        cell = Cell(Contender("none", target=target), "coupled", "plain", "nothing")
        _, outputs[target] = await written(start, cell, requests_to(target), {})
        assert sum(len(output.token_ids) < 12 for output in outputs[target].values()) > 5, "some end early"
    return outputs


async def test_nothing_changes_what_a_client_sees(cell, start, requests_to, plain):
    requests, expected = requests_to(cell.contender.target), plain[cell.contender.target]
    if not RULES[cell.rule].shares_noise:
        requests = {name: request for name, request in requests.items() if request[1].temperature == 0}
    # Some predict their text, and every second token of it is right.
    predicted = {
        name: [token ^ (nth % 2) for nth, token in enumerate(expected[name].token_ids)] for name in [*requests][::5]
    }
    changed = {}
    if RULES[cell.rule].shares_noise:  # some audit their text, and one a text with a wrong token
        audited = [*requests][2::5]
        predicted |= {name: expected[name].token_ids for name in audited}
        requests |= {name: (requests[name][0], replace(requests[name][1], audits=True)) for name in audited}
        text = predicted[audited[0]]
        middle = len(text) // 2
        changed[audited[0]] = middle, text[middle]
        predicted[audited[0]] = [*text[:middle], (text[middle] + 2) % VOCAB, *text[middle + 1 :]]
    engine, outputs = await written(start, cell, requests, predicted)
    for name, output in outputs.items():
        if name in changed:
            assert output.differences[0][:2] == changed[name]
            assert output.differences[0].margin > 0
        else:
            output.check_equal(expected[name])
            assert not output.differences
    if cell.loss != "the engine dies":
        is_good = cell.contender.method not in ("none", *FAKES) and not cell.contender.head.endswith(tuple(SPOILED))
        assert (engine.stats.num_preemptions > 0) or cell.schedule != "preempted"
        assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 0 or not is_good


def test_every_kind_of_head_has_its_cells():
    assert {make().kind for make in KINDS.values()} == set(HEADS)
    assert {cell.contender.method for cell in cells()} > {name for name in METHODS if name != "none"}
