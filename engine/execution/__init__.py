"""Forward passes of a loaded model.

In reading order: `backend` (what a drafter or verifier needs of a device), `batch` (rows flattened to tokens),
`attention` (paged and tree-masked, for every device), `eager` (passes operator by operator), `registry` (which backend
a configuration gets), `memory` (how many KV blocks fit) and `cpu/` (compiled passes on CPUs).
"""
