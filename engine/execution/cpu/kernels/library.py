"""Kernels: our operators for small matrix products and attention, where torch's operators have much overhead.

Until the C++ library is loaded, an operator runs its Python definition.
"""

import ctypes
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCES = [Path(__file__).with_name(name) for name in ("panel_linear.cpp", "paged_attention.cpp")]
_C_TYPES = {"Tensor": "AtenTensorHandle", "int": "int64_t", "float": "double"}
_library = torch.library.Library("paceline", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, compute: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    """Define `torch.ops.paceline.NAME`: `compute` runs until the library is loaded; `shape` returns an empty result."""
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, compute, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(name, shape, "Meta")  # type: ignore[no-untyped-call]


def shims(schemas: list[str]) -> dict[Any, list[str]]:
    """Return C declarations that let torch's compiler call these operators."""
    operators = [getattr(torch.ops.paceline, schema.partition("(")[0]) for schema in schemas]
    return {operator.default: [_declaration(schema)] for operator, schema in zip(operators, schemas, strict=True)}


def _declaration(schema: str) -> str:
    name, _, signature = schema.partition("(")
    inner = signature.partition(")")[0]
    parameters = [f"{_C_TYPES[type_name]} {name}" for type_name, name in (text.split() for text in inner.split(", "))]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(parameters)}, AtenTensorHandle* output)"


def build(path: Path) -> None:
    """Build the C++ library at `path`, or raise torch's CppCompileError."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # Warnings are off, because torch's headers cause some.
    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False, extra_flags=("-w",))
    # Built in a temporary folder, because the builder cannot handle spaces in paths.
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=path.parent) as beside:
        sources = [shutil.copy(source, folder) for source in SOURCES]
        builder = CppBuilder("kernels", sources, options, output_dir=folder)
        builder.build()
        Path(shutil.copy(builder.get_target_file_path(), beside)).replace(path)


def load(path: Path) -> None:
    """Load the C++ library, for packages that are loaded later; raise OSError if this fails."""
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
