"""Weights: reads safetensors files, or one rank's window of every tensor in them, onto a device.

Files are mapped, so only a window's pages are read, and processes on a node share them. A CPU uses a contiguous window
in the model's number format in place. For a GPU, threads copy blocks to two pinned buffers in turn, while the GPU reads
the other buffer: the host holds no second copy of a model.

Why not `preadv`: it read 3-5 GB/s from the page cache, copies of mapped pages 8-14 (two cores). Why not fastsafetensors
0.5 or runai-model-streamer 0.17: both read whole tensors, not columns.
"""

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from engine.errors import ModelError
from engine.models.files import damage_named
from engine.models.layers.quantization import QuantizedLinear
from engine.models.source import ModelSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES, _PIECE_BYTES = 2**25, 2**22
"""The size of a pinned buffer, and of the piece that one thread copies at a time."""
_MAX_THREADS = 8
_LOG_PERIOD_S = 5.0
_EXPERT = re.compile(r"\.experts\.(\d+)\.")

TEXT_PART = {r"^language_model\.(lm_head|model)\.": r"\1.", r"^model\.(?:language|text)_model\.": "model."}
"""Renames tensors of a multimodal model to their names in its text model; matches no names of other models."""

WindowOf = Callable[[str, Tensor], Tensor]
"""Returns the window that is needed of a whole tensor, given its name."""
Upload = Callable[[Tensor, Tensor], Callable[[], None]]
"""Starts to copy a pinned tensor to a tensor on the device; returns a function that waits for the copy."""


def fill(
    source: ModelSource,
    module: nn.Module,
    device: torch.device,
    names: "FileNames | None" = None,
    rank: int = 0,
    world_size: int = 1,
    full: Collection[str] = (),
) -> None:
    """Fill an empty model from files; raise ModelError for missing or misshapen weights.

    Args:
        names: where tensors of the files belong; None if they have the parameters' names.
        rank, world_size: the window to read where a parameter is smaller than the tensor in a file.
        full: parameters that are filled already.
    """
    if isinstance(module, PreTrainedModel):
        _restore_buffers(module, device)
    tensors = {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in full}
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    num_missing = {id(tensor): tensor.numel() for tensor in tensors.values()}
    named = [(key, names.parameter(key) if names else key) for key, _ in mapped_tensors(source)]
    places = {key: (name, names.part(key, tensors[name]) if names else tensors[name])
              for key, name in named if name in tensors}  # fmt: skip
    dtypes = {key: part.dtype for key, (_, part) in places.items()}
    stacks: dict[str, Tensor] = {}

    def find(key: str, whole: Tensor) -> Tensor:
        part = places[key][1]
        if (axis := getattr(part, "packed_axis", None)) is not None:  # a rank's window is in both halves
            part, whole = (torch.unflatten(tensor, axis, (2, -1)) for tensor in (part, whole))
        return whole[window_of(whole.shape, part.shape, rank, world_size)]

    for key, whole, window in read(source, dtypes, device, find, upload_to(device)):
        name, part = places[key]
        if (axis := getattr(part, "packed_axis", None)) is not None:
            window = window.flatten(axis, axis + 1)
        _check(source, key, whole, window, part)
        num_missing[id(tensors[name])] -= part.numel()
        if names is not None and part.numel() < tensors[name].numel():
            if name not in stacks:
                stacks[name] = torch.empty_like(tensors[name], device=device)
                assign(module, [name], stacks[name])
            names.part(key, stacks[name]).copy_(window)
        else:
            assign(module, tied[id(tensors[name])], window)
    _check_missing(source, tensors, num_missing)


