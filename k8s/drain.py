#!/usr/bin/env python3
"""preStop of a worker pod: Serve moves this node's replicas to other nodes, and their running streams finish here.

Kubernetes would otherwise end the pod at once. Ray is told that the node will go at the deadline; Serve then starts
replacements, sends them the new requests, and stops the replicas here when they have nothing left to do. The program
returns when no replica is left, or at the deadline.
"""

import argparse
import subprocess
import sys
import time

import ray
from ray.util.state import list_actors

DEADLINE_S = 660
"""Serve stops a replica 600 s before the deadline, the time that its streams may take; 60 s are for its replacement."""
POLL_S = 1.0
REPLICA = "ServeReplica:"


def main() -> None:
    """Drain one node."""
    parser = argparse.ArgumentParser(description="Move the replicas of a Ray node to other nodes.")
    parser.add_argument("--node-id", help="the node; by default the one that this runs on")
    parser.add_argument("--deadline-s", type=int, default=DEADLINE_S, help="seconds until the node goes in any case")
    options = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level="WARNING")
    node_id = options.node_id or ray.get_runtime_context().get_node_id()
    end = time.monotonic() + options.deadline_s
    drain(node_id, options.deadline_s)
    while replicas := replicas_on(node_id):
        if time.monotonic() > end:
            sys.exit(f"still running at the deadline: {', '.join(replicas)}")
        time.sleep(POLL_S)


def drain(node_id: str, deadline_s: int) -> None:
    """Tell Ray that a node will go."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "its pod ends"]
    command += ["--deadline-remaining-seconds", str(deadline_s)]
    subprocess.run(command, check=True)


def replicas_on(node_id: str) -> list[str]:
    """Return the Serve replicas that run on a node."""
    actors = list_actors(filters=[("node_id", "=", node_id), ("state", "=", "ALIVE")], limit=1000)
    return [actor.class_name for actor in actors if actor.class_name.startswith(REPLICA)]


if __name__ == "__main__":
    main()
