"""k8s/README.md names what there is."""

import json
import re

from tests.k8s.manifests import K8S, OVERLAYS
from tests.k8s.test_mutations import MUTATIONS

README = (K8S / "README.md").read_text()


def first_cells(header: str) -> set[str]:
    """The names in the first column of the table with this header."""
    table = README.split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    rows = table.splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}


def test_the_tables_name_every_overlay_and_component() -> None:
    assert first_cells("overlay") == set(OVERLAYS)
    assert first_cells("component") == {path.parent.name for path in K8S.glob("components/*/kustomization.yaml")}


def test_the_readme_counts_the_mistakes_that_are_made() -> None:
    assert f"{len(MUTATIONS)} mistakes are made on purpose" in README


def test_the_first_commands_use_what_exists() -> None:
    (block,) = re.findall(r"```bash\n(kind create.*?)```", README, re.DOTALL)
    for path in re.findall(r"k8s/[\w/-]+", block):
        assert (K8S.parent / path).exists()
    (body,) = re.findall(r"-d '(.*)'", block)
    assert json.loads(body)["stream"] is True
