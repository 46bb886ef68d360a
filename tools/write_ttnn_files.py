"""Write the TTNN binaries of tests/formats/ttnn that are made by tt-mlir's own schema.

Each is JSON of ours, turned into bytes by flatc, from the schema as it stood at a commit of
github.com/tenstorrent/tt-mlir. It takes a checkout of that, and the flatc that it pins (for the
schema's hash, which files carry):

    python tools/write_ttnn_files.py CHECKOUT --flatc=FLATC --reflection=FOLDER
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
FOLDER = TOOLS.parent / "tests" / "formats" / "ttnn"
HISTORY = TOOLS / "generate_ttnn_history"
SCHEMA = "include/ttmlir/Target"

N150 = {
    "arch": "Wormhole_b0", "grid_size": {"y": 8, "x": 8}, "l1_size": 1499136,
    "num_dram_channels": 12, "dram_channel_size": 1073741824, "noc_l1_address_align_bytes": 16,
    "pcie_address_align_bytes": 32, "noc_dram_address_align_bytes": 32,
    "l1_unreserved_base": 103840, "erisc_l1_unreserved_base": 103840,
    "dram_unreserved_base": 2968640, "dram_unreserved_end": 1073118784,
}  # fmt: skip
SYSTEM = {"chip_descs": [N150], "chip_desc_indices": [0]}


class Tensors:
    """References to tensors, numbered as they are made."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.count = 0

    def __call__(self, shape: list[int], *words: Any, **more: Any) -> dict[str, Any]:
        self.count += 1
        desc = {"shape": shape, "layout": self.memory(*words), **more}
        return {"global_id": self.count, "desc": desc}


