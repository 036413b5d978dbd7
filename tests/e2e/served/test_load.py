"""The load test and its tool-call suite against the bundled pair, as a user would run them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import Server
from tests.load import __main__ as command
from tests.load.ci import ARGUMENTS

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]

BRIEF = ("--warmup", "1", "--max-tokens", "8")


def run(server: Server, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    status = command.main(["--url", server.url, "--out", str(out), *words])
    return status, json.loads((out / "summary.json").read_text())


def test_the_bundled_pair_writes_the_targets_text_under_load(server, tmp_path):
    status, summary = run(server, tmp_path, *ARGUMENTS, "--requests", "12")
    assert status == 0
    off, adaptive = (summary["arms"][name] for name in ("off", "adaptive"))
    assert off["texts_checked"] == adaptive["texts_checked"] == 24
    assert off["texts_differing"] == adaptive["texts_differing"] == 0
    assert off["acceptance"]["num_drafts"] == 0 < adaptive["acceptance"]["num_accepted_tokens"]
    assert off["latencies_ms"]["itl"] is not None
    assert summary["speed_up"]["adaptive"]["all"]["low"] is not None
    requests = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().split("\n") if line]
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 48
    turns = list(dict.fromkeys((request["turn"], request["arm"]) for request in requests))
    assert turns == [(0, "off"), (0, "adaptive"), (1, "adaptive"), (1, "off")]
    assert json.loads((tmp_path / "config.json").read_text())["options"]["concurrency"] == 4


def test_a_missed_slo_a_wrong_text_and_an_arm_that_is_another_are_told_by_the_exit_status(
    server, tmp_path, monkeypatch, capsys
):
    words = (*BRIEF, "--requests", "3", "--endpoint", "chat")
    status, summary = run(server, tmp_path, *words, "--slo", "ttft=0.001")
    assert (status, summary["arms"]["default"]["good_share"]) == (1, 0.0)
    assert command.main(["--url", server.url, *words, "--arms", "off,fixed", "--turns", "1"]) == 2
    assert "arm fixed: " in capsys.readouterr().out
    assert command.main(["--url", "http://127.0.0.1:1"]) == 2
    check = command.check

    async def check_falsified(plan, records):
        records[0].text = "wrong"
        records[0].kept["choices"][0]["token_ids"][3] ^= 1
        await check(plan, records)

    monkeypatch.setattr(command, "check", check_falsified)
    for reference, what in (("engine", "token 3: "), (server.url, "character 0 ")):
        status, summary = run(server, tmp_path, *words, "--reference", reference)
        assert status == 1
        [text] = summary["differing_texts"]
        assert what in text["difference"]


@pytest.mark.parametrize("load", [("--concurrency", "1"), ("--rate", "2")])
def test_a_sweep_finds_a_capacity(server, tmp_path, load, monkeypatch):
    monkeypatch.setattr(command, "MAX_LOAD", 2)
    words = ("--sweep", *load, *BRIEF, "--duration", "1", "--slo", "ttft=60000")
    assert run(server, tmp_path, *words)[1]["capacity"] == {"default": 2}


def test_traces_are_replayed_with_their_lengths_or_prompts(server, tmp_path):
    azure, mine = tmp_path / "azure.csv", tmp_path / "mine.jsonl"
    arrivals = "".join(f"2023-11-16 18:15:46.{index}000000,{300 + index},{4 + index}\n" for index in range(4))
    azure.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{arrivals}2023-11-16 18:15:47.0000000,9000,500\n")
    status, summary = run(server, tmp_path, *BRIEF, "--trace", str(azure))
    figures = summary["arms"]["default"]
    assert (status, figures["num_ok"], figures["mean_tokens"]) == (0, 5, (4 + 5 + 6 + 7 + 8) / 5)
    assert figures["mean_prompt_tokens"] > 500
    assert any("1 of the trace's 5 requests were cut" in note for note in summary["notes"])
    rows = [{"timestamp": 20.5 * nth, "text_input": text, "output_length": 3} for nth, text in enumerate(["a", "b"])]
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, summary = run(server, tmp_path, *BRIEF, "--trace", str(mine))
    assert (status, summary["arms"]["default"]["mean_tokens"]) == (0, 3)
    assert summary["arms"]["default"]["domains"].keys() == {"mine"}


def test_calls_and_json_stay_whole_whatever_is_drafted(server, tmp_path, capsys):
    words = ("tools", "--url", server.url, "--calls", "7", "--max-tokens", "32", "--out", str(tmp_path / "faults"))
    assert command.main(words) == 0
    assert "json_schema" in capsys.readouterr().out
