import pytest
from transformers import Qwen2Config

from engine.sampling import noise
from tests.engine.tiny import SIZES, save


@pytest.fixture(autouse=True)
def plain_noise():
    """No compiled noise is left for the tests that follow."""
    yield
    noise.implement("cpu", None)


@pytest.fixture(scope="session")
def save_windowed():
    """Writes a model of two layers: one attends to all, the other through a window. One package has both."""

    def save_at(path, *, seed):
        config = Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1)
        return save(config, path, seed=seed)

    return save_at


@pytest.fixture(scope="session")
def windowed_path(tmp_path_factory, save_windowed):
    return save_windowed(tmp_path_factory.mktemp("windowed"), seed=1)
