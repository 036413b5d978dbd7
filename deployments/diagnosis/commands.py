"""The commands `doctor`, `prove` and `replay`, and `worst`, which `serve` prints."""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import click
import typer

from deployments.config import API_KEY_VARIABLE, AppConfig
from deployments.diagnosis.finding import LEVELS, Finding, show
from deployments.diagnosis.http_client import Client
from deployments.diagnosis.machine import gpu_finding, machine_findings, port_finding
from deployments.diagnosis.models import pair_findings, path_findings
from deployments.diagnosis.prove import page, sign, verify
from deployments.diagnosis.prove import prove as prove_all
from deployments.diagnosis.replay import read_entries, replay_entry
from deployments.diagnosis.running import server_findings
from deployments.diagnosis.trial import read_texts, trial_findings

app = typer.Typer(no_args_is_help=True)
Url = Annotated[str, typer.Option(help="The server's address, without /v1.")]
Key = Annotated[str | None, typer.Option(envvar=API_KEY_VARIABLE, help="The server's API key.")]


def worst(config: AppConfig, count: int = 2) -> list[Finding]:
    """Return the worst findings of what can be checked within a fraction of a second; none that is ok."""
    findings = (*machine_findings(config), *path_findings(config))
    bad = [finding for finding in findings if finding.level != "ok"]
    return sorted(bad, key=lambda finding: list(LEVELS).index(finding.level))[:count]


@app.command()
def doctor(
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of `serve`, as name=value.")] = None,
    url: Annotated[str | None, typer.Option(help="Check this running server instead of this machine.")] = None,
    port: Annotated[int, typer.Option(help="The port that `serve` will listen on.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    api_key: Key = None,
) -> None:
    """Check this machine and a pair of models, or a running server, and say what to do. Exit 1 if there is an error."""
    with _one_line_errors():
        arguments = dict(setting.partition("=")[::2] for setting in settings or ())
        found = list(server_findings(Client(url, api_key)) if url else _examine(arguments, port))
        show(found, as_json=as_json)
        raise typer.Exit(int(any(finding.level == "error" for finding in found)))


@app.command()
def prove(
    url: Url = "http://127.0.0.1:8000",
    texts: Annotated[Path | None, typer.Option(help="Prompts, with blank lines between them.")] = None,
    kill: Annotated[str, typer.Option(help="Processes to kill under streams: draft,target,router.")] = "",
    out: Annotated[Path, typer.Option(help="Where proof.json, proof.md and answers.jsonl go.")] = Path(),
    full: Annotated[bool, typer.Option(help="All texts and draft lengths, not a minute's worth.")] = False,
    check: Annotated[Path | None, typer.Option(help="Verify the signature of a proof.json instead.")] = None,
    api_key: Key = None,
) -> None:
    """Ask a server the same with every draft, batch and fault, and sign which texts are equal. Exit 0 if all are."""
    with _one_line_errors():
        if check is not None:
            signed = json.loads(check.read_text())
            verify(signed)
            typer.echo(f"signed by {signed['public_key']}; all texts equal: {signed['proof']['all_equal']}")
        else:
            client, kills = Client(url, api_key), kill.split(",") if kill else []
            proof, entries = prove_all(client, read_texts(texts), kills, is_full=full)
            signed = sign(proof, Path.home())
            out.mkdir(parents=True, exist_ok=True)
            (out / "proof.json").write_text(json.dumps(signed, indent=2) + "\n")
            (out / "proof.md").write_text(page(signed))
            (out / "answers.jsonl").write_text("".join(f"{entry.model_dump_json()}\n" for entry in entries))
            typer.echo(page(signed))
        raise typer.Exit(int(not signed["proof"]["all_equal"]))


@app.command()
def replay(
    file: Annotated[Path, typer.Argument(help="JSON lines with path, body and answer.")],
    url: Url = "http://127.0.0.1:8000",
    any_server: Annotated[bool, typer.Option(help="Compare although the server's fingerprint differs.")] = False,
    api_key: Key = None,
) -> None:
    """Make logged answers again, and report the first token that differs. Exit 0 if all are equal."""
    with _one_line_errors():
        client, outcomes = Client(url, api_key), Counter[str]()
        for number, entry in enumerate(read_entries(file), 1):
            outcome, details = replay_entry(entry, client, any_server=any_server)
            outcomes[outcome] += 1
            typer.echo(f"{number}: {outcome}: {details}")
        typer.echo(", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
        raise typer.Exit(int(set(outcomes) != {"equal"}))


def _examine(settings: dict[str, str], port: int) -> Iterator[Finding]:
    """Yield the findings about this machine and a pair; what needs the models only if they are there."""
    config = AppConfig.model_validate(settings)
    found = [*machine_findings(config), port_finding(port), gpu_finding(), *path_findings(config)]
    for check in (pair_findings, trial_findings):
        if not any(finding.level == "error" for finding in found):
            found += check(config)
    yield from found


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print errors of settings, servers and files as one line; typer would print a traceback."""
    try:
        yield
    except (click.ClickException, OSError, json.JSONDecodeError) as error:
        typer.echo(f"error: {error.message if isinstance(error, click.ClickException) else error}", err=True)
        raise typer.Exit(2) from error
