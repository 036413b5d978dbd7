"""`paceline serve` and `python -m deployments`: serve the application on this machine until SIGINT or SIGTERM.

On SIGTERM, `serve run deployments:app` cuts running streams and aborts with status 134. This program lets them finish
for `drain_timeout_s`, then ends them with an error. A second signal, more than a second later, stops at once. The
exit status is 0, or 1 with one line that says why the application did not start.
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

logger = logging.getLogger("ray.serve")  # the one logger that Serve shows

_FINAL = ("engine.errors.ModelError", "engine.errors.ModelMismatchError", "engine.errors.ConfigError")
"""Errors of replicas that no retry can help."""
_POLL_S = 0.2
_STOP_S = 3.0
"""How long Serve may take to tell the replicas."""
SAME_SIGNAL_S = 1.0
"""Signals so close together count as one: `timeout make serve` sends one to make and one to the process group, and make
forwards both."""


def serve_here(settings: dict[str, str], host: str, port: int) -> None:
    """Serve the application; raise click.ClickException if it cannot start."""
    config = AppConfig.model_validate(settings)
    if (address := port_finding(port, host)).level != "ok":
        raise click.ClickException(f"cannot listen on {address.found}; {address.advice}")
    set_log_format(config.log_format)
    for finding in worst(config):
        if finding.level == "error":  # which says what to do, or its advice does
            raise click.ClickException(finding.found + f"; {finding.advice}" * ("; " not in finding.found))
        logger.warning("%s: %s; %s", finding.subject, finding.found, finding.advice)
    application = build(config, can_grow=False)  # the cluster will be this machine
    set_serve_environment(config)
    with group_of_children():
        # With JSON, Ray adds no prefix to workers' lines.
        log = ray.LoggingConfig(encoding="JSON", log_level="WARNING") if config.log_format == "json" else None
        # Never a running cluster: the end deletes its applications. Serve's own commands look in this namespace. Ray's
        # dashboard would be ten more processes, which the start waits for.
        ray.init("local", namespace="serve", include_dashboard=False, logging_config=log)
    # After ray.init, which installs a handler of its own.
    exit_at = ExitAtSignal()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signal_number, exit_at)
    try:
        # Serve's controller and proxies say little that is of use here, and most of it when the server stops.
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
            ray.shutdown()  # with all that is left of Serve; `serve.shutdown` would first print how it ends


@contextmanager
def group_of_children() -> Iterator[None]:
    """Start processes in another process group than this process's.

    `timeout make serve` and a shell's `kill %1` signal the whole group: Ray's processes in it would end at once and cut
    the streams that this process waits for.
    """
    if os.getsid(0) == os.getpid():  # such as the first process of a container, which cannot change its group
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
        """Raise SystemExit, unless a signal did so a moment ago."""
        now_s = time.monotonic()
        if now_s - self._last_s >= SAME_SIGNAL_S:
            self._last_s = now_s
            sys.exit(0)


def _wait_for_start() -> None:
    """Wait until the application runs; raise click.ClickException if it fails, at once if no retry can help."""
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
