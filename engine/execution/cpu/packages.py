"""Packages: compiles the passes that `CompiledForward` runs, and caches them on disk.

Compiling takes about a minute. A background process does it while the model is served eagerly, and later starts use the
cached result. A package depends on a model's configuration, not on its weights. To compile by hand:

    python -m engine.execution.cpu MODEL_DIRECTORY...
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from engine.config import ModelConfig
from engine.execution import attention, dot_product
from engine.execution.batch import ForwardBatch
from engine.execution.cpu import compiled, half_weights, kernels, paged_attention, quantized_weights, traced
from engine.execution.cpu.compiled import CompileError, GumbelNoise, Step, arguments
from engine.models import causal_lm, fusion, quantized_linear, sub_layers
from engine.models.files import model_directory
from engine.sampling import noise
from engine.sampling.noise import Draws

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "PACELINE_CACHE_DIR"
MAX_BYTES = 2 * 2**30
"""Larger models are bound by memory bandwidth, and compiling needs a second copy of their weights."""
_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,
    # Otherwise small constants would be compiled in, but they are weights too.
    "always_keep_tensor_constants": True,
    # Rotary sines are computed once, not in every layer and head.
    "realize_opcount_threshold": 5,
    # The code between matrix products is too small for several threads.
    "cpp.threads": 1,
    "aot_inductor.custom_ops_to_c_shims": kernels.shims(
        [half_weights.SCHEMA, paged_attention.SCHEMA, quantized_weights.SCHEMA]
    ),
}


def package_path(step: Step, config: Any) -> Path:
    """Return the path of a model's package in the cache."""
    settings = {key: value for key, value in config.to_dict().items() if key != "_name_or_path"}
    attending = (attention, dot_product, paged_attention, traced)
    execution = (*attending, compiled, half_weights, kernels, noise, quantized_weights)
    parts = (
        json.dumps(settings, sort_keys=True, default=str),
        [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in step.tensors.items()],
        _digest(*execution, causal_lm, fusion, quantized_linear, sub_layers),
    )
    return _cached(parts)


def noise_path() -> Path:
    """Return the path of the compiled noise in the cache."""
    return _cached(_digest(noise, compiled))


def kernels_path() -> Path:
    """Return the path of the C++ library in the cache."""
    return _cached([*_digest(kernels), *(source.read_text() for source in kernels.SOURCES)]).with_suffix(".so")


def _digest(*modules: ModuleType) -> list[str]:
    sources = (Path(module.__file__ or "").read_bytes() for module in (*modules, sys.modules[__name__]))
    return [hashlib.sha256(source).hexdigest() for source in sources]


def _cached(parts: object) -> Path:
    """Return the path of what depends on `parts`, on library versions and on this machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")] if cpuinfo.exists() else []
    machine = (torch.__version__, transformers.__version__, torch.backends.cpu.get_cpu_capability(), flags[:1])
    root = os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "paceline"
    return Path(root).expanduser() / f"{hashlib.sha256(repr((parts, machine)).encode()).hexdigest()[:24]}.pt2"


def compile_step(step: Step, batch: ForwardBatch, draws: Draws, path: Path) -> None:
    """Compile a model's pass to a package.

    Args:
        batch, draws: an example whose numbers of rows, tokens, places, logits and keys all differ, and are not 1.

    Raises:
        CompileError: the pass cannot be compiled for batches of every shape.
    """
    tensors, keys, values = arguments(batch, draws)
    size = torch.export.Dim.AUTO
    one, two, three = (dict.fromkeys(range(count), size) for count in (1, 2, 3))
    any_kv = [two for _ in keys]
    shapes = (one, two, two, two, three, two, one, one, one, one, any_kv, any_kv)
    _compile(step.eval(), (*tensors, keys, values), shapes, path)


def compile_noise(path: Path) -> None:
    """Compile `noise.gumbel`, which takes as long as a small draft's pass if it is not compiled.

    Raises:
        CompileError: the noise cannot be compiled.
    """
    keys = noise.keys([1, 2, 3], [4, 5, 6], noise.TARGET_STREAM, torch.device("cpu"))
    any_size = {0: torch.export.Dim.AUTO}
    _compile(GumbelNoise(), (keys, torch.arange(50, dtype=torch.int32)), (any_size, any_size), path)


def compile_kernels(path: Path) -> None:
    """Build the C++ library.

    Raises:
        CompileError: the library cannot be built.
    """
    with _as_compile_errors():
        kernels.build(path)


def load_kernels() -> None:
    """Load the C++ library; building it first takes ten seconds if it is not in the cache.

    Raises:
        CompileError: the library cannot be built.
        OSError: the library cannot be loaded.
    """
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


class Compiling:
    """A background process that compiles a model, and a thread that waits for it.

    The process reads a pipe whose other end only this process has, so it ends when this process ends, even if that is
    killed. Otherwise every worker that is replaced would leave one more model in memory behind.
    """

    def __init__(
        self, config: ModelConfig, dtype: str, ready: Callable[[], None], skipped: Collection[str] = ()
    ) -> None:
        """Start the process; a thread calls `ready` when it has succeeded, or logs its failure.

        Args:
            skipped: sub-layers that the compiled model is without.
        """
        # Absolute, because the process runs in another folder.
        directory = str(model_directory(config).resolve())
        self._ready = ready
        reading, self._held_open = os.pipe()
        options = ["--dtype", dtype, "--quantization", config.quantization, "--until-input-ends"]
        options += ["--skip", *sorted(skipped)] if skipped else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "engine.execution.cpu", directory, *options],
            cwd=Path(__file__).parents[3],
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(reading)
        os.setpriority(os.PRIO_PROCESS, self._process.pid, 10)
        threading.Thread(target=self._wait, daemon=True, name="compiling").start()

    def _wait(self) -> None:
        started = time.monotonic()
        _, errors = self._process.communicate()
        os.close(self._held_open)
        if self._process.returncode:
            reason = (errors.strip().splitlines() or [f"exit status {self._process.returncode}"])[-1]
            logger.warning("Serving eagerly, compiling failed: %s", reason)
            return
        logger.info("Compiled in %.0f s", time.monotonic() - started)
        self._ready()


def has_compiler() -> bool:
    """Return whether this machine has a C++ compiler."""
    try:
        return bool(torch._inductor.cpp_builder.get_cpp_compiler())
    except torch._inductor.exc.InvalidCxxCompiler:
        return False


def compile_once(path: Path, compile_to: Callable[[Path], None]) -> None:
    """Compile to `path` unless it exists; of several processes, one compiles and the others wait.

    Raises:
        CompileError: compiling failed.
    """
    if path.exists():  # files appear complete; no lock, because the folder may be read-only
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            compile_to(path)
