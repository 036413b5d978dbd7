"""Every command of `paceline`, and `python -m deployments`; each imports what it needs when it runs."""

import json
import os
import sys
from contextlib import AbstractContextManager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import click
import typer

app = typer.Typer(
    help="Serve language models with distributed speculative decoding, and talk to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Url = Annotated[str, typer.Option(help="The server's address.")]
ApiKey = Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="A key of the server.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, with any draft or none.")]
URL = "http://127.0.0.1:8000"


def _completions(incomplete: str) -> list[str]:
    from deployments.cli.settings import settings

    return [f"{name}=" for name, _ in settings() if name.startswith(incomplete)]


def _by_name(settings: list[str] | None) -> dict[str, str]:
    for setting in settings or ():
        if "=" not in setting:
            raise typer.BadParameter(f"{setting!r} is not of the form name=value")
    return dict(setting.split("=", 1) for setting in settings or ())


Settings = Annotated[
    list[str] | None, typer.Argument(metavar="name=value", help="See `paceline settings`.", autocompletion=_completions)
]


@app.command()
def serve(
    settings: Settings = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    demo: Annotated[bool, typer.Option("--demo", help="Short for page=demo.")] = False,
) -> None:
    """Serve models on this machine until Ctrl-C.

    Without settings, a small bundled pair; with your models: paceline serve target_model=NAME draft_model=NAME
    """
    # Without such a cluster, Ray binds its ports to 127.0.0.1. By default most of it listens on all interfaces, and
    # whoever reaches a replica's gRPC server can run code, because it unpickles what it receives.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # By default Ray drops most lines of a replica that differ from another replica's only in numbers.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    from deployments.cli.serve import serve_here
    from deployments.cli.terminal import one_line_errors

    by_name = _by_name(settings) | ({"page": "demo"} if demo else {})
    with one_line_errors(1, click.ClickException):
        serve_here(by_name, host, port)


@app.command()
def chat(
    url: Url = URL, api_key: ApiKey = None, max_tokens: Tokens = 256, temperature: Temperature = None, seed: Seed = None
) -> None:
    """Talk to a served model.

    Tokens are coloured by who wrote them: the draft, and the target accepted it, or the target itself.
    """
    from deployments.cli.chat_session import ChatSession

    ChatSession(url, api_key, max_tokens=max_tokens, temperature=temperature, seed=seed).chat()


