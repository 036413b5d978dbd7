"""The paced backend: passes take the device's time one after the other, while the host goes on; texts stay the same."""

import pytest
import torch

from engine.config import ModelInfo
from engine.execution.backend import PassOutput
from engine.execution.batch import ForwardRow, build
from engine.execution.kv_tensors import KVTensors
from engine.llm import LLM
from engine.models.layers.layer_attention import KVShape
from engine.params import SamplingParams
from tests.bench.paced.roofline import Work
from tests.bench.paced_device import PacedBackend, environment
from tests.fakes import Clock, LawBackend

PASS_S = 0.005
SLEEP_S = 55e-6
"""How late a sleep ends."""


class SleepingClock(Clock):
    """A clock that runs while somebody computes or sleeps; each look at it takes a microsecond."""

    def __init__(self):
        super().__init__(100.0, tick=1e-6)
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds + SLEEP_S


class Device:
    name = "h100-8b"

    def __init__(self):
        self.works = []

    def pass_seconds(self, work):
        self.works.append(work)
        return PASS_S


class Computing(LawBackend):
    """A backend whose passes take `seconds` of the clock."""

    info = ModelInfo("model", 8, 64, [], 1, "float32", "cpu")

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def run(self, batch, draws=None):
        self.clock.now += self.seconds
        return PassOutput(torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64))


def paced(clock, *, compute_s=0.001):
    device = Device()
    return PacedBackend(Computing(clock, compute_s), device, clock=clock, sleep=clock.sleep), device


def batch(*rows):
    return build(rows or [ForwardRow([1], 0, [1], 1)], KVTensors(KVShape(1, 1, 1, 1), 8, 16, torch.empty(0)))


def test_a_pass_takes_the_devices_time_its_compute_included():
    clock = SleepingClock()
    backend, _ = paced(clock)
    started = clock.now
    backend.run(batch())
    assert clock.now - started < 0.0011, "launching waits for nothing but the compute"
    assert backend.is_busy
    backend.wait()
    assert clock.now - started == pytest.approx(PASS_S, abs=20e-6)
    assert not backend.is_busy
    assert sum(clock.slept) == pytest.approx(PASS_S - 0.001, rel=0.05), "it sleeps nearly to the end"


def test_the_device_is_told_the_work_of_the_batch():
    clock = SleepingClock()
    backend, device = paced(clock)
    long = ForwardRow(list(range(20)), 0, [2, 3], 1)
    backend.run(batch(ForwardRow([1, 2], 5, [1], 2), ForwardRow([3, 4], 9, [4], 2), long))
    contexts, attended = [7, 11, 20], [6 + 7, 10 + 11, sum(range(1, 21))]
    assert device.works == [Work(24, 5, sum(contexts), sum(attended))]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_paced_pair_writes_the_same_text(temperature, monkeypatch):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12)
    plain = LLM(compile="off", device="cpu").generate([[5, 6, 7]], params, show_progress=False)
    for name, value in environment("h200-8b+h200-1b").items():
        monkeypatch.setenv(name, value)
    llm = LLM(compile="off", device="cpu")
    assert (
        llm.generate([[5, 6, 7]], params, show_progress=False)[0].outputs[0].token_ids == plain[0].outputs[0].token_ids
    )
    backends = llm.engine.verifier.backend, llm.engine.drafter.drafter.cache.backend
    assert [backend.info.device for backend in backends] == ["paced:h200-8b", "paced:h200-1b"]
