"""`python -m deployments [name=value ...]`: serve the application on this machine until SIGINT or SIGTERM.

`serve run deployments:app` serves the same, but ends differently: Ray aborts its driver at a SIGTERM, with exit status
134 and a stack trace, and Serve's shutdown closes its proxy at once, in the middle of running streams. Here running
streams finish first; those that take longer than `drain_timeout_s` end with an error that says so. A second signal
stops at once. The exit status is 0, or 1 if the application did not start. After the line that says that the server
stops, there are only lines about requests, warnings and errors.
"""

import argparse
import logging
import re
import signal
import sys
import time
from types import FrameType

import click
import ray
from ray import serve

from cluster.log_format import LogFormat
from deployments.builder import build
from deployments.config import AppConfig
from deployments.environment import set_serve_environment
from deployments.ingress.draining import LAST_WORDS_S
from deployments.json_log import JsonLines, Lines, serve_logging, set_log_format

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

NAMESPACE = "serve"  # where Serve's own commands look for it
_POLL_S = 0.2
_STOP_S = 3.0
"""How long Serve may take to tell the replicas."""
_ROUTINE = re.compile(
    r"\bINFO \S+ \S+ (proxy|controller) \S+ -- "
    r"|Task ServeController\.graceful_shutdown failed"  # because it ends its own process
)
"""What Serve's own processes say of every shutdown. Ray's driver prints it."""


def main() -> None:
    """Serve what the command line describes."""
    parser = argparse.ArgumentParser(prog="python -m deployments", description="Serve the application.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", default=8000, type=int, help="port to listen on")
    parser.add_argument("settings", nargs="*", metavar="name=value", help="settings; see deployments/README.md")
    options = parser.parse_args()
    try:
        config = AppConfig.model_validate(_parse(options.settings))
        log = _log_in(config.log_format)
        application = build(config, can_grow=False)  # the cluster will be this machine
    except click.UsageError as error:
        parser.error(error.message)
    set_serve_environment(config)
    # Never a running cluster: the end deletes its applications.
    ray.init("local", namespace=NAMESPACE, logging_config=log)
    # After ray.init, which installs a handler of its own.
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, _exit)
    try:
        http_options = {"host": options.host, "port": options.port}
        serve.start(http_options=http_options, logging_config=serve_logging(config.log_format))
        serve.run(application, blocking=True)
    except RuntimeError:
        if not (failures := _failures()):
            raise
        logger.error("the application did not start: %s", "; ".join(failures))
        sys.exit(1)
    finally:
        try:
            _drain(config.drain_timeout_s)
        finally:
            serve.shutdown()
            ray.shutdown()


def _unless_routine(line: str) -> str | None:
    return None if _ROUTINE.search(line) else line


def _log_in(log_format: LogFormat) -> ray.LoggingConfig | None:
    """Have this process, and what it prints of others, write its log in this format; return Ray's settings for that."""
    if log_format == "text":
        return None
    sys.stdout, sys.stderr = JsonLines(sys.stdout), JsonLines(sys.stderr)
    set_log_format(log_format)
    return ray.LoggingConfig(encoding="JSON", log_level="WARNING")


def _parse(settings: list[str]) -> dict[str, str]:
    """Return settings by name.

    Raises:
        click.UsageError: one has no value.
    """
    for setting in settings:
        if "=" not in setting:
            raise click.UsageError(f"{setting!r} is not of the form name=value")
    return dict(setting.split("=", 1) for setting in settings)


def _exit(signal_number: int, _: FrameType | None) -> None:
    """Leave whatever the main thread is doing."""
    sys.exit(0)


def _failures() -> list[str]:
    """Return why deployments did not start: the last lines of the tracebacks that Serve keeps and has logged."""
    deployments = (
        deployment
        for application in serve.status().applications.values()
        for deployment in application.deployments.values()
    )
    return [
        deployment.message.strip().rpartition("\n")[2]
        for deployment in deployments
        if deployment.status == "DEPLOY_FAILED"
    ]


def _drain(timeout_s: float) -> None:
    """Refuse new requests and wait until the running ones have finished."""
    logger.info("stopping; running streams may take %g s to finish, another signal stops them", timeout_s)
    logger.setLevel(logging.WARNING)  # Serve says here what it deletes
    sys.stdout, sys.stderr = Lines(sys.stdout, _unless_routine), Lines(sys.stderr, _unless_routine)
    for name in serve.status().applications:
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + timeout_s + LAST_WORDS_S + _STOP_S
    while serve.status().applications and time.monotonic() < deadline:
        time.sleep(_POLL_S)