class FileNames:
    """Where tensors of files belong in a module, by transformers' renamings; files store each expert separately."""

    def __init__(self, module: nn.Module, renamings: Sequence[WeightRenaming] = ()) -> None:
        inner = [WeightRenaming(pattern, name) for pattern, name in TEXT_PART.items()]
        changes = [*renamings, *inner, *get_model_conversion_mapping(module, add_legacy=False)]  # type: ignore[arg-type]
        self._renamings = [change for change in changes if isinstance(change, WeightRenaming)]
        self._converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._parameters = module.state_dict().keys()
        self._renamed = functools.cache(self._find)  # loading asks several times

    def parameter(self, name: str) -> str:
        """Return the parameter that a tensor belongs to."""
        return self._renamed(name)[0]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return a tensor's part of its parameter; empty if the tensor must be converted."""
        pattern = self._renamed(name)[1]
        converter = next((change for change in self._converters if pattern in change.source_patterns), None)
        if converter is None or pattern is None:
            return whole
        expert = _EXPERT.search(name)
        if expert is None or not {type(step) for step in converter.operations} <= {MergeModulelist, Concatenate}:
            return whole.new_empty(0)
        patterns = converter.source_patterns
        return whole[int(expert[1])].chunk(len(patterns))[patterns.index(pattern)]

    def _find(self, name: str) -> tuple[str, str | None]:
        renamed, pattern = rename_source_key(name, self._renamings, self._converters)
        is_own = name in self._parameters and renamed not in self._parameters
        return (name, None) if is_own else (renamed, pattern)


