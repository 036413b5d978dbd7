"""Processes are killed or stopped under load; what the clients receive is compared and audited.

In reading order: `streams` (eight seeded requests and what comes back), `answers` (are they right?), `server` (the
application, its processes by name), `nodes` (the same on several nodes), `redis_head` (and with the head's state in
Redis), `faults` (whom each fault hits, how), `trial` (one fault under the streams), `report` (the servers that faults
need, and all faults in a table); `load` (clients that never stop), `chaos` (a fault every second or two), `leftovers`
(what a server leaves behind), `soak` (these three together). `python -m tests.faults` runs them.
"""
