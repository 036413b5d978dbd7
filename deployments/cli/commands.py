"""Every command of `paceline`, and `python -m deployments`; each imports what it needs when it runs."""

import os
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Annotated

import typer

app = typer.Typer(
    help="Serve language models with distributed speculative decoding, and talk to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if sys.stdout.isatty() else None,
)
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of commands that have their own parsers."""

Url = Annotated[str, typer.Option(help="The server's address.")]
ApiKey = Annotated[str | None, typer.Option(envvar="PACELINE_API_KEY", help="A key of the server.")]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 is greedy. Default: the model's own.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text, with any draft or none.")]
URL = "http://127.0.0.1:8000"


def _settings(incomplete: str) -> list[str]:
    """Return the settings that a word may become, for the shell."""
    from deployments.config import AppConfig
    from engine.config import PAIR_SETTINGS

    names = sorted((AppConfig.model_fields.keys() | PAIR_SETTINGS.keys()) - {"pair"})
    return [f"{name}=" for name in names if name.startswith(incomplete)]


@app.command()
def serve(
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="name=value", help="Settings; see deployments/README.md.", autocompletion=_settings),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    demo: Annotated[bool, typer.Option("--demo", help="Short for page=demo.")] = False,
) -> None:
    """Serve models on this machine until Ctrl-C.

    Without settings, a small bundled pair; with your models: paceline serve target_model=NAME draft_model=NAME
    """
    # Without such a cluster, Ray binds its ports to 127.0.0.1. By default most of it listens on all interfaces, and
    # whoever reaches a replica's gRPC server can run code, because it unpickles what it receives.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import click

    from deployments.cli.serve import serve_here

    try:
        serve_here([*(settings or []), *(["page=demo"] if demo else [])], host, port)
    except click.UsageError as error:
        raise typer.BadParameter(error.message) from error


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
    draft: Annotated[str | None, typer.Option(help="Its draft model, downloaded too.")] = None,
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="For models that ask for a login.")] = None,
) -> None:
    """Download a model and its draft.

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
    # A wheel has the load test as a package of its own, which a checkout may lack.
    package = "paceline_load" if find_spec("paceline_load") else "tests.load"
    raise typer.Exit(import_module(f"{package}.__main__").main(context.args))


@app.command()
def version() -> None:
    """Show the versions of Paceline and its libraries."""
    for name in ("paceline", "torch", "ray", "transformers"):
        typer.echo(f"{name} {metadata.version(name)}")


if find_spec("deployments.diagnosis") is not None:  # doctor, prove and replay
    app.add_typer(import_module("deployments.diagnosis.commands").app)


def main() -> None:
    """Run the command that the command line names; an error is one line."""
    from deployments.cli.terminal import CommandError, make_console

    try:
        app()
    except CommandError as error:
        make_console(stderr=True).print(f"error: {error}", style="red")
        sys.exit(1)