def read(
    source: ModelSource, dtypes: Mapping[str, torch.dtype], device: torch.device, find: WindowOf, upload: Upload | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, mapped whole and window on the device, usable at once, of each tensor that `dtypes` names."""
    mapped = [(name, whole) for name, whole in mapped_tensors(source) if name in dtypes]
    windows = [(name, whole, find(name, whole)) for name, whole in mapped]
    num_bytes, total = 0, sum(window.nbytes for _, _, window in windows)
    num_threads = min(_MAX_THREADS, (os.cpu_count() or 1) // torch.get_num_threads())
    logged = time.monotonic()
    with ThreadPoolExecutor(max(1, num_threads), "weights") as pool:
        copier = _Copier(pool, device, upload)
        for name, whole, window in windows:
            yield name, whole, copier.copy(window, dtypes[name])
            num_bytes += window.nbytes
            if time.monotonic() - logged >= _LOG_PERIOD_S:
                logged = time.monotonic()
                logger.info("%s: read %.1f of %.1f GB", source.path, num_bytes / 1e9, total / 1e9)
        for _, wait in copier.buffers:
            wait()


def has_names_of(source: ModelSource, module: nn.Module, names: FileNames) -> bool:
    """Return whether the files hold each weight once, in tensors that need no conversion.

    Raises ModelError for wrong shapes or too few numbers, before transformers would allocate the configured size.
    """
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    num_missing = {id(tensor): tensor.numel() for tensor in tensors.values()}
    num_stored, num_unnamed, is_converted = 0, 0, False
    for key, whole in mapped_tensors(source):
        num_stored += whole.numel()
        if (tensor := tensors.get(names.parameter(key))) is None:
            num_unnamed += whole.numel()
            continue
        if (part := names.part(key, tensor)).numel():
            _check(source, key, whole, whole, part)
        is_converted |= not part.numel()
        num_missing[id(tensor)] -= whole.numel()
    weights = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    if sum(num_missing[key] for key in set(map(id, weights.values()))) > (num_stored if is_converted else num_unnamed):
        _check_missing(source, weights, num_missing)
    return not is_converted and not any(num_missing.values())


def _check_missing(source: ModelSource, tensors: Mapping[str, Tensor], num_missing: Mapping[int, int]) -> None:
    if missing := sorted(name for name, tensor in tensors.items() if num_missing[id(tensor)] > 0):
        raise ModelError(f"{source.path} lacks the weights {', '.join(missing[:3])}; download it again")


def _check(source: ModelSource, key: str, whole: Tensor, window: Tensor, part: Tensor) -> None:
    if window.shape != part.shape or whole.is_floating_point() != part.is_floating_point():
        is_, should_be = (f"{[*x.shape]} of {'floats' if x.is_floating_point() else x.dtype}" for x in (whole, part))
        raise ModelError(f"{source.path}: {key} is {is_}, and its config.json gives {should_be}; download both again")


def window_of(whole: torch.Size, part: torch.Size, rank: int, world_size: int) -> tuple[slice, ...]:
    """Return slices for a rank's window of shape `part`; empty, for the whole tensor, if no window has that shape."""
    if len(whole) != len(part) or any(a not in (b, b * world_size) for a, b in zip(whole, part, strict=True)):
        return ()
    starts = [0 if size == all_ranks else rank * size for size, all_ranks in zip(part, whole, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, part, strict=True))


def mapped_tensors(source: ModelSource) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and the mapped tensors of all files; nothing is read yet."""
    for file in source.weight_files:
        with damage_named(file), safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                yield name, weights.get_tensor(name)


class _Copier:
    """Copies mapped windows onto a device; for a GPU through two buffers, each with the wait for its last copy."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device, upload: Upload | None) -> None:
        self._pool, self._device, self._upload = pool, device, upload
        size = 0 if upload is None else _BLOCK_BYTES
        buffers = torch.empty(2, size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.buffers: list[tuple[Tensor, Callable[[], None]]] = [(buffer, lambda: None) for buffer in buffers]

    def copy(self, window: Tensor, dtype: torch.dtype) -> Tensor:
        if self._upload is None and window.is_contiguous() and window.dtype == dtype:
            return window
        target = torch.empty(window.shape, dtype=dtype, device=self._device)
        if self._upload is None:
            self._copy(window, target)
            return target
        for block, rows in _split(window, target, _BLOCK_BYTES):
            buffer, wait = self.buffers.pop(0)
            wait()
            pinned = buffer[: block.nbytes].view(block.dtype).view(block.shape)
            self._copy(block, pinned)
            self.buffers.append((buffer, self._upload(pinned, rows)))
        return target

    def _copy(self, window: Tensor, target: Tensor) -> None:
        list(self._pool.map(lambda pair: pair[1].copy_(pair[0]), _split(window, target, _PIECE_BYTES)))


def _split(window: Tensor, target: Tensor, num_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield matching pieces of both tensors, each of at most `num_bytes` of the first."""
    if window.nbytes <= num_bytes:
        yield window, target
    elif len(window) == 1:
        yield from _split(window[0], target[0], num_bytes)
    else:
        rows = max(1, len(window) * num_bytes // window.nbytes)
        for part in zip(torch.split(window, rows), torch.split(target, rows), strict=True):
            yield from _split(*part, num_bytes)


def upload_to(device: torch.device) -> Upload | None:
    """Return how tensors are copied to a device; None for a CPU, which uses them in place."""
    return None if device.type in ("cpu", "meta") else _upload


def _upload(pinned: Tensor, target: Tensor) -> Callable[[], None]:
    target.copy_(pinned.to(target.device, non_blocking=True))
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(target.device))
    return event.synchronize


def assign(module: nn.Module, names: list[str], tensor: Tensor) -> None:
    """Give a module's parameters or buffers one tensor."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        path, _, attribute = name.rpartition(".")
        parent = module.get_submodule(path)
        setattr(parent, attribute, parameter if attribute in parent._parameters else tensor)


def _restore_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Let transformers recompute buffers that are in no file, such as rotary frequencies."""
    for child in module.modules():
        if isinstance(child, QuantizedLinear):
            continue
        for name in child._non_persistent_buffers_set:
            setattr(child, name, torch.empty_like(child.get_buffer(name), device=device))
        if child._non_persistent_buffers_set:
            module.base_model._init_weights(child)  # type: ignore[operator]
    module.base_model._init_weights(module.base_model)  # type: ignore[operator] # some models: layers' buffers
