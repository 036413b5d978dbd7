"""How is a pass computed?

In reading order: `backend` (the interface of a device), `forward_row` (a request's tokens in a pass), `kv_tensors` (the
cache), `attention` (paged, for every device), `batch` (rows flattened to tokens), `eager` (passes operator by
operator), `reduce` (sums over ranks in their order), `registry` (which backend a configuration gets), `footprint` and
`memory` (how many KV blocks fit), `cpu/` (compiled passes on CPUs), `cuda/` (CUDA graphs), `scratch` (its folders) and
`vllm/` (passes that vLLM computes).
"""
