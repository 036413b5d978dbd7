"""Compiles the kernels for GPUs without one, and prints what they take of a multiprocessor, as JSON.

`python -m tests.engine.execution.cuda.kernels.cubins [--all]`; with --all, `test_cubins.py` compares the output with
`cubins.json`, which is written by redirecting the output there.
"""

import argparse
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

from engine.execution.cuda.kernels import product
from engine.execution.cuda.kernels import triton_attention as attention
from engine.models.layers.layer_attention import AttentionParams

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""The most that one block may use, by compute capability: A100, H100, B200."""
PRODUCTS = {
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "70B on a rank of 4": [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168), (32064, 8192)],
    "1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)],
}
"""Outputs and inputs of the weights of Llama 3.1 and 3.2."""
HEADS = {"8B": (32, 8, 128), "70B on a rank of 4": (16, 2, 128), "1B": (32, 8, 64)}
"""Query heads, key/value heads and their size."""
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


def product_of(cc, count, shape, name, num_splits):
    """Compile the product of a number of rows; shapes with the same tiles have the same kernel."""
    num_groups = 0 if not name else shape[1] // 32 if name == "int4" else 1
    constants = product.product_constants(count, *shape, FORMATS[name], num_groups, num_splits)
    options = {
        "num_stages": product.num_stages(constants, 2, SHARED_BYTES[cc]),
        "num_warps": product.num_warps(constants),
    }
    types = dict.fromkeys(("rows", "scales", "bias"), "*bf16") | {"weight": _TYPES[FORMATS[name]]}
    types["output"] = "*fp32" if num_splits > 1 else "*bf16"
    tile = f"{constants['ROWS_TILE']} x {constants['OUT_TILE']}"
    key = f"product {name or 'bf16'}{' in parts' * (num_splits > 1)} {tile}"
    return key, (product._multiply_kernel, types, constants | {"HAS_BIAS": False, "zeros": None}, cc), options


def attention_of(cc, heads, length, *, is_fp8=False):
    """Compile the kernels that attend to the chunks of rows of a length, and merge them."""
    sizes = (*heads, heads[2], 16, length, 0)
    constants, merged = attention.attention_constants(*sizes, AttentionParams(), is_fp8=is_fp8)
    types = dict.fromkeys(("blocks", "limits", "positions", "extra"), "*i64") | {"scale": "fp32", "cap": "fp32"}
    types |= dict.fromkeys(("query", "output", "sinks", "key", "value"), "*bf16") | {"slots": "*i64"}
    types |= dict.fromkeys(("keys", "values"), "*u8" if is_fp8 else "*bf16") | {"partials": "*fp32", "stats": "*fp32"}
    written = {"HEADS_PAD": heads[1]} | {name: constants[name] for name in ("KV_HEADS", "KEY_DIM", "KEY_PAD", "IS_FP8")}
    written |= {name: constants[name] for name in ("VALUE_DIM", "VALUE_PAD")}
    yield (
        "attention",
        compiled(
            attention._attend_kernel, types, constants, cc, num_stages=2, num_warps=attention.num_warps(constants)
        ),
    )
    yield "merge", compiled(attention._merge_kernel, types, merged, cc)
    yield "write", compiled(attention._write_kernel, types, written, cc)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every GPU and shape; otherwise a few of an H100")
    is_whole = parser.parse_args().all
    table = {}
    for cc in SHARED_BYTES if is_whole else (90,):
        for model, shapes in PRODUCTS.items() if is_whole else [("8B", PRODUCTS["8B"][2:3])]:
            for shape, name, count in itertools.product(shapes, FORMATS, (16, 64, 128)):
                for num_splits in {1, product.splits_of(*shape)} if model == "1B" and count < 128 else {1}:
                    key, arguments, options = product_of(cc, count, shape, name, num_splits)
                    if f"sm_{cc} {key}" not in table:
                        table[f"sm_{cc} {key}"] = compiled(*arguments, **options)
        for model, heads in HEADS.items() if is_whole else [("8B", HEADS["8B"])]:
            for length, is_fp8 in itertools.product((1, 5, 512), (False, True)):
                for kernel, numbers in attention_of(cc, heads, length, is_fp8=is_fp8):
                    table[f"sm_{cc} {kernel} {model} {'fp8' if is_fp8 else 'bf16'} length {length}"] = numbers
    sys.stdout.write(
        "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()) + "\n}\n"
    )


if __name__ == "__main__":
    main()
