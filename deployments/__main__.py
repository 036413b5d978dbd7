"""`python -m deployments`: what `make serve` runs, with all ports of Ray and Serve but the API's bound to 127.0.0.1.

By default most of Ray listens on all interfaces. A token guards its own ports, but nothing guards a replica's gRPC
server, which unpickles what it receives: whoever reaches it can run code.
"""

import os

# Without such a cluster, as by default on Windows and macOS, Ray takes 127.0.0.1 as this machine's address.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

from deployments.cli import main

if __name__ == "__main__":
    main()
