"""Names of paced devices: what they mean, which are refused, and where they are allowed."""

import pytest

from engine.config import PairConfig
from engine.errors import ConfigError
from engine.execution.paced.device import PacedDevice, check_allowed, is_paced, parse_device, split_pair
from engine.execution.paced.roofline import decoding


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("PACELINE_PACED", "1")


@pytest.fixture
def not_allowed(monkeypatch):
    monkeypatch.delenv("PACELINE_PACED", raising=False)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("paced:h100-8b", PacedDevice("h100-8b", "h100", 1, "8b")),
        ("paced:h100x4-70b", PacedDevice("h100x4-70b", "h100", 4, "70b")),
        ("paced:l4-1b/shared", PacedDevice("l4-1b/shared", "l4", 1, "1b", is_shared=True)),
    ],
)
def test_a_name_gives_gpus_and_a_model(name, device):
    assert parse_device(name) == device


@pytest.mark.parametrize("name", ["paced:", "paced:h100", "paced:h100x0-8b", "paced:b9-8b", "paced:h100-9b", "paced:+"])
def test_a_wrong_name_is_refused_with_the_names_that_there_are(name):
    with pytest.raises(ConfigError, match=r"GPUxN-model.*h100.*70b"):
        parse_device(name)


def test_a_pair_has_a_device_each():
    assert split_pair("paced:h100x4-70b+l4-1b") == ("paced:h100x4-70b", "paced:l4-1b")
    assert split_pair("paced:h100-8b") == ("paced:h100-8b", "paced:h100-8b")


def test_real_devices_are_not_paced():
    assert is_paced("paced:h100-8b")
    assert not any(map(is_paced, ("auto", "cpu", "cuda")))


def test_a_target_over_four_gpus_is_faster_than_over_two():
    work = decoding(1, 5, 100)
    four, two = parse_device("paced:h100x4-70b"), parse_device("paced:h100x2-70b")
    assert four.pass_seconds(work) < two.pass_seconds(work)


@pytest.mark.parametrize("value", [None, "", "0", "true"])
def test_a_paced_device_is_refused_where_nobody_has_allowed_it(value, monkeypatch, not_allowed):
    if value is not None:
        monkeypatch.setenv("PACELINE_PACED", value)
    with pytest.raises(ConfigError, match=r"only imitates a GPU's speed.*PACELINE_PACED=1"):
        check_allowed("paced:h100-8b+h100-1b")
    with pytest.raises(ConfigError, match="PACELINE_PACED=1"):
        PairConfig(device="paced:h100-8b+h100-1b")


def test_a_pair_of_models_gets_its_parts(allowed):
    pair = PairConfig(device="paced:h100-8b+h100-1b")
    assert pair.target.device == "paced:h100-8b"
    assert pair.draft.device == "paced:h100-1b"


def test_an_allowed_name_must_still_be_right(allowed):
    with pytest.raises(ConfigError, match="h100-9b"):
        PairConfig(device="paced:h100-9b+h100-1b")
