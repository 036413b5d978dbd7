"""Measurements, not tests: `python -m tests.bench` (see __main__.py), and what it needs.

Reading order: workload.py (what is asked), figures.py (what is measured, and the row it becomes), then one file per way
to generate: with_transformers.py, with_engine.py, with_serve.py with readings.py (its metrics); worker.py (one method
in one process), turns.py (all of them in turn), processes.py (servers whose turn it is not are frozen), compare.py (the
table and the ratios), curves.py (tokens/s over rows and streams), spans.py and profile.py (where a round's time goes).

At the pace of GPUs: paced.py, paced_cells.py (against the roofline), paced_tables.py, virtual_time.py (the engine over
a clock that only passes move), paced_virtual.py (the paced cells there), simulation.py and simulate.py (made-up models
there), timeline.py (a picture of rounds), autoscaling.py (a picture of a step in load).

A cluster: arrivals.py, group_model.py, cluster_simulation.py, cluster_tables.py; measured_group.py and served_group.py
compare it with the engine and with the service.
"""
