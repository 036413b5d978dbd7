"""An encoder's input is in one row of the schedule."""

from engine.blocks.row_extras import make_row_extras
from engine.config import EngineConfig, ModelInfo
from engine.params import SamplingParams
from engine.protocols import Request
from engine.requests.sequence import Sequence
from engine.scheduler import Scheduler
from tests.engine.test_scheduler import run_round, shares

INFO = ModelInfo("tiny", 64, 1000, [], 0, "float32", "cpu", start_id=0)


def test_an_input_is_computed_at_once_even_if_the_budget_is_too_small():
    """It waits only while nothing at all is left of the budget."""
    config = EngineConfig(block_size=4, max_num_batched_tokens=6, enable_prefix_caching=False)
    scheduler = Scheduler(config, 100, 1000, make_row_extras(config, INFO))
    for request_id, length in (("a", 5), ("b", 4), ("c", 3)):
        request = Request(request_id, [1] * length + [0], length + 1, SamplingParams(), input_length=length)
        scheduler.add(Sequence(request, frozenset(), None))
    assert shares(run_round(scheduler)) == [("a", 6, 0)]
    assert shares(run_round(scheduler)) == [("a", 1, 0), ("b", 5, 0)]
    assert shares(run_round(scheduler, k=2)) == [("a", 1, 2), ("b", 1, 2), ("c", 4, 0)][:2]
    assert shares(run_round(scheduler, k=1)) == [("a", 1, 1), ("b", 1, 1), ("c", 4, 0)]
