"""pull: download models from the Hugging Face hub into the local cache, where a server finds them."""

import sys
from pathlib import Path

import click
import typer
from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from engine.config import PairConfig
from engine.models.source import HUB_FILES


def pull(name: str, draft: str | None, token: str | None) -> None:
    """Download a target and its draft, and show the command that serves them.

    Raises:
        click.ClickException: a model cannot be downloaded, or holds no weights that can be read.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    settings = {"target_model": name} | ({"draft_model": draft} if draft else {})
    for model in settings.values():
        typer.echo(f"{model} is in {_download(model, token)}")
    typer.echo(f"serve it: paceline serve {' '.join(map('='.join, settings.items()))}")


def _download(name: str, token: str | None) -> Path:
    """Download what is not there yet of one model; `name@revision` pins a revision."""
    model = PairConfig(target_model=name).target
    typer.echo(f"downloading {name}", err=True)
    try:
        folder = Path(snapshot_download(model.path, revision=model.revision, token=token, **HUB_FILES))
    except RepositoryNotFoundError as error:
        reason = (
            "it does not exist, is private, or asks to accept its terms: log in by `hf auth login`, or pass --token"
        )
        raise click.ClickException(f"the hub gives you no model {name}: {reason}") from error
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise click.ClickException(
            f"cannot download {name}; the same command continues where it was: {reason}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise click.ClickException(f"{name} has no safetensors files, the only weights that are read")
    return folder
