from types import SimpleNamespace

import pytest

from deployments import cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_speculative_token=3"], "did you mean num_speculative_tokens?"),
        (["num_speculative_tokens=many"], "num_speculative_tokens is 'many'"),
        (["num_speculative_tokens"], "not of the form name=value"),
        (["--nothing"], "unrecognized arguments"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line_before_anything_starts(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["python -m deployments", *arguments])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_why_an_application_did_not_start_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    deployments = {
        "Router": SimpleNamespace(status="UPDATING", message=""),
        "Ingress": SimpleNamespace(status="DEPLOY_FAILED", message="Traceback\n  ...\nModelError: no such model\n"),
    }
    status = SimpleNamespace(applications={"default": SimpleNamespace(deployments=deployments)})
    monkeypatch.setattr(cli.serve, "status", lambda: status)
    assert cli._failures() == ["ModelError: no such model"]
