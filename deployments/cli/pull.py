"""pull: download a model from the Hugging Face hub into the local cache, where a server finds it."""

import sys
from pathlib import Path

import typer
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from deployments.cli.terminal import CommandError
from engine.config import PairConfig
from engine.models.source import HUB_FILES


def pull(name: str, draft: str | None, *, revision: str | None = None, token: str | None = None) -> None:
    """Download a target and its draft, and show the command that serves them.

    Args:
        name: of the model on the hub; `name@revision` pins a revision.
        revision: of the target, instead.

    Raises:
        CommandError: a model cannot be downloaded, or holds no weights that can be read.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    settings = {"target_model": f"{name}@{revision}" if revision else name}
    if draft is not None:
        settings["draft_model"] = draft
    for model in settings.values():
        typer.echo(f"{model} is in {_download(model, token)}")
    typer.echo(f"serve it: paceline serve {' '.join(map('='.join, settings.items()))}")


def _download(name: str, token: str | None) -> Path:
    """Download one model; what is already there, whole or in part, is not downloaded again."""
    model = PairConfig(target_model=name).target
    typer.echo(f"downloading {name}", err=True)
    try:
        folder = Path(snapshot_download(model.path, revision=model.revision, token=token, **HUB_FILES))
    except GatedRepoError as error:
        reason = "accept its terms on its page, then log in with `hf auth login` or pass --token"
        raise CommandError(f"{name} asks for a login: {reason}") from error
    except RepositoryNotFoundError as error:
        raise CommandError(f"the hub has no model {name}, or it is private: pass --token") from error
    except RevisionNotFoundError as error:
        raise CommandError(f"{model.path} has no revision {model.revision}") from error
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CommandError(f"cannot download {name}; the same command continues: {reason}") from error
    if not any(folder.glob("*.safetensors")):
        raise CommandError(f"{name} has no safetensors files, the only weights that are read")
    return folder
