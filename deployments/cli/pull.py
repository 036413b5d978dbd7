"""pull: download models from the Hugging Face hub into the local cache, where a server finds them."""

import sys
from pathlib import Path

import click
import typer
from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine.config import PairConfig
from engine.errors import ModelError
from engine.heads.config import kind_of, verifier_of
from engine.models.registry import open_model
from engine.models.source import HUB_FILES


def pull(name: str, draft: str | None, token: str | None) -> None:
    """Download a target and its drafts, or a head and its target, and print the command that serves them."""
    if not sys.stderr.isatty():
        disable_progress_bars()
    drafts = PairConfig(target_model=name, draft_model=draft or "none").draft_names
    settings = {"target_model": name} | ({"draft_model": ",".join(drafts)} if drafts else {})
    folders = {name: _download(name, token)}
    files = open_model(PairConfig(target_model=str(folders[name])).target).settings
    if kind_of(files):
        if drafts or (target := verifier_of(files)) is None:
            raise click.ClickException(f"{name} is a trained head: pull its target, with --draft {name}")
        settings, drafts = {"target_model": target, "draft_model": name}, [name]
    for model in (settings["target_model"], *drafts):
        typer.echo(f"{model} is in {folders.get(model) or _download(model, token)}")
    typer.echo(f"serve it: paceline serve {' '.join(map('='.join, settings.items()))}")


def _download(name: str, token: str | None) -> Path:
    model = PairConfig(target_model=name).target
    typer.echo(f"downloading {name}", err=True)
    try:
        folder = Path(snapshot_download(model.path, revision=model.revision, token=token, **HUB_FILES))
    except RepositoryNotFoundError as error:
        reason = (
            "it does not exist, is private, or asks to accept its terms: log in by `hf auth login`, or pass --token"
        )
        raise click.ClickException(f"the hub gives you no model {name}: {reason}") from error
    except ValueError as error:
        raise click.ClickException(f"{name} is no name of a model on the hub: {error}") from error
    except OSError as error:
        reason = " ".join(str(error).split())
        raise click.ClickException(
            f"cannot download {name}; the same command continues where it was: {reason}"
        ) from error
    try:
        open_model(model).weight_files  # noqa: B018 - raises if some are missing
    except ModelError as error:  # also if the hub could not be reached and the cache had a part
        raise click.ClickException(f"{error}; only safetensors files are read") from error
    return folder
