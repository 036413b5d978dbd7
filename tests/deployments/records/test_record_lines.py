"""Records from files: our own lines, plain logs of OpenAI's answers, and lines that are neither."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.records.record import Record, RecordedChoice
from deployments.records.record_lines import files_of, read_records

CHAT = "/v1/chat/completions"
BODY = {"prompt": "a", "seed": 4}
CHOICE = {"index": 0, "text": "b\u2028", "finish_reason": "stop", "stop_reason": "K"}


def read(folder: Path, *lines: Any) -> list[Record | str]:
    file = folder / "lines.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    file.write_text("".join(f"{text}\n" for text in texts))
    return [record for _, record in read_records(file)]


def test_a_record_reads_back(tmp_path: Path) -> None:
    record = Record(path=CHAT, body={"messages": []}, seed=-3, choices=[RecordedChoice(text="a\u2028", token_ids=[1])])
    assert read(tmp_path, record.model_dump_json(exclude_none=True), record.model_dump_json()) == [record, record]
    answer = {"record": record.model_dump()}
    assert read(tmp_path, {"path": "/v1/completions", "body": {}, "answer": answer}) == [record], "it says more"


@pytest.mark.parametrize(
    ("path", "body", "choice", "expected"),
    [
        ("/v1/completions", {}, CHOICE | {"token_ids": [5, 6]}, {"token_ids": [5, 6], "text": "b\u2028"}),
        ("/v1/completions", {}, CHOICE, {"text": "b\u2028"}),
        ("/v1/completions", {"echo": True}, CHOICE | {"token_ids": [5]}, {"token_ids": [5]}),
        (
            "/v1/completions",
            {},
            CHOICE | {"logprobs": {"token_logprobs": [-1.5]}},
            {"text": "b\u2028", "logprobs": [-1.5]},
        ),
        (CHAT, {}, {"message": {"content": "c"}, "finish_reason": "length"}, {"text": "c", "finish_reason": "length"}),
        (CHAT, {}, {"message": {"content": "c"}, "token_ids": [5]}, {"token_ids": [5]}),
        (CHAT, {}, {"message": {"content": None, "tool_calls": [{}]}, "finish_reason": "tool_calls"}, {}),
        (CHAT, {}, {"message": {"content": "c", "reasoning_content": "t"}}, {}),
        (
            CHAT,
            {},
            {"message": {"content": "c"}, "logprobs": {"content": [{"logprob": -2.0}]}},
            {"text": "c", "logprobs": [-2.0]},
        ),
    ],
)
def test_an_answer_of_openais_api_becomes_a_record(
    tmp_path: Path, path: str, body: Any, choice: Any, expected: dict[str, Any]
) -> None:
    answer = {"choices": [choice], "system_fingerprint": "fp_1", "created": 7, "usage": {}}
    (record,) = read(tmp_path, {"path": path, "body": BODY | body, "answer": answer})
    assert isinstance(record, Record), record
    assert (record.seed, record.system_fingerprint, record.created) == (4, "fp_1", 7)
    ends = {"finish_reason": "stop", "stop_reason": "K"} if choice.keys() >= {"stop_reason"} else {}
    ends |= {"finish_reason": "stop"} if choice.get("finish_reason") == "tool_calls" else {}
    assert record.choices[0].model_dump(exclude_none=True) == ends | expected


def test_other_lines_say_what_is_wrong(tmp_path: Path) -> None:
    lines = ["{", "[]", {"path": "/v1"}, {"path": CHAT, "body": {}, "answer": {"output": []}}, {"answer": 1}]
    reasons = read(tmp_path, *lines)
    words = ["EOF", "body", "path", "'choices'", "path"]
    assert all(word in str(reason) for word, reason in zip(words, reasons, strict=True)), reasons


def test_a_folder_is_its_files_of_lines(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.jsonl file"):
        files_of(tmp_path)
    for name in ("b.jsonl", "a.jsonl.1", "proof.json"):
        (tmp_path / name).touch()
    assert [file.name for file in files_of(tmp_path)] == ["a.jsonl.1", "b.jsonl"]
    assert files_of(tmp_path / "proof.json") == [tmp_path / "proof.json"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        files_of(tmp_path / "nothing")
