"""Packages: compiles the passes that `CompiledForward` runs, and caches them on disk; failures raise CompileError.

A package depends on a model's configuration, not on its weights.
"""

import contextlib
import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from engine.execution.batch import ForwardBatch
from engine.execution.cpu.compilation.compiled_forward import CompileError, GumbelNoise, Step, arguments
from engine.execution.cpu.kernels import library as kernels
from engine.execution.cpu.kernels import paged_attention, panel_linear
from engine.execution.scratch import CACHE_VARIABLE as CACHE_VARIABLE
from engine.execution.scratch import cache_folder
from engine.sampling import noise
from engine.sampling.noise import Draws

_ENGINE = Path(__file__).parents[3]
_SOURCES = (
    "execution/attention.py",
    "execution/cpu/compilation/*.py",
    "execution/cpu/kernels/*.*",
    "heads/*.py",
    "models/causal_lm.py",
    "models/layers/*.py",
    "sampling/noise.py",
)
"""Files in `engine` that define the compiled code."""
MAX_BYTES = 2 * 2**30
"""Larger models are bound by memory bandwidth, and compiling needs a second copy of their weights."""
_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    # Takes longer than it saves for the few files of a process, and is in a temporary folder.
    "aot_inductor.precompile_headers": False,
    # Otherwise small constants would be compiled in, but they are weights too.
    "always_keep_tensor_constants": True,
    # Rotary sines and masks are computed once, not in every layer and head.
    "realize_opcount_threshold": 3,
    # The code between matrix products is too small for several threads.
    "cpp.threads": 1,
    "aot_inductor.custom_ops_to_c_shims": kernels.shims([panel_linear.SCHEMA, paged_attention.SCHEMA]),
}


def package_path(step: Step, *configurations: Any) -> Path:
    """Return the path of a model's package in the cache; see `CausalLM.configurations`."""
    settings = [_settings(configuration) for configuration in configurations]
    tensors = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in step.tensors.items()]
    return _cached("package", json.dumps(settings, sort_keys=True, default=str), tensors).with_suffix(".pt2")


def _settings(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}


def noise_path() -> Path:
    """Return the path of the compiled noise in the cache."""
    return _cached("noise").with_suffix(".pt2")


def kernels_path() -> Path:
    """Return the path of the C++ library in the cache."""
    return _cached("kernels").with_suffix(".so")


def _cached(*parts: object) -> Path:
    """Return a path that depends on `parts`, our sources, the libraries' versions and this machine's CPU."""
    sources = [path.read_text() for pattern in _SOURCES for path in sorted(_ENGINE.glob(pattern))]
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")] if cpuinfo.exists() else []
    machine = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), flags[:1])
    return cache_folder() / hashlib.sha256(repr((parts, sources, machine)).encode()).hexdigest()[:24]


def compile_step(step: Step, batch: ForwardBatch, draws: Draws, path: Path) -> None:
    """Compile a model's pass to a package for batches of every shape.

    `batch` and `draws` are an example: its numbers of rows, tokens, places, logits and keys all differ and exceed 1.
    """
    tensors, *caches = arguments(batch, draws)
    size = torch.export.Dim.AUTO
    one, two, three = (dict.fromkeys(range(count), size) for count in (1, 2, 3))
    any_caches = ([two for _ in tensors] for tensors in caches)
    shapes = (one, two, two, two, three, two, one, one, one, one, *any_caches)
    _compile(step.eval(), (*tensors, *caches), shapes, path)


def compile_noise(path: Path) -> None:
    """Compile `noise.gumbel`, which would otherwise take as long as a small draft's pass."""
    keys = noise.keys([1, 2, 3], [4, 5, 6], noise.TARGET_STREAM, torch.device("cpu"))
    any_size = {0: torch.export.Dim.AUTO}
    _compile(GumbelNoise(), (keys, torch.arange(50, dtype=torch.int32)), (any_size, any_size), path)


def compile_kernels(path: Path) -> None:
    """Build the C++ library."""
    with _as_compile_errors():
        kernels.build(path)


def load_kernels() -> None:
    """Load the C++ library, or raise OSError; building it takes ten seconds if it is not in the cache."""
    if not has_compiler():
        raise CompileError("there is no C++ compiler")
    compile_once(kernels_path(), compile_kernels)
    kernels.load(kernels_path())


@contextlib.contextmanager
def _as_compile_errors() -> Iterator[None]:
    try:
        yield
    except CompileError:
        raise
    except Exception as error:  # tracing and compiling raise all sorts of errors; serving continues eagerly
        raise CompileError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error


def _compile(module: nn.Module, inputs: tuple[Any, ...], shapes: tuple[Any, ...], path: Path) -> None:
    with _as_compile_errors():
        with torch.no_grad():
            program = torch.export.export(module, inputs, dynamic_shapes=shapes, strict=False)
        _check_symbolic(program, shapes)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            package = Path(folder) / "package.pt2"
            torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=_OPTIONS)
            package.replace(path)


def _check_symbolic(program: torch.export.ExportedProgram, shapes: tuple[Any, ...]) -> None:
    """Raise unless every dimension that varies is symbolic, because a package does not check sizes."""
    dynamic_dims = torch.utils._pytree.tree_leaves(shapes, is_leaf=lambda shape: isinstance(shape, dict))
    names = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    for node, dims in zip(inputs, dynamic_dims, strict=True):
        fixed = [dim for dim in dims if is_concrete_int(node.meta["val"].shape[dim])]
        if fixed:
            raise CompileError(f"dimension {fixed[0]} of {node.name} is not symbolic")


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler."""
    try:
        return bool(torch._inductor.cpp_builder.get_cpp_compiler())
    except torch._inductor.exc.InvalidCxxCompiler:
        return False


def compile_once(path: Path, compile_to: Callable[[Path], None]) -> None:
    """Compile to `path` unless it exists; if several processes need it, the others wait for the first."""
    if path.exists():  # files appear complete; no lock, because the folder may be read-only
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path)
