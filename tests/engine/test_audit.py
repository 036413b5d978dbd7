"""Audits: what a target wrote is found right, and what anything else wrote is found wrong, where it is.

`test_matrix` audits among other requests, in every schedule and after every loss. Mutants, all caught here or there:
a row read at the position before it; the seed of another choice; penalties counted over the whole answer; a grammar
that is not advanced; the last token unchecked; a chunk's last token unchecked; shaped rows that keep what the pass
drew; the end not compared.
"""

import math
import random
from dataclasses import replace

import pytest

from engine import LLM, SamplingParams
from engine.audit import Record
from engine.errors import RequestError
from engine.params import nth_seed
from engine.protocols import Verdict, VerifyRow
from engine.sampling.grammar_text import from_json_schema

PROMPTS = ["This PEP proposes", "Call me Ishmael.", "SELECT name FROM", "Up betimes and to my office,"]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, logprobs=2),
    SamplingParams(top_p=0.9, top_k=40, min_p=0.02),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, stop=["the", ". "], min_tokens=12, logprobs=0),
    SamplingParams(temperature=0.9, stop=[", "], include_stop_str_in_output=True, logit_bias={40: 2.0}),
    SamplingParams(temperature=0.7, grammar=from_json_schema({"type": "object", "required": ["a"]})),
]


@pytest.fixture(scope="module")
def writer() -> LLM:
    return LLM(compile="off", max_num_seqs=8)


@pytest.fixture(scope="module")
def auditor() -> LLM:
    """Long drafts in chunks that end in the middle of an answer."""
    return LLM(draft_model="none", compile="off", num_speculative_tokens=24, max_num_seqs=3, max_num_batched_tokens=90)


@pytest.fixture(scope="module")
def records(writer: LLM) -> list[Record]:
    """What the pair writes with drafts; two choices of each."""
    params = [replace(one, n=2, seed=nth, max_tokens=48) for nth, one in enumerate(PARAMS)]
    prompts = [PROMPTS[nth % len(PROMPTS)] for nth in range(len(params))]
    records = []
    for result, one in zip(writer.generate(prompts, params), params, strict=True):
        for output in result.outputs:
            records.append(
                Record(
                    result.prompt_token_ids,
                    replace(one, n=1, seed=nth_seed(one.seed or 0, output.index)),
                    output.token_ids,
                    output.finish_reason,
                    output.text,
                    None if output.logprobs is None else [entry.logprob for entry in output.logprobs],
                )
            )
    assert writer.stats.num_accepted_tokens > 0
    return records


def test_what_the_target_wrote_is_equal_in_any_batch_and_by_itself(auditor: LLM, records: list[Record]) -> None:
    assert {record.finish_reason for record in records} == {"stop", "length"}
    findings = dict(auditor.audit(records))
    assert len(findings) == len(records)
    assert all(finding.is_equal() for finding in findings.values()), findings
    for record in records:
        assert next(auditor.audit([record]))[1].is_equal()


def test_the_first_token_that_was_changed_is_named_with_the_targets(auditor: LLM, records: list[Record]) -> None:
    changes = random.Random(0)
    places = [(record, place) for record in records for place in {0, 1, 23, 24, 25, len(record.token_ids) - 1}]
    places = [(record, place) for record, place in places if place < len(record.token_ids)]
    altered = []
    for record, place in places:
        wrong = changes.choice([token for token in range(300, 400) if token != record.token_ids[place]])
        altered.append(replace(record, token_ids=[*record.token_ids[:place], wrong, *record.token_ids[place + 1 :]]))
    for index, finding in auditor.audit(altered):
        record, place = places[index]
        assert finding.differences[0][:2] == (place, record.token_ids[place])
        assert finding.differences[0].margin > 0
        assert not finding.is_equal(near=0.0)


