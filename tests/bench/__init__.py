"""Measurements, not tests: `python -m tests.bench`, and what it needs.

In reading order: `commands` (what each command does), `workload` (models, prompts, cells), `figures` (a batch, and the
row of a cell), `contestants/` (each way to decode), `worker` (a contestant in a process of its own), `turns` (all
contestants in turn), `compare` (the table and the ratios) and `audit` (are the texts right?).

Other commands: `plan` (what pays, by arithmetic), `abuse`, `methods/` (every drafting method
with every rule), `paced/` (at the pace of GPUs) and the `paced_device` that it runs on.
"""
