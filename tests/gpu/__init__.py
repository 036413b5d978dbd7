"""What only a GPU can show: `python -m tests.gpu.acceptance` there, a dry run on the CPU elsewhere."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, by a dry run
