"""Measurements, not tests: `python -m tests.bench` (see `__main__`), and what it needs.

In reading order, for the comparison of methods side by side: `workload` (models, prompts, cells), `figures` (what is
measured of a batch, and the row of a cell), a file for each method (`with_transformers`, `with_engine`, `with_serve`,
`with_vllm`, `with_llama_cpp` with `gguf_file`), `readings` (a server's metrics), `worker` (a method in a process of its
own), `turns` (the methods in turn), `processes` (freezing a server between its turns), `compiled_models` and `compare`
(the table and the ratios).

One file for each other command: `curves` (batch and load), `prefill`, `profile` with `spans`, `bandwidth`, `burst`,
`abuse`, `soak`, `autoscaling` and `timeline`; `pictures` is how plots look.

Drafting methods: `methods`, `method_turns`, `method_cells`, `method_tables`, `method_picture`, `domains` (prompts),
`large_target` (a slow model with the same texts) and `with_lookup` (transformers' own methods).

At the pace of GPUs: `paced`, `paced_cells` (beside the roofline), `paced_tables`, `light_pair` (models for many rows),
`virtual_time` (the engine with passes that only move a clock), `paced_virtual` (the paced cells there), `simulation`
and `simulate` (simulated models there).

A cluster: `arrivals`, `group_model`, `cluster_simulation` and `cluster_tables`; `measured_group` and `served_group`
compare it with the engine and with the service.
"""
