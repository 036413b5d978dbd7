"""Compiles the kernels for GPUs without one, and prints what they take of a multiprocessor, as JSON.

`python -m tests.engine.execution.cuda.kernels.cubins`; `test_cubins.py` compares the output with `cubins.json`, and
redirecting it there writes that file anew.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.execution.cuda.kernels import cache_write, draw_kernel, grouped_product, product
from engine.execution.cuda.kernels import triton_attention as attention
from engine.models.layers.layer_attention import AttentionParams

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""The most that one block may use, by compute capability: A100, L40S, H100, B200, RTX 5090."""
PRODUCTS = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "70B on a rank of 4": [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168), (32064, 8192)],
    "1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
}
"""Outputs and inputs of the weights of Llama 3.1 and 3.2."""
HEADS = {"8B": (32, 8, 128), "70B on a rank of 4": (16, 2, 128), "1B": (32, 8, 64)}
"""Query heads, key/value heads and their size."""
SIZES = [
    (32, 32, 42),
    (71, 1, 64),
    (32, 32, 80),
    (32, 32, 96),
    (28, 4, 128),
    (32, 32, 144),
    (24, 8, 192),
    (8, 1, 256),
    (16, 16, 256),
]
"""Those of other families: every size that keys are padded to, with one and with many query heads for each."""
FORMATS = {"": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}
_TYPES = {torch.bfloat16: "*bf16", torch.int8: "*i8", torch.uint8: "*u8", torch.float8_e4m3fn: "*u8"}
_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compiled(kernel, types, constants, cc, **options):
    """Return the registers, the local and shared bytes, and the K of the products' instructions of a kernel."""
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
    binary = triton.compile(source, target=GPUTarget("cuda", cc, 32), options={"enable_fp_fusion": False} | options)
    with tempfile.NamedTemporaryFile() as cubin:
        cubin.write(binary.asm["cubin"])
        cubin.flush()
        command = [_BINARIES / "cuobjdump", "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    text = binary.asm["ptx"]
    inner = sorted({int(k) for k in re.findall(r"mma(?:_async)?\.sync\.aligned\.m\d+n\d+k(\d+)", text)})
    if "tcgen05.mma" in text:
        inner = sorted({*inner, 16} if "kind::f16" in text else {*inner, -1})
    return {"registers": registers, "local": stack, "shared": binary.metadata.shared, "k": inner}


def product_of(cc, count, shape, name):
    """Compile the product of a number of rows; shapes with the same tiles have the same kernel."""
    num_groups = 0 if not name else shape[1] // 32 if name == "int4" else 1
    constants = product.product_constants(count, *shape, FORMATS[name], num_groups)
    options = {
        "num_stages": product.num_stages(constants, 2, SHARED_BYTES[cc]),
        "num_warps": product.num_warps(constants),
    }
    types = dict.fromkeys(("rows", "scales", "bias", "output"), "*bf16") | {"weight": _TYPES[FORMATS[name]]}
    tile = f"{constants['ROWS_TILE']} x {constants['OUT_TILE']}"
    key = f"product {name or 'bf16'} {tile}"
    return key, (product._multiply_kernel, types, constants | {"HAS_BIAS": False, "zeros": None}, cc), options


def attention_of(cc, heads, length, dtype="bf16", *, is_fp8=False):
    """Compile the kernels that attend to the parts of contexts of rows of a length, merge them, and write."""
    sizes = (*heads, heads[2], 16, length, 0)
    item_bytes = 4 if dtype == "fp32" else 2
    constants, merged = attention.attention_constants(*sizes, AttentionParams(), item_bytes, is_fp8=is_fp8)
    types = dict.fromkeys(("blocks", "limits", "positions", "extra"), "*i32") | {"scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("query", "output", "sinks", "key", "value"), f"*{dtype}") | {"slots": "*i32"}
    types |= dict.fromkeys(("keys", "values"), "*u8" if is_fp8 else f"*{dtype}")
    types |= {"partials": "*fp32", "stats": "*fp32"}
    written = {"HEADS_PAD": heads[1]} | {name: constants[name] for name in ("KV_HEADS", "KEY_DIM", "KEY_PAD", "IS_FP8")}
    written |= {name: constants[name] for name in ("VALUE_DIM", "VALUE_PAD")}
    yield (
        "attention",
        compiled(
            attention._attend_kernel, types, constants, cc, num_stages=2, num_warps=attention.num_warps(constants)
        ),
    )
    yield "merge", compiled(attention._merge_kernel, types, merged, cc)
    yield "write", compiled(cache_write._write_kernel, types, written, cc)


def others_of(cc):
    """Compile the kernels that draw, that multiply by experts' weights, and that multiply by weights in groups."""
    drawn = dict.fromkeys(("logits", "temperatures", "best", "scores"), "*fp32") | {"tokens": "*i64"}
    drawn |= dict.fromkeys(("keys", "is_drawn", "ids", "token_ids"), "*i32") | {"output": "*fp32"}
    yield "draw of a tile", (draw_kernel._tile_kernel, drawn, {"TILE": 1024}, cc), {}
    yield "draw of a row", (draw_kernel._best_kernel, drawn, {"TILES": 128}, cc), {"enable_fp_fusion": True}
    yield "noise", (draw_kernel._gumbel_kernel, drawn, {"TILE": 1024}, cc), {}
    for rows_tile, is_packed in itertools.product((16, 64), (False, True)):
        types = dict.fromkeys(("rows", "bias", "output"), "*bf16") | {"order": "*i64", "ends": "*i64"}
        types |= {"weight": "*u8", "scales": "*u8"} if is_packed else {"weight": "*bf16", "scales": "*bf16"}
        constants = {"EXPERTS_PAD": 128, "ROWS_TILE": rows_tile, "OUT_TILE": grouped_product._OUT_TILE}
        constants |= {"INNER_TILE": 128 if is_packed else 64, "IS_PACKED": is_packed, "HAS_BIAS": False}
        key = f"product of experts {'mxfp4' if is_packed else 'bf16'} {rows_tile}"
        yield key, (grouped_product._grouped_kernel, types, constants, cc), {"num_stages": 4}
    for (name, group, has_zeros), count in itertools.product((("int4", 128, True), ("fp8", 128, False)), (16, 128)):
        shape = (4096, 4096)
        constants = product.product_constants(count, *shape, FORMATS[name], shape[1] // group, has_zeros)
        types = dict.fromkeys(("rows", "scales", "bias", "output"), "*bf16") | {"weight": "*u8", "zeros": "*i8"}
        options = {"num_stages": product.num_stages(constants, 2, SHARED_BYTES[cc])}
        options["num_warps"] = product.num_warps(constants)
        constants |= {"HAS_BIAS": False} | ({} if has_zeros else {"zeros": None})
        key = f"product {name} in groups{' with zeros' * has_zeros} {constants['ROWS_TILE']}"
        yield key, (product._multiply_kernel, types, constants, cc), options


def main():
    table = {}
    for cc in SHARED_BYTES:
        for shape, name, count in itertools.product(itertools.chain(*PRODUCTS.values()), FORMATS, (16, 64, 128)):
            key, arguments, options = product_of(cc, count, shape, name)
            if f"sm_{cc} {key}" not in table:
                table[f"sm_{cc} {key}"] = compiled(*arguments, **options)
        for (model, heads), length, is_fp8 in itertools.product(HEADS.items(), (1, 5, 512), (False, True)):
            for kernel, numbers in attention_of(cc, heads, length, is_fp8=is_fp8):
                table[f"sm_{cc} {kernel} {model} {'fp8' if is_fp8 else 'bf16'} length {length}"] = numbers
        for key, arguments, options in others_of(cc):
            table[f"sm_{cc} {key}"] = compiled(*arguments, **options)
        forms = [(5, "bf16"), (512, "bf16")] + [(512, "fp32")] * (cc == min(SHARED_BYTES, key=SHARED_BYTES.get))
        for heads, (length, dtype) in itertools.product(SIZES, forms):
            _, numbers = next(attention_of(cc, heads, length, dtype))
            table[f"sm_{cc} attention {heads[0]}/{heads[1]} x {heads[2]} {dtype} length {length}"] = numbers
    grouped = {}
    for key, numbers in table.items():
        gpu, kernel = key.split(" ", 1)
        grouped.setdefault(kernel, {})[gpu] = numbers
    lines = [f"{json.dumps(kernel)}: {json.dumps(of_gpus)}" for kernel, of_gpus in grouped.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
