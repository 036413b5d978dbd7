"""Compiles the kernels for GPUs without one, and prints their shared memory and their instructions' lengths, as JSON.

`python -m tests.engine.execution.cuda.kernels.cubins`; `test_cubins.py` judges what it prints.
"""

import itertools
import json
import re

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.execution.cuda.kernels import cache_write, draw_kernel, grouped_product, product
from engine.execution.cuda.kernels import triton_attention as attention
from engine.models.layers.layer_attention import AttentionParams

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""The most that one block may use, by compute capability: A100, L40S, H100, B200, RTX 5090."""
OUTPUTS = (2048, 3072, 6144, 128_256)
"""Outputs of weights, for tiles of 16, 32, 64 and 128."""
HEADS = [(32, 8, 64), (71, 1, 64), (32, 8, 128), (16, 2, 128), (24, 8, 192), (8, 1, 256), (16, 16, 256)]
"""Query heads, key/value heads and their size: every size that keys are padded to, with few and many query heads."""
FORMATS = {"": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
_TYPES = {torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*u8"}


def compiled(cc, kernel, types, constants, **options):
    """Return the shared bytes of a kernel, and the K of its products' instructions."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    # As the launcher would find them: pointers and sizes are divisible by 16, counts are not.
    aligned = [i for i, name in enumerate(names) if signature[name][0] == "*" or name in ("num_outputs", "size")]
    aligned += [i for i, name in enumerate(names) if name.endswith("stride") and name != "blocks_stride"]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "constexpr"},
    )
    binary = compile_kernel(source, target=GPUTarget("cuda", cc, 32), options={"enable_fp_fusion": False} | options)
    text = binary.asm["ptx"]
    inner = {int(k) for k in re.findall(r"mma(?:_async)?\.sync\.aligned\.m\d+n\d+k(\d+)", text)}
    if "tcgen05.mma" in text:
        inner.add(16 if "kind::f16" in text else -1)
    return {"shared": binary.metadata.shared, "k": sorted(inner)}


def products(cc):
    """Return the products of few and many rows by weights of each format, with one scale and in groups."""
    for outputs, (name, dtype), count, num_groups in itertools.product(
        OUTPUTS, FORMATS.items(), (16, 64, 128), (1, 32)
    ):
        if not name and num_groups > 1:
            continue
        has_zeros = name == "int4" and num_groups > 1
        constants = product.product_constants(count, outputs, 4096, dtype, num_groups if name else 0, has_zeros)
        types = dict.fromkeys(("rows", "scales", "bias", "output"), "*bf16") | {"weight": _TYPES[dtype], "zeros": "*i8"}
        warps = product.num_warps(constants)
        stages = product.num_stages(constants, 2, SHARED_BYTES[cc])
        constants |= {"HAS_BIAS": False} | ({} if has_zeros else {"zeros": None})
        key = f"product of {count} rows, {outputs} outputs, {name or 'bf16'} in {num_groups} groups"
        yield key, compiled(cc, product._multiply_kernel, types, constants, num_stages=stages, num_warps=warps)


def attentions(cc):
    """Return the kernels that attend to parts of contexts, merge them, and write to caches."""
    forms = [("bf16", False), ("bf16", True)] + [("fp32", False)] * (cc == min(SHARED_BYTES, key=SHARED_BYTES.get))
    for heads, length, (dtype, is_fp8) in itertools.product(HEADS, (5, 512), forms):
        sizes = (*heads, heads[2], 16, length, 0)
        item_bytes = 4 if dtype == "fp32" else 2
        constants, merged = attention.attention_constants(*sizes, AttentionParams(), item_bytes, is_fp8=is_fp8)
        types = dict.fromkeys(("blocks", "limits", "positions", "extra"), "*i32") | {"scale": "fp32", "cap": "fp32"}
        types |= dict.fromkeys(("query", "output", "sinks", "key", "value"), f"*{dtype}") | {"slots": "*i32"}
        types |= dict.fromkeys(("keys", "values"), "*u8" if is_fp8 else f"*{dtype}")
        types |= {"partials": "*fp32", "stats": "*fp32"}
        written = ("KV_HEADS", "KEY_DIM", "KEY_PAD", "IS_FP8", "VALUE_DIM", "VALUE_PAD")
        written = {"HEADS_PAD": heads[1]} | {name: constants[name] for name in written}
        key = f"{heads} {dtype}{' to fp8' * is_fp8}, {length} tokens"
        warps = attention.num_warps(constants)
        attend = compiled(cc, attention._attend_kernel, types, constants, num_stages=2, num_warps=warps)
        yield f"attention {key}", attend
        if length == 5:
            yield f"merge {key}", compiled(cc, attention._merge_kernel, types, merged)
            yield f"write {key}", compiled(cc, cache_write._write_kernel, types, written)


def others(cc):
    """Return the kernels that draw, and that multiply by experts' weights."""
    drawn = dict.fromkeys(("logits", "temperatures", "best"), "*fp32") | {"tokens": "*i64"}
    drawn |= dict.fromkeys(("keys", "is_drawn", "ids", "token_ids"), "*i32") | {"output": "*fp32"}
    yield "draw of a tile", compiled(cc, draw_kernel._tile_kernel, drawn, {"TILE": 1024})
    yield "draw of a row", compiled(cc, draw_kernel._best_kernel, drawn, {"TILES": 128}, enable_fp_fusion=True)
    yield "noise", compiled(cc, draw_kernel._gumbel_kernel, drawn, {"TILE": 1024})
    for rows_tile, is_packed in itertools.product((16, 64), (False, True)):
        types = dict.fromkeys(("rows", "bias", "output"), "*bf16") | {"order": "*i64", "ends": "*i64"}
        types |= dict.fromkeys(("weight", "scales"), "*u8" if is_packed else "*bf16")
        constants = {"EXPERTS_PAD": 128, "ROWS_TILE": rows_tile, "OUT_TILE": grouped_product._OUT_TILE}
        constants |= {"INNER_TILE": 128 if is_packed else 64, "IS_PACKED": is_packed, "HAS_BIAS": False}
        key = f"product of experts {'mxfp4' if is_packed else 'bf16'} {rows_tile}"
        yield key, compiled(cc, grouped_product._grouped_kernel, types, constants, num_stages=4)


if __name__ == "__main__":
    print(json.dumps({cc: dict([*products(cc), *attentions(cc), *others(cc)]) for cc in SHARED_BYTES}))  # noqa: T201
