"""`paceline pull` downloads from a stand-in of the hub, on this machine, what a server then finds."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from deployments.cli import pull as pulling
from tests.deployments.cli.http_stand_in import Request, stand_in
from tests.engine.heads.files import head_settings, save_head

ROOT = Path(__file__).parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"the weights",
    "pytorch_model.bin": b"the same weights",
    "original/model.safetensors": b"the same weights",
}
PROGRAM = "from deployments.cli.commands import main; main()"
FINDS = """
from engine.config import PairConfig
from engine.models.registry import open_model
print(*sorted(path.name for path in open_model(PairConfig(target_model="org/model@main").target).directory.iterdir()))
open_model(PairConfig(target_model="org/other@v1").target).directory
"""


class Hub:
    """A hub with one public and one private model."""

    def __init__(self) -> None:
        self.downloads: Counter[str] = Counter()
        self.tokens: set[str | None] = set()

    def __call__(self, request: Request) -> None:
        self.tokens.add(request.headers["Authorization"])
        path = request.path.partition("?")[0]
        model, _, rest = path.removeprefix("/api/models").strip("/").partition("/model")
        is_closed = model == "private" and not request.headers["Authorization"]
        if is_closed or model not in ("org", "private") or "none" in path:
            request.answer(401, b"{}", X_Error_Code="RepoNotFound")
        elif rest.startswith("/revision"):
            request.answer(200, json.dumps({"id": "org/model", "sha": COMMIT, "siblings": []}).encode())
        elif rest.startswith("/tree"):
            entries = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": oid(name)} for name in FILES]
            request.answer(200, json.dumps(entries).encode())
        else:
            name = rest.removeprefix(f"/resolve/{COMMIT}/")
            self.downloads[name] += request.command == "GET"
            request.answer(200, FILES[name], **{"ETag": f'"{oid(name)}"', "X-Repo-Commit": COMMIT})


def oid(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


@contextmanager
def hub(cache: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub, and the environment of the processes that use it."""
    answer = Hub()
    with stand_in(answer) as url:
        variables = {"HF_ENDPOINT": url, "HF_HOME": str(cache), "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        yield answer, {**os.environ, **variables}


def run(environment: dict[str, str], *words: str, program: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_what_is_pulled_is_found(tmp_path: Path) -> None:
    with hub(tmp_path) as (server, environment):
        pulled = run(
            environment, "pull", "org/model", "--draft", "private/model, org/model@main", "--token", "hf_secret"
        )
        assert pulled.returncode == 0, pulled.stderr
        serve = "serve it: paceline serve target_model=org/model draft_model=private/model,org/model@main"
        assert pulled.stdout.splitlines()[3] == serve
        assert "%|" not in pulled.stderr  # bars are for terminals
        assert "Bearer hf_secret" in server.tokens
        assert server.downloads == {"config.json": 2, "model.safetensors": 2}, "nothing that is not read"
        again = run(environment, "pull", "org/model")
        assert again.returncode == 0, again.stderr
        assert server.downloads.total() == 4
    found = run({**environment, "HF_HUB_OFFLINE": "1"}, program=FINDS)
    assert found.stdout == "config.json model.safetensors\n"
    assert "ModelError: model directory org/other does not exist" in found.stderr
    assert "; `paceline pull org/other@v1` downloads it" in found.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [("org/none", "the hub gives you no model org/none: it does not exist"), ("private/model", "or pass --token")],
)
def test_what_cannot_be_pulled_is_said_in_one_line(name: str, message: str, tmp_path: Path) -> None:
    with hub(tmp_path) as (_, environment):
        refused = run({**environment, "HF_TOKEN": ""}, "pull", name)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert message in refused.stderr.splitlines()[-1]
    assert len(refused.stderr.splitlines()) == 2


def test_the_target_of_a_head_is_pulled_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = []

    def download(name: str, token: str | None) -> Path:
        pulled.append((name, token))
        return tmp_path / name

    monkeypatch.setattr(pulling, "_download", download)
    for name, verifier in (("head", "org/target"), ("nameless", None)):
        save_head(tmp_path / name, head_settings(verifier), {})
    pulling.pull("head", None, "secret")
    assert pulled == [("head", "secret"), ("org/target", "secret")]
    assert (
        capsys.readouterr().out.splitlines()[-1] == "serve it: paceline serve target_model=org/target draft_model=head"
    )
    for name, draft in (("head", "other"), ("nameless", None)):
        with pytest.raises(
            click.ClickException, match=f"{name} is a trained head: pull its target, with --draft {name}"
        ):
            pulling.pull(name, draft, None)
