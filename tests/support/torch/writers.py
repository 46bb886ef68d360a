"""Every way in which a program of torch may write to a tensor, counted by torch or not.

`WRITERS` by name: each gives a tensor (a parameter, a buffer, a result) new elements. What it
writes depends on the numbers given alone, so twins that are written alike stay equal bit by bit.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

#: A tensor's new elements.
Writer = Callable[[Any, Any], None]


def _counted(tensor: Any, new: Any) -> None:
    with torch.no_grad():
        tensor.copy_(new)


def _data_copy(tensor: Any, new: Any) -> None:
    tensor.data.copy_(new)


def _data_slice(tensor: Any, new: Any) -> None:
    tensor.data[:] = new


def _data_arithmetic(tensor: Any, new: Any) -> None:
    tensor.data.mul_(0).add_(new)


def _last_element(tensor: Any, new: Any) -> None:
    tensor.data.view(-1)[-1] = new.reshape(-1)[-1] + 1


def _numpy(tensor: Any, new: Any) -> None:
    tensor.detach().numpy()[...] = new.numpy()


def _numpy_last(tensor: Any, new: Any) -> None:
    tensor.detach().numpy()[..., -1] = new.numpy()[..., -1]


def _dlpack_numpy(tensor: Any, new: Any) -> None:
    np.from_dlpack(tensor.detach())[...] = new.numpy()


def _dlpack_torch(tensor: Any, new: Any) -> None:
    torch.from_dlpack(tensor.detach()).copy_(new)


def _storage(tensor: Any, new: Any) -> None:
    flat = torch.empty(0).set_(tensor.untyped_storage())
    flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(new)


def _memory(tensor: Any, new: Any) -> None:
    dense = new.contiguous()
    if tensor.is_contiguous():
        ctypes.memmove(tensor.data_ptr(), dense.data_ptr(), dense.nbytes)
    else:
        tensor.data.copy_(new)


def _inference_mode(tensor: Any, new: Any) -> None:
    with torch.inference_mode():
        tensor.copy_(new)


def _foreach(tensor: Any, new: Any) -> None:
    torch._foreach_copy_([tensor.data], [new])


def _thread(tensor: Any, new: Any) -> None:
    thread = threading.Thread(target=_numpy, args=(tensor, new))
    thread.start()
    thread.join()


def _data_replaced(tensor: Any, new: Any) -> None:
    tensor.data = new.clone()


def _set(tensor: Any, new: Any) -> None:
    with torch.no_grad():
        tensor.set_(new.clone())


def _in_a_flat_storage(tensor: Any, new: Any) -> None:
    flat = torch.zeros(new.numel() + 8)
    tensor.data = flat[5 : 5 + new.numel()].view(new.shape)
    flat.numpy()[5 : 5 + new.numel()] = new.reshape(-1).numpy()


def _storage_freed_and_made_again(tensor: Any, new: Any) -> None:
    storage = tensor.untyped_storage()
    if storage.resizable():
        before = storage.clone()
        storage.resize_(0)
        storage.resize_(before.nbytes())
        storage.copy_(before)
    _storage(tensor, new)


#: Ways that leave the tensor where it is; results of compiled functions take these.
IN_PLACE: dict[str, Writer] = {
    "counted": _counted,
    ".data.copy_": _data_copy,
    ".data[:]": _data_slice,
    ".data.mul_": _data_arithmetic,
    "the last element": _last_element,
    "NumPy": _numpy,
    "NumPy, a column": _numpy_last,
    "NumPy by DLPack": _dlpack_numpy,
    "torch by DLPack": _dlpack_torch,
    "the storage": _storage,
    "memmove": _memory,
    "inference mode": _inference_mode,
    "foreach": _foreach,
    "another thread": _thread,
}
#: Those, and ways that give it other memory.
WRITERS: dict[str, Writer] = IN_PLACE | {
    ".data =": _data_replaced,
    "set_": _set,
    "a part of a flat storage": _in_a_flat_storage,
    "a storage that was freed": _storage_freed_and_made_again,
}
