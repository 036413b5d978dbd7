"""A CUDA device whose memory is the host's: tensors know their device, and kernels are interpreted.

Real numbers are computed, so rounds can be compared with the CPU's. Operators and kernels over tensors of two devices,
which only a GPU would show, are errors here. `waits` lists what makes the host wait for the device, in order.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from triton.runtime import interpreter

import engine

ENGINE = Path(engine.__file__).parent
DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
_SYNCHRONISING = {
    _aten._local_scalar_dense.default: "item",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
    _aten._unique2.default: "unique",
    _aten.equal.default: "equal",
}


class DeviceTensor(Tensor):
    """A tensor on the device; `host` holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        with torch.inference_mode(False):
            tensor: DeviceTensor = Tensor._make_wrapper_subclass(
                cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
                device="meta",  # to torch's C++ code, which would call CUDA otherwise
            )  # fmt: skip
        tensor.host = host
        return tensor

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host})"

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = DEVICE  # type: ignore[assignment]
    is_cuda, is_meta = True, False  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_gpu().index_on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_gpu().index_on_device(index), value)

    def tolist(self) -> Any:
        _gpu().wait("tolist")
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _gpu().__torch_dispatch__(func, types, args, kwargs)


class FakeGPU(TorchDispatchMode):
    """The device: computes operators on its tensors, and notes what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self._pinned: dict[int, Tensor] = {}  # kept, so that no other tensor gets the address

    def wait(self, kind: str) -> None:
        """Note that the host waits, and where."""
        files = [Path(frame.filename) for frame in traceback.extract_stack()]
        self.waits.append((kind, next((file.stem for file in reversed(files) if ENGINE in file.parents), "a test")))

    def read_waits(self) -> list[str]:
        """Return the waits until now, and forget them."""
        waits = [f"{kind} in {place}" for kind, place in self.waits]
        self.waits.clear()
        return waits

    def index_on_device(self, index: Any) -> Any:
        """Copy lists and tensors of the host to the device, as torch does."""
        if isinstance(index, tuple):
            return tuple(map(self.index_on_device, index))
        if not isinstance(index, (list, Tensor)) or _is_on_device(index):
            return index
        self.wait("blocking copy from host")
        return DeviceTensor(torch.as_tensor(index))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "paceline":
            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        flat, _ = tree_flatten((args, kwargs))
        is_on_device = any(map(_is_on_device, flat))
        goes_to_device = is_on_device
        if (device := kwargs.get("device")) is not None:
            goes_to_device = torch.device(device).type == "cuda"
            kwargs["device"] = torch.device("cpu")
        is_pinned = kwargs.pop("pin_memory", False)
        if func is _aten._pin_memory.default:
            func, args, is_pinned = _aten.clone.default, args[:1], True
        if func is _aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func is _aten._to_copy.default:
            self._copy(args[0], None, to_device=goes_to_device, non_blocking=kwargs.get("non_blocking", False))
        elif func is _aten.copy_.default:
            self._copy(args[1], args[0], to_device=_is_on_device(args[0]), non_blocking=args[2:] == (True,))
        elif is_on_device:
            self._check(func, args, flat)
        args, kwargs = _on_host((args, kwargs))
        results = func(*args, **kwargs)
        if is_pinned:
            self._pinned[results.untyped_storage().data_ptr()] = results
        return self._wrapped(results, flat) if goes_to_device else results

    def launch(self, kernel: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a kernel, all of whose tensors must be the device's."""
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        assert all(map(_is_on_device, tensors)), "a kernel was given a tensor of the host"
        args, kwargs = _on_host((args, kwargs))
        with _disable_current_modes():
            kernel(*args, **kwargs)

    def _copy(self, source: Tensor, target: Tensor | None, *, to_device: bool, non_blocking: bool) -> None:
        if _is_on_device(source) and not to_device:
            if not (non_blocking and (target is None or self._is_pinned(target))):  # torch pins what it makes for this
                self.wait("copy to host")
        elif to_device and not _is_on_device(source) and source.dim() and not non_blocking:
            self.wait("blocking copy from host")

    def _check(self, func: Any, args: Any, flat: list[Any]) -> None:
        if func in _SYNCHRONISING:
            self.wait(_SYNCHRONISING[func])
        is_index = func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_)
        if is_index and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
            self.wait("index by a mask")
        mixed = [x for x in flat if isinstance(x, Tensor) and not _is_on_device(x) and x.dim()]
        assert not mixed, f"{func} mixes devices"

    def _is_pinned(self, tensor: Tensor) -> bool:
        return not _is_on_device(tensor) and tensor.untyped_storage().data_ptr() in self._pinned

    def _wrapped(self, results: Any, given: list[Any]) -> Any:
        owners = {id(tensor.host): tensor for tensor in given if isinstance(tensor, DeviceTensor)}

        def wrap(result: Any) -> Any:
            if not isinstance(result, Tensor) or isinstance(result, DeviceTensor):
                return result
            return owners[id(result)] if id(result) in owners else DeviceTensor(result)

        return tree_map(wrap, results)


_gpus: list[FakeGPU] = []


def _gpu() -> FakeGPU:
    return _gpus[-1]


@contextlib.contextmanager
def fake_gpu(monkeypatch: Any) -> Iterator[FakeGPU]:
    """Be a process with one GPU."""
    gpu = FakeGPU()
    stream = SimpleNamespace(
        synchronize=lambda: gpu.wait("synchronize"), query=lambda: True, wait_stream=lambda _: None
    )
    execute, call_patched = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    modules: set[int] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Patch the language once a launch and module; the interpreter patches it in each call, half of its time."""
        if id(function.fn.__globals__) in modules:
            return function.rewrite()(*args, **kwargs)
        modules.add(id(function.fn.__globals__))
        return call_patched(function, *args, **kwargs)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        modules.clear()
        gpu.launch(lambda *a, **k: execute(executor, *a, **k), args, kwargs)

    properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132}
    driver = SimpleNamespace(utils=SimpleNamespace(get_device_properties=lambda _: properties))
    doubles = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "empty_cache": lambda: None,
        "synchronize": lambda *_: stream.synchronize(),
        "current_stream": lambda *_: stream,
        "Stream": lambda *_, **_options: stream,
        "Event": lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None),
        "stream": lambda _: contextlib.nullcontext(),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132, major=9, minor=0),
    }
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made.pin_memory() if pin_memory else made

    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", tensor)
        for name, double in doubles.items():
            patched.setattr(torch.cuda, name, double)
        patched.setattr(interpreter.GridExecutor, "__call__", launch)
        patched.setattr(interpreter.InterpretedFunction, "__call__", call)
        patched.setattr(type(triton.runtime.driver), "active", driver)
        torch._C._set_only_lift_cpu_tensors(True)
        _gpus.append(gpu)
        try:
            with gpu:
                yield gpu
        finally:
            _gpus.pop()
            torch._C._set_only_lift_cpu_tensors(False)


def move_to_gpu(module: nn.Module) -> None:
    """Put the parameters and buffers of a module on the device."""
    moved: dict[int, Any] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                new = moved.setdefault(id(parameter), nn.Parameter(DeviceTensor(parameter.detach()), False))
                child._parameters[name] = new
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else DeviceTensor(buffer)


def _is_on_device(tensor: Any) -> bool:
    return isinstance(tensor, DeviceTensor)


def _on_host(values: Any) -> Any:
    flat, spec = tree_flatten(values)
    return tree_unflatten([x.host if isinstance(x, DeviceTensor) else x for x in flat], spec)