def test_other_parameters_prompts_seeds_and_ends_are_found(auditor: LLM, records: list[Record]) -> None:
    long = [record for record in records if len(record.token_ids) == 48]
    drawn = next(record for record in long if record.params.temperature > 0 and record.params.grammar is None)
    cut = replace(drawn, token_ids=drawn.token_ids[:-1], text=None, logprobs=None)
    others = {
        "temperature": replace(drawn, params=replace(drawn.params, temperature=1.4)),
        "greedy": replace(drawn, params=replace(drawn.params, temperature=0)),
        "top_p": replace(drawn, params=replace(drawn.params, top_p=0.3)),
        "seed": replace(drawn, params=replace(drawn.params, seed=1234)),
        "the seed of the other choice": replace(drawn, params=replace(drawn.params, seed=(drawn.params.seed or 0) + 1)),
        "prompt": replace(drawn, prompt_token_ids=[*drawn.prompt_token_ids[:-1], 300]),
        "the first token is dropped": replace(drawn, token_ids=drawn.token_ids[1:]),
        "the last token is dropped": cut,
        "a token follows": replace(drawn, token_ids=[*drawn.token_ids, 300]),
        "the end": replace(drawn, finish_reason="stop"),
        "the text": replace(drawn, text=(drawn.text or "") + "."),
        "log probabilities": replace(drawn, logprobs=[-1.0] * len(drawn.token_ids)),
    }
    drawn = replace(drawn, params=replace(drawn.params, logprobs=0))
    others["log probabilities"] = replace(others["log probabilities"], params=drawn.params)
    found = dict(auditor.audit(others.values()))
    assert [name for index, name in enumerate(others) if found[index].is_equal()] == []
    assert next(auditor.audit([replace(cut, finish_reason=None)]))[1].is_equal(), "a text that was cut off"


def test_a_near_tie_is_told_from_a_wrong_token() -> None:
    llm = LLM(draft_model="none", compile="off", dtype="bfloat16", num_speculative_tokens=16, max_num_seqs=4)
    texts = LLM(draft_model="none", compile="off", num_blocks=64).generate(
        PROMPTS, [SamplingParams(temperature=0.7, seed=nth, max_tokens=64) for nth in range(len(PROMPTS))]
    )
    records = [
        Record(
            text.prompt_token_ids, SamplingParams(temperature=0.7, seed=nth, max_tokens=64), text.outputs[0].token_ids
        )
        for nth, text in enumerate(texts)
    ]
    margins = [entry.margin for _, finding in llm.audit(records) for entry in finding.differences]
    assert all(0 <= margin < 0.2 for margin in margins)
    wrong = replace(records[0], token_ids=[300, *records[0].token_ids[1:]])
    assert next(llm.audit([wrong]))[1].differences[0].margin > 0.2


def test_after_a_token_that_violates_the_grammar_nothing_is_compared(auditor: LLM, records: list[Record]) -> None:
    record = next(record for record in records if record.params.grammar is not None)
    finding = next(auditor.audit([replace(record, token_ids=[300, *record.token_ids[1:]])]))[1]
    assert [(entry.position, entry.margin) for entry in finding.differences] == [(0, math.inf)]


def test_audits_need_the_coupled_rule(records: list[Record]) -> None:
    llm = LLM(draft_model="none", compile="off", num_blocks=64, verification="rejection", drafting="ngram")
    with pytest.raises(RequestError, match="verification is rejection; an audit needs coupled"):
        next(llm.audit(records))


def test_an_audit_teaches_and_counts_nothing_of_drafts(
    writer: LLM, records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = writer.stats.num_draft_tokens, writer.stats.num_generation_tokens
    learned: list[object] = []
    monkeypatch.setattr(writer.engine.planner.survival, "observe", lambda *verdict: learned.append(verdict))
    assert all(finding.is_equal() for _, finding in writer.audit(records))
    assert (writer.stats.num_draft_tokens, writer.stats.num_generation_tokens) == before
    assert learned == []
    assert writer.engine.num_requests == 0


def test_no_pass_is_longer_than_its_budget(records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(draft_model="none", compile="off", num_blocks=64, max_num_seqs=4, max_num_batched_tokens=9)
    lengths, verify = [], llm.engine.verifier.verify

    async def counted(rows: list[VerifyRow]) -> list[Verdict]:
        lengths.append(sum(row.length + len(row.draft.token_ids) for row in rows))
        return await verify(rows)

    monkeypatch.setattr(llm.engine.verifier, "verify", counted)
    assert all(finding.is_equal() for _, finding in llm.audit(records[:8]))
    assert max(lengths) == 9
