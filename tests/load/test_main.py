"""The command: what it writes, and its exit status."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.load import __main__ as command
from tests.load.__main__ import main
from tests.load.fake_server import TOKENS_PER_CHUNK, FakeServer

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:46.{index:06d}0,{100 + index},{4 + index}\n" for index in range(0, 90000, 10000)
)
WARMUP = 4


def run(server: FakeServer, out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    common = ["--url", server.url, "--out", str(out), "--max-tokens", "12", "--warmup", str(WARMUP)]
    status = main([*common, *words])
    path = out / "summary.json"
    return status, json.loads(path.read_text()) if path.exists() else {}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "requests.jsonl").read_text().split("\n") if line]


def test_a_run_writes_its_files(server: FakeServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\nanother\n")
    status, summary = run(server, tmp_path, "--concurrency", "3", "--requests", "10", "--api-key-file", str(key))
    assert status == 0
    figures = summary["arms"]["default"]
    assert (figures["num_ok"], figures["mean_tokens"]) == (10, 12)
    assert figures["acceptance"]["mean_length"] == TOKENS_PER_CHUNK
    assert figures["domains"].keys() == {"bundled"}
    assert [line["index"] for line in sorted(lines(tmp_path), key=lambda line: line["index"])] == list(range(10))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"]["concurrency"] == 3
    assert config["server"]["model"] == "tiny"
    assert 0 <= time.time() - config["start_unix_s"] < 600
    assert server.keys == {"Bearer secret"}
    assert "secret" not in json.dumps(config)


def test_refusals_count_against_the_slo_only(server: FakeServer, tmp_path: Path) -> None:
    server.failures = {1 + WARMUP + 3: 429}
    assert run(server, tmp_path, "--requests", "8")[0] == 0
    server.failures = {len(server.bodies) + 1 + WARMUP + 3: 429}
    status, summary = run(server, tmp_path, "--requests", "8", "--slo", "ttft=60000")
    assert status == 1
    assert (summary["arms"]["default"]["num_rejected"], summary["arms"]["default"]["failures"]) == (1, {})


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_wrong_text_is_a_failed_run(server: FakeServer, tmp_path: Path, endpoint: str) -> None:
    words = ("--requests", "8", "--endpoint", endpoint, "--reference", server.url)
    status, summary = run(server, tmp_path, *words)
    assert status == 0
    assert summary["arms"]["default"]["texts_checked"] == 8
    assert summary["arms"]["default"]["texts_differing"] == 0
    server.wrong_words = True
    status, summary = run(server, tmp_path, *words)
    assert status == 1
    assert summary["arms"]["default"]["texts_differing"] == 8
    assert len(summary["differing_texts"]) == 8


def test_arms_take_turns_on_the_same_requests(server: FakeServer, tmp_path: Path) -> None:
    status, summary = run(server, tmp_path, "--arms", "off,adaptive,limit-2", "--turns", "2", "--requests", "6")
    assert status == 0
    found = lines(tmp_path)
    groups = list(dict.fromkeys((line["turn"], line["arm"]) for line in found))
    assert groups == [(0, "off"), (0, "adaptive"), (0, "limit-2"), (1, "adaptive"), (1, "limit-2"), (1, "off")]
    assert all(line["acceptance"]["num_drafts"] == 0 for line in found if line["arm"] == "off")
    assert summary["baseline"] == "off"
    assert summary["speed_up"].keys() == {"adaptive", "limit-2"}
    assert summary["speed_up"]["adaptive"]["all"]["low"] is not None
    bodies = [body for body in server.bodies if body.get("cache_salt") not in (None, "survey")]
    assert len({body["cache_salt"] for body in bodies}) == 9  # a warm-up and two turns of each arm
    assert {str(body["speculative"]) for body in bodies} == {
        "{'metrics': 'summary', 'enabled': False}",
        "{'metrics': 'summary', 'num_speculative_tokens': 2}",
        "{'metrics': 'summary'}",
    }


def test_an_arm_that_the_server_does_not_do_ends_the_test(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, tmp_path, "--arms", "off,fixed", "--requests", "4") == (2, {})
    assert "--arm-url fixed=URL" in capsys.readouterr().out
    server.has_extensions = False
    assert run(server, tmp_path, "--arms", "off", "--requests", "4") == (2, {})


def test_a_server_without_extensions_is_measured_too(server: FakeServer, tmp_path: Path) -> None:
    server.has_extensions = False
    status, summary = run(server, tmp_path, "--requests", "4")
    figures = summary["arms"]["default"]
    assert status == 0
    assert figures["latencies_ms"]["itl"] is None
    assert figures["latencies_ms"]["tpot"] is not None
    assert figures["acceptance"]["num_drafts"] == 4 * 4  # from /metrics
    assert any("no ITL" in note for note in summary["notes"])
    assert not any("eager" in note for note in summary["notes"])


def test_figures_of_a_server_that_still_compiles_say_so(server: FakeServer, tmp_path: Path) -> None:
    _, summary = run(server, tmp_path, "--requests", "4")
    assert "figures of eager passes: compiling took about 40 s more; wait, and measure again" in summary["notes"]


def test_a_trace_is_replayed(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(AZURE)
    status, summary = run(server, tmp_path, "--trace", str(trace))
    figures = summary["arms"]["default"]
    assert status == 0
    assert figures["num_ok"] == 9
    assert figures["mean_prompt_tokens"] > 500
    assert all(line["num_tokens"] <= 12 for line in lines(tmp_path))
    assert any("were cut" in note for note in summary["notes"])
    assert server.bodies[-1]["ignore_eos"]


def test_the_prompts_of_a_trace_are_sent_as_they_are(server: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "mine.jsonl"
    texts = ["Call me", "This PEP proposes"]
    rows = [{"timestamp": 20.5 * i, "text_input": text, "output_length": 3} for i, text in enumerate(texts)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, summary = run(server, tmp_path, "--trace", str(trace))
    assert status == 0
    assert [body["prompt"] for body in server.bodies[-2:]] == texts
    assert [body["max_tokens"] for body in server.bodies[-2:]] == [3, 3]
    assert summary["arms"]["default"]["domains"].keys() == {"mine"}


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "20")])
def test_a_sweep_finds_a_capacity(
    server: FakeServer, tmp_path: Path, load: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_LOAD", 40)
    words = ("--sweep", *load, "--duration", "0.2", "--slo")
    status, summary = run(server, tmp_path, *words, "ttft=60000")
    assert status == 0
    assert summary["capacity"] == {"default": 40}
    status, summary = run(server, tmp_path, *words, "ttft=0.001")
    assert status == 1
    assert summary["capacity"] == {"default": 0}


def test_a_test_that_cannot_be_run_exits_with_2(server: FakeServer, tmp_path: Path) -> None:
    assert main(["--url", "http://127.0.0.1:1", "--out", str(tmp_path / "x")]) == 2
    assert run(server, tmp_path / "y", "--prompts", "nowhere") == (2, {})
    server.failures = {2: 500}
    assert run(server, tmp_path / "y", "--requests", "4") == (2, {})


@pytest.mark.parametrize(
    "words",
    [
        "--rate 1 --concurrency 2",
        "--sweep",
        "--sweep --slo ttft=1 --requests 5",
        "--trace x.csv --concurrency 5",
        "--requests 5 --duration 5",
        "--burstiness 2",
        "--arms off,adaptive --duration 5",
        "--arms sometimes",
        "--arm-url fixed=http://x",
        "--arms fixed --arm-url fixed",
        "--slo speed=1",
        "--api-key-file /dev/null",
    ],
)
def test_options_that_contradict_each_other_are_refused(words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
