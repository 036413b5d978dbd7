import pytest

from deployments.diagnosis import trial
from tests.deployments.diagnosis.fake import FakePaceline


@pytest.fixture
def server() -> FakePaceline:
    return FakePaceline()


@pytest.fixture(autouse=True)
def short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.0)
