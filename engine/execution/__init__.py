"""How is a pass computed?

In reading order: `backend` (the interface of a device), `batch` (rows flattened to tokens), `kv_tensors` (the cache),
`attention` (paged and tree-masked, for every device), `states` (of linear layers), `eager` (passes operator by
operator), `reduce` (sums over ranks in their order), `registry` (which backend a configuration gets), `footprint` and
`memory` (how many KV blocks fit), `cpu/` (compiled passes on CPUs), `cuda/` (CUDA
graphs) and `scratch` (its folders).
"""
