"""Ways to decode the same prompts, each as a `figures.Method`.

`with_engine`, `with_serve` (with `readings` of its metrics, and its `processes`, which are frozen between its turns),
`with_transformers` and `with_vllm`.
"""
