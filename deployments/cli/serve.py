"""`paceline serve` and `python -m deployments`: serve the application on this machine until SIGINT or SIGTERM.

`serve run deployments:app` cuts running streams on SIGTERM. This program lets them finish for `drain_timeout_s`, then
ends them with an error; a second signal stops at once. The exit status is 0, or 1 if the application did not start.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click
import ray
from ray import serve
from ray.exceptions import RayError

from deployments.builder import build
from deployments.cli.progress import start_progress
from deployments.config import AppConfig
from deployments.diagnosis.doctor import worst
from deployments.diagnosis.machine import port_finding
from deployments.ingress.draining import LAST_WORDS_S
from deployments.local.environment import set_serve_environment
from deployments.observe.logs import serve_logging, set_log_format

logger = logging.getLogger("ray.serve")  # the only logger that Serve shows

_FINAL = ("engine.errors.ModelError", "engine.errors.ModelMismatchError", "engine.errors.ConfigError")
"""Errors of replicas that no retry can help."""
_POLL_S = 0.2
_STOP_S = 3.0  # for Serve to stop the replicas, besides their draining
SAME_SIGNAL_S = 1.0
"""Signals within this time count once: `timeout make serve` signals make and its group, and make forwards both."""


def serve_here(settings: dict[str, str], host: str, port: int) -> None:
    """Serve the application; raise click.ClickException if it cannot start."""
    config = AppConfig.model_validate(settings)
    if (address := port_finding(port, host)).level != "ok":
        raise click.ClickException(f"cannot listen on {address.found}; {address.advice}")
    set_log_format(config.log_format)
    for finding in worst(config):
        if finding.level == "error":  # some say what to do, others have advice
            raise click.ClickException(finding.found + f"; {finding.advice}" * ("; " not in finding.found))
        logger.warning("%s: %s; %s", finding.subject, finding.found, finding.advice)
    application = build(config, can_grow=False)  # the cluster will be this machine
    set_serve_environment(config)
    with group_of_children():
        # With JSON, Ray adds no prefix to workers' lines.
        log = ray.LoggingConfig(encoding="JSON", log_level="WARNING") if config.log_format == "json" else None
        # Never a running cluster, because the end deletes its applications. Serve's own commands use this namespace.
        # The start would wait for the ten processes of Ray's dashboard.
        ray.init("local", namespace="serve", include_dashboard=False, logging_config=log)
    # After ray.init, which installs its own handler.
    exit_at = ExitAtSignal()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, exit_at)
    try:
        # Serve's controller and proxies log little of use, and most of it when the server stops.
        quiet = {**serve_logging(config.log_format), "log_level": "WARNING"}
        serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
        with start_progress(logger):
            serve.run_many([serve.RunTarget(application)], wait_for_applications_running=False)
            _wait_for_start()
            signal.pause()
    except (RayError, RuntimeError, TimeoutError) as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise click.ClickException(f"Ray did not start: {reason}; its logs are in /tmp/ray/session_latest") from error
    finally:
        try:
            _drain(config.drain_timeout_s)
        finally:
            ray.shutdown()  # ends Serve, too; `serve.shutdown` would print its progress


@contextmanager
def group_of_children() -> Iterator[None]:
    """Start processes in another process group than this process's.

    Signals to the whole group, by `timeout` or a shell's `kill %1`, would else end Ray's processes and cut streams.
    """
    if os.getsid(0) == os.getpid():  # a session leader, such as a container's first process, cannot change its group
        yield
        return
    group = os.getpgrp()
    with subprocess.Popen(["sleep", "600"], process_group=0) as leader:
        os.setpgid(0, leader.pid)
        try:
            yield
        finally:
            leader.kill()
            # The shell that started this process may have ended, and the group with it.
            with suppress(PermissionError):
                os.setpgid(0, group)


class ExitAtSignal:
    """A signal handler that leaves whatever the main thread is doing."""

    def __init__(self) -> None:
        self._last_s = -SAME_SIGNAL_S

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        """Raise SystemExit, unless a signal did so within `SAME_SIGNAL_S`."""
        now_s = time.monotonic()
        if now_s - self._last_s >= SAME_SIGNAL_S:
            self._last_s = now_s
            sys.exit(0)


def _wait_for_start() -> None:
    while (application := serve.status().applications["default"]).status != "RUNNING":
        for deployment in application.deployments.values():
            error = deployment.message.strip().rpartition("\n")[2]  # of the traceback that Serve keeps
            if deployment.status == "DEPLOY_FAILED" or error.startswith(_FINAL):
                raise click.ClickException(f"the application did not start: {error.partition(': ')[2] or error}")
        time.sleep(_POLL_S)


def _drain(timeout_s: float) -> None:
    logger.info("stopping; running streams may take %g s to finish, another signal stops them", timeout_s)
    logger.setLevel(logging.WARNING)  # Serve prints its deletions
    for name in serve.status().applications:
        serve.delete(name, _blocking=False)
    deadline = time.monotonic() + timeout_s + LAST_WORDS_S + _STOP_S
    while serve.status().applications and time.monotonic() < deadline:
        time.sleep(_POLL_S)
