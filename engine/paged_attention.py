"""Paged attention of compiled passes: an operator for torch, and the C++ that computes it where passes run compiled.

torch's own attention wants a row's keys and values in one piece. In a small model's pass over a batch, gathering them
and attending to them took most of the time; the C++ beside this file reads them where they lie. It is built once, next
to the packages that call it.
"""

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")
_SYMBOL = "aoti_torch_cpu_paged_attention"
_HANDLES = ", ".join(f"AtenTensorHandle {name}" for name in ("query", "keys", "values", "blocks", "mask"))
_DECLARATION = f"AOTITorchError {_SYMBOL}({_HANDLES}, double scale, AtenTensorHandle* output)"
_LANES = 16
"""Numbers that a CPU's registers hold, at most: it works with whole ones."""
_loaded: set[Path] = set()


def suits(head_dim: int, dtype: torch.dtype) -> bool:
    """Return whether the operator computes such heads; it is written for one number format."""
    return dtype == torch.float32 and head_dim % _LANES == 0


def attend_to_blocks(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attend to keys and values in blocks.

    Args:
        query: [tokens, heads, head_dim], tokens of rows of the same length.
        keys, values: [num_blocks, block_size, kv_heads, head_dim].
        blocks: [rows, width] each row's blocks, in order.
        mask: [rows, 1, length, width * block_size], added to the products.
        scaling: what products are multiplied by; None is one over the root of head_dim.

    Returns:
        [tokens, heads, head_dim].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = torch.ops.paceline.paged_attention(query, keys, values, blocks, mask, scale)
    return output


def _gather_and_attend(
    query: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Compute the same with torch's own operators."""
    rows, _, length, _ = mask.shape
    mask = mask.repeat(1, 1, query.shape[1] // keys.shape[2], 1)
    return attend(rows, length, query.transpose(0, 1), keys[blocks], values[blocks], mask, scale)


def attend(
    rows: int, length: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention over gathered blocks.

    Args:
        query: [heads, rows * length, d].
        key, value: the rows' blocks one after the other, [..., kv_heads, d].
        mask: [rows, 1, copies * length, context].
    """
    heads, _, head_dim = query.shape
    kv_heads = key.shape[-2]
    copies = heads // kv_heads
    context = (rows, mask.shape[-1], kv_heads, head_dim)
    key, value = key.view(context).transpose(1, 2), value.view(context).transpose(1, 2)
    # The query heads of one kv head become more queries: grouped-query attention without copying keys.
    # [kv_heads, copies, rows, length, d] -> [rows, kv_heads, copies * length, d]
    query = query.view(kv_heads, copies, rows, length, head_dim).permute(2, 0, 1, 3, 4)
    query = query.reshape(rows, kv_heads, copies * length, head_dim)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    output = output.view(rows, kv_heads, copies, length, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(rows * length, heads, head_dim)


_library = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "paged_attention(Tensor query, Tensor keys, Tensor values, Tensor blocks, Tensor mask, float scale) -> Tensor"
)
_library.impl("paged_attention", _gather_and_attend, "CPU")  # type: ignore[no-untyped-call]
_library.impl("paged_attention", lambda query, *_: query.new_empty(query.shape), "Meta")  # type: ignore[no-untyped-call]


def shims() -> dict[Any, list[str]]:
    """Return what the compiler has to know to call the C++ in the operator's place."""
    return {torch.ops.paceline.paged_attention.default: [_DECLARATION]}


def build(path: Path) -> None:
    """Build the C++ to a library at `path`.

    Raises:
        torch._inductor.exc.CppCompileError: the compiler refuses it.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # torch's headers are not free of warnings.
    options = CppTorchOptions(vec_isa=pick_vec_isa(), warning_all=False, extra_flags=("-w",))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        builder = CppBuilder("library", [str(SOURCE)], options, output_dir=folder)
        builder.build()
        Path(builder.get_target_file_path()).replace(path)


def load(path: Path) -> None:
    """Let the packages that are loaded from now on find the C++.

    Raises:
        OSError: there is no such library.
    """
    if path not in _loaded:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        _loaded.add(path)
