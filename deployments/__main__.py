"""`python -m deployments`: what `make serve` runs, the command `paceline serve`."""

import typer.main

from deployments.cli.commands import app

if __name__ == "__main__":
    group = typer.main.get_group(app)
    group.commands["serve"].main(prog_name="python -m deployments")
