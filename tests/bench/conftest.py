"""A workload on models that cost nothing, and a console to read."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from tests.bench.paced.light_pair import make_light_pair
from tests.bench.workload import Cell, Workload


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    target, draft = map(str, make_light_pair(tmp_path_factory.mktemp("pair")))
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    cells = [Cell(1, 0.0), Cell(2, 0.7)]
    return Workload(target, draft, "float32", "cpu", "off", torch.get_num_threads(), prompts, cells, num_tokens=4)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=160)
