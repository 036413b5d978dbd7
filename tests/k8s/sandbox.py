"""Runs a command as a container of the image would: as another user, with a read-only root and writable mounts.

Linux' namespaces do it, without a container runtime. The root is this machine's instead of the image's: its Python and
this repository stay where they are.
"""

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.k8s.manifests import ROOT, Manifest, ray_container

USER = 1000
WITHOUT_NAMESPACES = "only root may mount, in a namespace of its own"
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_STAGE = "/media"
_KERNELS = ("/proc", "/sys", "/dev")


@functools.cache
def has_namespaces() -> bool:
    """Whether this machine can run something with other mounts."""
    if os.geteuid() != 0:
        return False
    return subprocess.run([*_UNSHARE, "mount", "-t", "tmpfs", "none", _STAGE], check=False).returncode == 0


def writable_mounts(group: Manifest) -> dict[str, str]:
    """Return where a group's Ray container may write, and the size limit of each place, if it has one."""
    volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
    mounts = [mount for mount in ray_container(group)["volumeMounts"] if not mount.get("readOnly")]
    limits = {mount["mountPath"]: volumes[mount["name"]]["emptyDir"].get("sizeLimit", "") for mount in mounts}
    return {path: limit.removesuffix("i") for path, limit in limits.items()}


def sandboxed(command: Sequence[str], writable: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """Return a command that runs another one as user 1000 in a world that cannot be written to.

    Args:
        writable: empty folders that can be written to, and their sizes.
        environment: all variables of the command.
    """
    code = [ROOT, Path(sys.base_prefix), Path(sys.prefix).resolve()]
    hidden = {path: f"mode=1777,size={size or '50%'}" for path, size in writable.items()}
    closed = {str(folder): "mode=755" for path in code for folder in _closed_parents(path)}
    lines = ["set -eu", "mount --make-rprivate /", f"mount -t tmpfs none {_STAGE}"]
    for number, path in enumerate(code):
        lines += [f"mkdir {_STAGE}/{number}", f"mount --bind {shlex.quote(str(path))} {_STAGE}/{number}"]
    for path, options in (closed | hidden).items():
        lines.append(f"mount -t tmpfs -o {options} none {shlex.quote(path)}")
    for number, path in enumerate(code):
        quoted = shlex.quote(str(path))
        lines += [f"mkdir -p {quoted}", f"mount --bind {_STAGE}/{number} {quoted}"]
    # The image has no name for its user.
    lines += [f"echo root:x:0:0::/root:/bin/sh > {_STAGE}/passwd", f"mount --bind {_STAGE}/passwd /etc/passwd"]
    kept = "|".join([*(f"{path}|{path}/*" for path in _KERNELS), *map(shlex.quote, writable)])
    lines += [
        "cut -d' ' -f2 /proc/self/mounts | while read -r mounted; do",
        f'case "$mounted" in {kept}) ;; *) mount -o remount,bind,ro "$mounted" ;; esac',
        "done",
        "cd /tmp",
    ]
    variables = [f"{name}={value}" for name, value in environment.items()]
    user = f"setpriv --reuid={USER} --regid={USER} --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all"
    lines.append(f"exec {user} env -i {shlex.join([*variables, *command])}")
    return [*_UNSHARE, "bash", "-c", "\n".join(lines)]


def _closed_parents(path: Path) -> list[Path]:
    """Return the outermost folder above a path that other users cannot enter, if there is one."""
    return [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001][:1]
