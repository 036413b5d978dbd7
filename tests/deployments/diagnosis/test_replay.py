import click
import pytest

from deployments.diagnosis.replay import Entry, read_entries, replay_entry
from tests.deployments.diagnosis.fake import FakePaceline

PATH = "/v1/completions"
BODY = {"prompt": "a", "temperature": 0.7, "seed": 1, "max_tokens": 8, "stream": False}


@pytest.fixture
def entry(server: FakePaceline) -> Entry:
    return Entry(path=PATH, body=BODY, answer=server.client.post(PATH, BODY))


def outcome(entry: Entry, server: FakePaceline, *, any_server: bool = False) -> tuple[str, str]:
    return replay_entry(entry, server.client, any_server=any_server)


def test_a_missing_token_and_a_missing_choice_are_found(entry: Entry, server: FakePaceline):
    entry.answer["choices"][0]["token_ids"].pop()
    assert outcome(entry, server)[1].startswith("choice 0, token 7: the end was logged")
    entry.answer["choices"] = []
    assert outcome(entry, server) == ("different", "0 choices were logged, now there are 1")


def test_without_token_ids_characters_are_compared(entry: Entry, server: FakePaceline):
    choice = entry.answer["choices"][0]
    del choice["token_ids"]
    assert outcome(entry, server)[0] == "equal"
    choice["text"] = choice["text"][:5] + "!" + choice["text"][6:]
    assert outcome(entry, server)[1].startswith("choice 0, character 5: '!")


def test_a_message_is_its_content_and_its_calls_without_ids(entry: Entry, server: FakePaceline):
    call = {"id": "random", "function": {"name": "f", "arguments": "{}"}}
    text = entry.answer["choices"][0]["text"]
    entry.answer["choices"] = [{"message": {"content": text, "tool_calls": [call]}}]
    assert outcome(entry, server)[1] == f"choice 0, character {len(text)}: 'f{{}}' was logged"


def test_what_cannot_be_made_again_is_refused(entry: Entry, server: FakePaceline):
    assert "no seed" in outcome(entry.model_copy(update={"body": BODY | {"seed": None}}), server)[1]
    assert "path is /v2" in outcome(entry.model_copy(update={"path": "/v2"}), server)[1]
    server.fingerprint = "fp_2"
    refused = outcome(entry, server)
    assert (refused[0], "fp_1, the server's fp_2" in refused[1]) == ("refused", True)
    assert outcome(entry, server, any_server=True)[0] == "equal"


def test_a_line_that_is_no_entry_is_named(tmp_path, entry: Entry):
    file = tmp_path / "answers.jsonl"
    file.write_text(f'{entry.model_dump_json()}\n{{"path": "/v1"}}\n')
    with pytest.raises(click.ClickException, match=r"line 2: .*body"):
        read_entries(file)