@app.command()
def complete(
    prompt: Annotated[str, typer.Argument(help="The beginning of a text; - reads it from the standard input.")],
    url: Url = URL,
    api_key: ApiKey = None,
    max_tokens: Tokens = 256,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Continue a text once."""
    from deployments.cli.chat_session import ChatSession

    session = ChatSession(url, api_key, max_tokens=max_tokens, temperature=temperature, seed=seed)
    session.ask("/v1/completions", prompt=sys.stdin.read() if prompt == "-" else prompt)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A model of the Hugging Face hub; name@revision pins a revision.")],
    draft: Annotated[str | None, typer.Option(help="Its draft model, or several separated by commas.")] = None,
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="For models that ask for a login.")] = None,
) -> None:
    """Download a model and its drafts.

    A download that broke off continues where it was.
    """
    from deployments.cli.pull import pull as pull_models

    pull_models(name, draft, token)


@app.command(context_settings=_PASSED_ON)
def evaluate(context: typer.Context) -> None:
    """Measure how well a draft fits its target.

    Acceptance, step times and the predicted speed-up.
    """
    from engine.training.__main__ import main as training

    raise typer.Exit(training(["evaluate", *context.args]))


@app.command(context_settings=_PASSED_ON)
def load(context: typer.Context) -> None:
    """Send load to a server, and check every text."""
    # A wheel has the load test as the package `paceline_load`, which a checkout may lack.
    package = "paceline_load" if find_spec("paceline_load") else "tests.load"
    raise typer.Exit(import_module(f"{package}.__main__").main(context.args))


@app.command(name="settings")
def print_settings() -> None:
    """Print every setting: its name, default and meaning."""
    from deployments.cli.settings import settings_table

    typer.echo(settings_table())


@app.command()
def version() -> None:
    """Show the versions of Paceline and its libraries."""
    for name in ("paceline", "torch", "ray", "transformers"):
        typer.echo(f"{name} {metadata.version(name)}")


@app.command()
def doctor(
    settings: Settings = None,
    url: Annotated[str | None, typer.Option(help="Check this running server instead of this machine.")] = None,
    port: Annotated[int, typer.Option(help="The port that `serve` will listen on.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Check a machine and its models, or a running server.

    Each finding says what to do. Exit 1 if there is an error.
    """
    from deployments.config import AppConfig
    from deployments.diagnosis.doctor import local_findings
    from deployments.diagnosis.finding import show
    from deployments.diagnosis.http_client import Client
    from deployments.diagnosis.running import server_findings

    with _diagnosis():
        if url:
            findings = list(server_findings(Client(url, api_key)))
        else:
            findings = local_findings(AppConfig.model_validate(_by_name(settings)), port)
        show(findings, as_json=as_json)
        raise typer.Exit(int(any(finding.level == "error" for finding in findings)))


@app.command()
def prove(
    url: Url = URL,
    texts: Annotated[Path | None, typer.Option(help="Prompts, with blank lines between them.")] = None,
    kill: Annotated[str, typer.Option(help="Processes to kill under streams: draft,target,router.")] = "",
    out: Annotated[Path, typer.Option(help="Where proof.json, proof.md and answers.jsonl go.")] = Path(),
    full: Annotated[bool, typer.Option(help="All texts and draft lengths, not a minute's worth.")] = False,
    api_key: ApiKey = None,
) -> None:
    """Audit a server's texts, made with every draft, batch and fault.

    Exit 0 if all texts are equal.
    """
    from deployments.diagnosis import prove as proving
    from deployments.diagnosis.http_client import Client
    from deployments.diagnosis.trial import read_texts

    with _diagnosis():
        kills = kill.split(",") if kill else []
        proof, records = proving.prove(Client(url, api_key), read_texts(texts), kills, is_full=full)
        out.mkdir(parents=True, exist_ok=True)
        (out / "proof.json").write_text(json.dumps(proof, indent=2) + "\n")
        (out / "proof.md").write_text(proving.page(proof))
        (out / "answers.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        typer.echo(proving.page(proof))
        raise typer.Exit(int(not proof["all_equal"]))


@app.command(name="audit")
def audit_records(
    records: Annotated[Path, typer.Argument(help="A file of JSON lines, or a folder of such files.")],
    settings: Settings = None,
    url: Url = URL,
    target_model: Annotated[str | None, typer.Option(help="Load this target here instead, with settings.")] = None,
    near: Annotated[float, typer.Option(min=0, help="Scores that are this near may change places.")] = 0.0,
    api_key: ApiKey = None,
) -> None:
    """Check recorded answers against a target.

    Would it write each of their tokens? Exit 0 if so, 1 if a text differs, 2 if one cannot be checked.
    """
    from deployments.diagnosis.audit_report import audit_files
    from deployments.diagnosis.auditors import local_auditor, server_auditor
    from deployments.diagnosis.http_client import Client

    with _diagnosis():
        if target_model is None and settings:
            raise typer.BadParameter(f"{settings[0]!r} is a setting of a target here, but --target-model is missing")
        by_name = _by_name(settings) | {"target_model": target_model or ""}
        audit = local_auditor(by_name) if target_model else server_auditor(Client(url, api_key))
        raise typer.Exit(audit_files(records, audit, near))


def _diagnosis() -> AbstractContextManager[None]:
    """Make errors exit with 2: 1 is a finding or a difference."""
    from deployments.cli.terminal import one_line_errors
    from engine.errors import PacelineError

    return one_line_errors(2, click.ClickException, PacelineError, OSError, ValueError)


def main() -> None:
    """Run the command that the command line names; an error is one line."""
    from deployments.cli.terminal import one_line_errors

    with one_line_errors(1, click.ClickException):
        app()
