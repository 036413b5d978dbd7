"""One group on a machine of two cores keeps to one of them; its death gives it back."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from cluster.cores import CoreLease


@pytest.fixture(autouse=True)
def two_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 7}, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_one_group_has_the_core_until_it_gives_it_back():
    lease = CoreLease.take()
    assert lease.core == 7
    assert CoreLease.take() is None
    lease.give_back()
    again = CoreLease.take()
    assert again.core == 7
    again.give_back()


@pytest.mark.parametrize("cores", [{0}, {0, 1, 2}, set(range(64))])
def test_more_or_fewer_cores_are_left_to_the_operating_system(cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    assert CoreLease.take() is None


def test_a_lock_that_cannot_be_opened_is_no_lease(tmp_path, caplog):
    (tmp_path / f"paceline-core-{os.getuid()}.lock").symlink_to(tmp_path / "elsewhere")
    assert CoreLease.take() is None
    assert "keeps to no core" in caplog.text
    assert not (tmp_path / "elsewhere").exists()


def test_a_killed_process_gives_its_core_back(tmp_path):
    code = (
        "import os, tempfile, time\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "os.sched_getaffinity = lambda _: {4, 7}\n"
        "from cluster.cores import CoreLease\n"
        "lease = CoreLease.take()\n"
        "print(lease.core, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "7\n"
        assert CoreLease.take() is None
        holder.send_signal(signal.SIGKILL)
    lease = CoreLease.take()
    assert lease is not None
    lease.give_back()
