"""The memory report: tt-metal's memory-view keys for each space, and which tensor holds what."""

from __future__ import annotations

from typing import Any

from stitch.program import Space
from stitch.runtime import RuntimeDevice


def _view(device: RuntimeDevice, space: Space) -> dict[str, Any]:
    use, shape = device.memory_use()[space], device.machine.shape.space(space)
    table = [
        {"address": address, "size": size, "allocated": True, "tensor": origin}
        for address, size, origin in use.buffers
    ] + [
        {"address": address, "size": size, "allocated": False, "tensor": ""}
        for address, size in use.holes
    ]
    return {
        "num_banks": shape.banks,
        "total_bytes_per_bank": shape.capacity,
        "total_bytes_allocated_per_bank": use.used_nbytes,
        "total_bytes_free_per_bank": use.free_nbytes,
        "total_bytes_leased_per_bank": use.leased_nbytes,
        "largest_contiguous_bytes_free_per_bank": use.largest_hole,
        "block_table": sorted(table, key=lambda entry: int(str(entry["address"]))),
    }


def memory_views(device: RuntimeDevice) -> dict[str, dict[str, Any]]:
    """Every space of the machine, by name, all at one moment."""
    with device.lock:
        device.flush()
        return {space.value: _view(device, space) for space in device.machine.shape.spaces}


def host_memory_line(device: RuntimeDevice) -> str:
    """What the device took of the host's memory at most, and what it may take."""
    return (
        f"host memory: at most {device.peak_nbytes} B claimed, {device.allowed_nbytes} B allowed "
        "to all devices of the process"
    )


def memory_report(device: RuntimeDevice) -> str:
    """The views as text: one line per space, one per live buffer; and the host's own memory."""
    out = []
    for name, view in memory_views(device).items():
        out.append(
            f"{name}: {view['num_banks']} banks x {view['total_bytes_per_bank']} B, "
            f"{view['total_bytes_allocated_per_bank']} B allocated, "
            f"{view['total_bytes_free_per_bank']} B free, largest hole "
            f"{view['largest_contiguous_bytes_free_per_bank']} B (per bank){_leased(view)}"
        )
        out += [
            f"  {entry['address']:#010x} {entry['size']:>9} B  {entry['tensor']}"
            for entry in view["block_table"]
            if entry["allocated"]
        ]
    return "\n".join([*out, host_memory_line(device)])


def _leased(view: dict[str, Any]) -> str:
    """What of the free memory repeated work takes again unless somebody needs it."""
    nbytes = view["total_bytes_leased_per_bank"]
    return f", {nbytes} B of the free leased" if nbytes else ""
