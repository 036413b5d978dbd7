"""Forward passes of a loaded model.

In reading order: `backend` (what a drafter or verifier needs of a device), `batch` (rows flattened to tokens),
`attention` (paged and tree-masked, for every device), `dot_product` (scores, soft caps and sinks), `eager` (passes
operator by operator), `registry` (which backend a configuration gets), `memory` (how many KV blocks fit), `cpu/`
(compiled passes on CPUs), `cuda/` (CUDA graphs) and `paced/` (a CPU that takes the time of a GPU, for benches and
tests).
"""
