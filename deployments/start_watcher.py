"""Program `start_watcher.py PID SILENCE_S LIMIT_S`: end the process that has started it, if that hangs while it starts.

A process that is stopped, or that waits for a file system for ever, cannot end itself. This one reads what the other
writes to its standard input every so often; the end of that input says that the other has started, or has ended.

This file imports only the standard library, because it runs at each start of a replica.
"""

import os
import select
import signal
import sys
import time

NUM_STEPS = 10
"""Looks for a sign of life within the silence that ends the process."""


def watch(silence_s: float, limit_s: float) -> str | None:
    """Return why the other process must end; None if it has started or ended."""
    step_s = min(silence_s, limit_s) / NUM_STEPS
    silent_s = elapsed_s = 0.0
    while elapsed_s < limit_s:
        before = time.monotonic()
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], step_s)
        # At most a step: both processes may have been stopped together, and go on together.
        waited_s = min(time.monotonic() - before, step_s)
        elapsed_s += waited_s
        silent_s += waited_s
        if readable:
            if not os.read(sys.stdin.fileno(), 2**12):
                return None
            silent_s = 0.0
        elif silent_s >= silence_s:
            return f"it did not answer for {silence_s:g} s"
    return f"it took longer than {limit_s:g} s"


def main() -> None:
    """Watch the process, and end it and say why if it hangs.

    Its number is an argument, because it may have ended by now, and the parent of its children is another then.
    """
    parent = int(sys.argv[1])
    silence_s, limit_s = map(float, sys.argv[2:])
    reason = watch(silence_s, limit_s)
    if reason is not None and os.getppid() == parent:
        sys.stderr.write(f"process {parent} is ended, because its start hangs: {reason}\n")
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    main()
