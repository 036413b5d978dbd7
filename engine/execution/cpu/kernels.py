"""Kernels: operators of ours for torch, and the C++ that compiled passes run in their place.

torch's operators for packages leave much around small products and attention. The C++ beside this file is built once,
next to the packages that call it; everywhere else an operator is what it is defined as in Python.
"""

import ctypes
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = [Path(__file__).with_name(name) for name in ("half_linear.cpp", "paged_attention.cpp")]
_C_TYPES = {"Tensor": "AtenTensorHandle", "int": "int64_t", "float": "double"}
_library = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, compute: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Define `torch.ops.paceline.NAME`; `shape` returns an empty tensor like its result.

    `compute` computes it until C++ is loaded that registers as this operator's for CPUs.
    """
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, shape, "Meta")  # type: ignore[no-untyped-call]


def shims(schemas: list[str]) -> dict[Any, list[str]]:
    """Return what torch's compiler has to know to call the C++ in the place of operators of such schemas."""
    return {_operator(schema): [_declaration(schema)] for schema in schemas}


def symbol(schema: str) -> str:
    """Return the name of the C function for an operator."""
    return "aoti_torch_cpu_" + schema.partition("(")[0]


def _operator(schema: str) -> Any:
    return getattr(torch.ops.paceline, schema.partition("(")[0]).default


def _declaration(schema: str) -> str:
    inner = schema[schema.index("(") + 1 : schema.index(")")]
    parameters = [f"{_C_TYPES[kind]} {name}" for kind, name in (part.split() for part in inner.split(", "))]
    return f"AOTITorchError {symbol(schema)}({', '.join(parameters)}, AtenTensorHandle* output)"


def build(path: Path) -> None:
    """Build the C++ to a library at `path`.

    Raises:
        torch._inductor.exc.CppCompileError: the compiler refuses it.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # torch's headers are not free of warnings.
    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False, extra_flags=("-w",))
    # The builder splits paths at spaces, which those of a user may have.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=path.parent) as beside:
        sources = [shutil.copy(source, folder) for source in SOURCES]
        builder = CppBuilder("kernels", sources, options, output_dir=folder)
        builder.build()
        Path(shutil.copy(builder.get_target_file_path(), beside)).replace(path)


def load(path: Path) -> None:
    """Let the packages that are loaded from now on find the C++.

    Raises:
        OSError: there is no such library.
    """
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
