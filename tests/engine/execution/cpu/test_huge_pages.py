"""Huge pages: memory that is there moves to them and keeps what it holds; memory that is not stays away."""

import mmap
import re
import threading
from pathlib import Path
from queue import Queue

import pytest
import torch

from engine import LLM
from engine.config import ModelConfig
from engine.execution.cpu import huge_pages
from engine.models.causal_lm import CausalLM
from tests.cluster.models import save_llama

SIZE = 32 * 2**20
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def figures(memory):
    """Return the kilobytes of each kind in the mapping that holds `memory`."""
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    found = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            if found:
                return found
            is_it = int(head[1], 16) <= at < int(head[2], 16)
        elif is_it and (entry := re.match(r"(\w+): +(\d+) kB", line)):
            found[entry[1]] = int(entry[2])
    return found


def mapped():
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # a mapping of its own, not one with its neighbours
    return memory


@pytest.fixture
def collapse():
    if not ENABLED.exists() or "[madvise]" not in ENABLED.read_text():
        pytest.skip("this kernel gives huge pages to all memory or to none")
    memory = mapped()
    memory[:] = bytes(SIZE)
    huge_pages.collapse()
    if figures(memory)["AnonHugePages"] == 0:
        pytest.skip("this kernel moves nothing to huge pages")
    return huge_pages.collapse


def test_what_is_there_moves_and_stays_the_same(collapse):
    content = bytes(range(256)) * (SIZE // 256)
    memory = mapped()
    memory[:] = content
    assert figures(memory)["AnonHugePages"] == 0
    moved, wanted = collapse()
    assert figures(memory)["AnonHugePages"] >= (SIZE - 2 * 2**21) / 1024
    assert SIZE / 2 < moved <= wanted
    assert memory[:] == content


def test_what_lies_behind_a_hole_moves_too(collapse):
    memory = mapped()
    memory[: 2 * 2**21] = bytes(2 * 2**21)
    memory[SIZE // 3 :] = bytes(SIZE - SIZE // 3)
    before = figures(memory)["Rss"]
    collapse()
    assert figures(memory)["AnonHugePages"] >= (SIZE / 2) / 1024
    assert figures(memory)["Rss"] < before + 3 * 2**21 / 1024  # the hole is still one


def test_what_is_hardly_there_is_not_filled(collapse):
    memory = mapped()
    for start in range(0, SIZE, 2**21):
        memory[start] = 1
    before = figures(memory)["Rss"]
    collapse()
    assert figures(memory)["Rss"] == before < SIZE / 1024 / 4


def test_a_system_without_them_is_left_alone_and_says_so(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", logger=huge_pages.__name__)
    monkeypatch.setattr(huge_pages, "_MAPS", tmp_path / "nothing")
    assert huge_pages.collapse() == (0, 0)
    assert "no huge pages: " in caplog.text


@pytest.mark.skipif(not huge_pages._MAPS.exists(), reason="this system does not tell of its memory")
def test_a_kernel_that_refuses_is_reported(monkeypatch, caplog):
    caplog.set_level("INFO", logger=huge_pages.__name__)
    monkeypatch.setattr(huge_pages, "_COLLAPSE", 12345)  # no advice of any kernel
    memory = mapped()
    memory[:] = bytes(SIZE)
    moved, wanted = huge_pages.collapse()
    assert moved == 0 < wanted
    assert "few huge pages: Invalid argument" in caplog.text


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr("engine.models.causal_lm._HUGE_PAGES_AFTER_S", 0.01)


def test_a_model_asks_for_them_in_the_background_where_its_weights_are_worth_a_page(soon, monkeypatch, tmp_path):
    asked: Queue[threading.Thread] = Queue()
    monkeypatch.setattr("engine.models.causal_lm.collapse", lambda: asked.put(threading.current_thread()) or (0, 0))
    model = CausalLM.load(ModelConfig(str(save_llama(tmp_path, seed=1)), compile="off", device="cpu"))
    monkeypatch.setattr("engine.models.causal_lm.HUGE_PAGE_BYTES", huge_pages.HUGE_PAGE_BYTES)
    before = threading.active_count()
    model.use_huge_pages()
    model.use_huge_pages_soon()
    assert asked.empty()
    assert threading.active_count() == before
    monkeypatch.setattr("engine.models.causal_lm.HUGE_PAGE_BYTES", 1)
    model.use_huge_pages_soon()
    assert asked.get(timeout=10) is not threading.current_thread()


def test_an_llm_asks_for_them_once_it_has_loaded(soon, monkeypatch, tmp_path):
    asked: Queue[str] = Queue()
    monkeypatch.setattr("engine.models.causal_lm.HUGE_PAGE_BYTES", 1)
    monkeypatch.setattr("engine.models.causal_lm._move_to_huge_pages", asked.put)
    path = str(save_llama(tmp_path, seed=1))
    LLM(path, compile="off", device="cpu", max_model_len=64)
    assert asked.get(timeout=10) == path


def test_memory_that_goes_meanwhile_ends_nothing(collapse, monkeypatch):
    memory = mapped()
    memory[:] = bytes(SIZE)
    gone = mapped()
    at = torch.frombuffer(gone, dtype=torch.uint8).data_ptr()
    gone.close()
    listed = huge_pages._mappings
    monkeypatch.setattr(huge_pages, "_mappings", lambda: iter([(at, at + 2**21), *listed()]))
    collapse()
    assert figures(memory)["AnonHugePages"] >= (SIZE - 2 * 2**21) / 1024
