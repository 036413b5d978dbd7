import io
import sys
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


def test_what_every_shutdown_says_is_left_out_but_no_warning_nor_request(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [
        "\x1b[36m(HAProxyManager pid=7)\x1b[0m WARNING 2026-11-23 06:53:40,340 proxy 127.0.0.1 -- no HAProxy",
        "\x1b[36m(ServeController pid=7, ip=10.0.0.2)\x1b[0m Traceback (most recent call last):",
        "\x1b[36m(ServeReplica:default:Ingress pid=7)\x1b[0m INFO 2026-11-23 06:53:39 -- POST /v1/completions 200",
        "\x1b[33m(raylet)\x1b[0m Task Router.generate failed. There are infinite retries remaining",
        "",
    ]
    routine = [
        "\x1b[36m(HAProxyManager pid=7)\x1b[0m INFO 2026-11-23 06:53:40,340 proxy 127.0.0.1 -- Got updated backends",
        "(ProxyActor pid=7) INFO 2026-11-23 06:53:40,233 proxy 127.0.0.1 -- Got updated endpoints: {}.",
        "\x1b[36m(ServeController pid=7, ip=10.0.0.2)\x1b[0m INFO 2026-11-23 06:53:42 controller 7 -- it is stopped",
        "\x1b[33m(raylet)\x1b[0m Task ServeController.graceful_shutdown failed. There are infinite retries remaining",
    ]
    written = io.StringIO()
    monkeypatch.setattr(sys, "stdout", written)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(cli.serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(cli.logger, "level", cli.logger.level)
    cli._drain(0.0)
    for line in (*routine, *told, *routine):
        print(line)  # noqa: T201
    assert written.getvalue().splitlines() == told
