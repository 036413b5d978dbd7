"""Dry runs of the acceptance test's stages: tiny models, on the CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")
from tests.engine.execution.cuda.kernels.conftest import in_order  # noqa: F401 - a fixture
from tests.gpu.acceptance import STAGES

pytestmark = [
    pytest.mark.usefixtures("in_order"),  # as on a GPU, sums do not depend on the rows beside them
    pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run has no GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # forks, which have no other thread's locks to fear here
]

EXACT = {"uniform_different", "alone", "beside_another_row", "in_a_prompt"}
"""Figures that are 0 on every device."""


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", STAGES)
def test_every_stage_has_a_dry_run(name):
    _, run = STAGES[name]
    readings = list(run("cpu", True))
    assert readings
    for reading in readings:
        assert not any(reading[figure] for figure in EXACT & reading.keys()), reading
        assert reading.get("error", 0.0) < 0.01, reading
    if name == "texts":
        assert not any(reading["different"] for reading in readings)
    if name == "served":
        assert all(not reading["fallbacks"] for reading in readings)
        assert readings[3]["run_ahead"]["hits"] > 0
