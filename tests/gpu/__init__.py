"""What only a GPU can show: `python -m tests.gpu.acceptance` there, a dry run on the CPU elsewhere."""