def old_memory(
    data_type: str, space: str, layout: str, held: list[int], cores: list[list[int]],
    tiled: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Until 0.0.795: a memref and ranges of cores (row, column, rows, columns)."""
    side = 32 if tiled else 1
    return {
        "core_range_set": [_range(one) for one in cores],
        "memory_desc": {
            "shape": held, "tile_shape": {"y": side, "x": side}, "data_type": data_type,
            "memory_space": space, "memory_layout": layout,
        },
    }  # fmt: skip


def _range(one: list[int]) -> dict[str, Any]:
    row, column, rows, columns = one
    return {"loc": {"y": row, "x": column}, "size": {"y": rows, "x": columns}}


def spec_of_2025(shape: list[int], cores: list[list[int]]) -> dict[str, Any]:
    """From 0.0.796 to 0.0.1324."""
    return {"grid": [_range(one) for one in cores], "shard_shape": shape}


def spec(
    shape: list[int], cores: list[list[int]], orientation: str = "RowMajor", **more: Any
) -> dict[str, Any]:
    """Since 0.0.1325: ranges by their ends (first row, first column, last row, last column)."""
    ranges = [
        {"start_coord": {"x": c, "y": r}, "end_coord": {"x": d, "y": s}} for r, c, s, d in cores
    ]
    return {
        "core_range_set": {"core_ranges": ranges}, "shape": shape, "orientation": orientation,
        **more,
    }  # fmt: skip


def memory(
    data_type: str, space: str = "", layout: str = "Interleaved", shards: Any = None,
    tile: int = 32, nd: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Since 0.0.796: without a space, on the host, where rows lie as they are."""
    side = tile if space else 1
    desc: dict[str, Any] = {
        "storage_type": "Device" if space else 0,
        "tile_shape": {"y": side, "x": side}, "data_type": data_type,
    }  # fmt: skip
    if space:
        desc["memory_config"] = {"tensor_memory_layout": layout, "buffer_type": space}
        if shards is not None:
            desc["memory_config"]["shard_spec"] = shards
        if nd is not None:
            desc["memory_config"]["nd_shard_spec"] = nd
    return {"memory_desc": desc}


def operation(kind: str, place: str, **fields: Any) -> dict[str, Any]:
    """An operation of some type."""
    name = f"ttnn.{kind.lower()}"
    return {
        "type_type": kind, "type": fields, "loc_info": f'loc("{place}")',
        "debug_info": f'%0 = "{name}"(%arg0) : () -> () loc("{place}")',
    }  # fmt: skip


def layer() -> dict[str, Any]:
    """A layer whose result is what it takes: 320x128 in ten shards of L1; weights in bfp8."""
    tensor = Tensors(memory)
    rows = spec([32, 128], [[0, 0, 0, 7], [1, 0, 1, 1]])
    x = tensor([320, 128], "BFloat16", "L1", "HeightSharded", rows)
    w = tensor([128, 128], "BFP_BFloat8", "DRAM")
    ready = tensor([128, 128], "BFP_BFloat8", "DRAM")
    product = tensor([320, 128], "BFloat16", "L1", "HeightSharded", rows)
    result = tensor([320, 128], "BFloat16", "L1", "HeightSharded", rows)
    prepared = tensor([128, 128], "BFP_BFloat8", "DRAM")
    main = {
        "name": "layer", "inputs": [x, w], "outputs": [result], "mesh_shape": {"y": 1, "x": 1},
        "operations": [
            operation("GetDeviceOp", "layer.py:1:1"),
            operation("LoadCachedOp", "layer.py:2:1", inputs=[w], outputs=[ready],
                      callee_name="layer_const_eval_0"),
            operation("MatmulOp", "layer.py:3:1", a=x, b=ready, out=product),
            operation("DeallocateOp", "layer.py:3:2", **{"in": ready}),
            operation("EltwiseUnaryOp", "layer.py:4:1", type="Relu", **{"in": product},
                      out=result),
            operation("DeallocateOp", "layer.py:4:2", **{"in": product}),
        ],
    }  # fmt: skip
    inner = {
        "name": "layer_const_eval_0", "inputs": [w], "outputs": [prepared], "private": True,
        "operations": [operation("ToLayoutOp", "layer.py:2:1", **{"in": w}, out=prepared)],
    }  # fmt: skip
    # What others call comes first here, to be shown last.
    return {"programs": [inner, main]}


def head() -> dict[str, Any]:
    """Takes 320x128 in block shards, along columns; one of its tensors is over a mesh."""
    tensor = Tensors(memory)
    blocks = spec([64, 64], [[0, 0, 4, 1]])
    columns = spec([32, 128], [[0, 0, 7, 0], [0, 1, 1, 1]], "ColMajor")
    x = tensor([320, 128], "BFloat16", "L1", "BlockSharded", blocks)
    cache = tensor([320, 128], "Float32", "DRAM")
    turned = tensor([320, 128], "BFloat16", "L1", "HeightSharded", columns)
    result = tensor([320, 128], "Float32")
    return {"programs": [{
        "name": "head", "inputs": [x, cache], "outputs": [result, cache],
        "operations": [
            operation("ToMemoryConfigOp", "head.py:1:1", in0=x, out=turned),
            operation("UpdateCacheOp", "head.py:2:1", cache=cache, input=turned),
            operation("FromDeviceOp", "head.py:3:1", **{"in": turned}, out=result),
        ],
    }]}  # fmt: skip


def strangers() -> dict[str, Any]:
    """What has no counterpart here, each once."""
    tensor = Tensors(memory)
    nd = {**spec([1, 32, 32], [[0, 0, 0, 3]]), "distribution_strategy": "RoundRobin1D"}
    apart = spec([32, 64], [[0, 0, 0, 1], [3, 3, 3, 4]])
    corner = spec([32, 64], [[2, 1, 5, 1]])
    odd = spec([48, 64], [[0, 0, 7, 7]])
    a = tensor([4, 32, 32], "BFloat16", "L1", "NDSharded", None, 32, nd)
    b = tensor([128, 64], "BFloat16", "DRAM", mesh_shape=[1, 2])
    c = tensor([128, 64], "BFP_Float8", "L1", "HeightSharded", apart)
    d = tensor([128, 64], "BFloat16", "L1", "HeightSharded", corner)
    e = tensor([96, 64], "BFloat16", "L1Small")
    f = tensor([96, 64], "BFloat16", "L1", "HeightSharded", odd)
    g = tensor([64, 64], "BFloat16", "DRAM", "Interleaved", None, 16)
    inputs = [a, b, c, d, e, f, g]
    out = tensor([4, 32, 32], "BFloat16", "DRAM")
    return {"programs": [
        {"name": "strangers", "inputs": inputs, "outputs": [out, a],
         "mesh_shape": {"y": 1, "x": 2},
         "operations": [operation("GenericOp", "s.py:1:1", io_tensors=[*inputs, out])]},
        {"name": "silent", "inputs": [b], "outputs": [],
         "operations": [operation("DeallocateOp", "s.py:2:1", **{"in": b})]},
    ]}  # fmt: skip


def memrefs_of_2024() -> dict[str, Any]:
    """Memrefs in L1, whose bytes tt-mlir counted itself."""
    tensor = Tensors(old_memory)
    x = tensor([256, 64], "BFloat16", "DeviceL1", "HeightSharded", [1, 2], [[0, 0, 1, 8]])
    y = tensor([256, 64], "BFloat16", "DeviceL1", "BlockSharded", [2, 1], [[0, 0, 4, 2]])
    z = tensor([256, 64], "BFloat16", "System", "None", [256, 64], [[0, 0, 1, 1]], False)
    for reference, nbytes in ((x, 4096), (y, 4096), (z, 32768)):
        reference["desc"]["layout"]["memory_desc"]["size"] = nbytes
    made = operation("EltwiseOp", "old.mlir:1:1", type="Relu", ins=[x], out=y)
    given = operation("FromDeviceOp", "old.mlir:2:1", **{"in": y}, out=z)
    for one in (made, given):
        del one["loc_info"]
    program = {"name": "old", "inputs": [x], "outputs": [z], "operations": [made, given]}
    return {"programs": [program]}


def early_2025() -> dict[str, Any]:
    """Shard specs by ranges of rows and columns."""
    tensor = Tensors(memory)
    shards = spec_of_2025([32, 64], [[0, 0, 1, 8]])
    x = tensor([256, 64], "BFloat16", "L1", "HeightSharded", shards)
    y = tensor([256, 64], "Float32", "DRAM")
    made = operation("ToMemoryConfigOp", "early.mlir:1:1", in0=x, out=y)
    program = {"name": "early", "inputs": [x], "outputs": [y], "operations": [made]}
    return {"programs": [program]}


def physical_shards() -> dict[str, Any]:
    """Shard specs with a logical shape of their own."""
    tensor = Tensors(memory)
    shards = spec([30, 64], [[0, 0, 0, 7]], physical_shard_shape=[32, 64])
    x = tensor([256, 64], "BFloat16", "L1", "HeightSharded", shards)
    y = tensor([256, 64], "BFloat16", "DRAM")
    made = operation("ToMemoryConfigOp", "mid.mlir:1:1", in0=x, out=y)
    program = {"name": "middle", "inputs": [x], "outputs": [y], "operations": [made]}
    return {"programs": [program]}


#: Each file: the version whose schema it is written by, and what is in it.
FILES: dict[str, tuple[int, Any]] = {
    "memrefs_249.ttnn": (249, memrefs_of_2024),
    "shards_800.ttnn": (800, early_2025),
    "shards_1330.ttnn": (1330, physical_shards),
    "layer_4013.ttnn": (4013, layer),
    "head_4013.ttnn": (4013, head),
    "strangers_4013.ttnn": (4013, strangers),
}


def packed(checkout: Path, commit: str, flatc: Path, body: dict[str, Any]) -> bytes:
    """JSON as bytes with a size prefix, by flatc alone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = ["git", "-C", str(checkout), "archive", commit, SCHEMA]
        tar = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", name], input=tar, check=True)
        schema = folder / SCHEMA / "TTNN" / "binary.fbs"
        include = ["-I", f"{folder}/include/", "-I", f"{folder / SCHEMA}/"]
        (folder / "body.json").write_text(json.dumps(body))
        made = [str(flatc), *include, "-b", "--size-prefixed", "-o", name, str(schema)]
        subprocess.run([*made, str(folder / "body.json")], check=True)
        return (folder / "body.ttnn").read_bytes()


def main() -> int:
    """Write every file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--flatc", type=Path, required=True)
    parser.add_argument("--reflection", type=Path, required=True)
    words = parser.parse_args()
    history: Any = SourceFileLoader("generate_ttnn_history", str(HISTORY)).load_module()
    order = ["git", "-C", str(words.checkout), "rev-list", "--first-parent", "--reverse",
             "v0.0..HEAD"]  # fmt: skip
    commits = subprocess.run(order, check=True, capture_output=True, text=True).stdout.split()
    for name, (number, make) in FILES.items():
        commit = commits[number - 1]
        facts, digest = history.read_schema(
            words.checkout, commit, words.flatc.resolve(), words.reflection.resolve()
        )
        rows = facts["tables"]["TTNNBinary"]
        body = {
            "version": {"major": 0, "minor": 0, "patch": number},
            "ttmlir_git_hash": commit, "system_desc": SYSTEM, **make(),
        }  # fmt: skip
        if any("schema_hash" in row for row in rows):
            body["schema_hash"] = digest
        content = packed(words.checkout, commit, words.flatc.resolve(), body)
        (FOLDER / name).write_bytes(content)
        print(f"{name}: {len(content)} bytes, tt-mlir {commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
