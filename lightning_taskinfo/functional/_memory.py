"""Memory that is used again: on the CPU a fresh large tensor costs more than the arithmetic that fills it."""

from typing import Any

import torch
from torch import Tensor

_use_count: Any = getattr(
    torch._C, "_storage_Use_Count", None
)  # absent from some builds: then nothing is used again
_LARGE = 2**14  # entries; the allocator keeps smaller memory at hand itself


class Recycler:
    """Hands out uninitialised tensors, in memory that it handed out before and that nobody holds any more.

    A tensor, its views, a graph that saved it, a ``.grad`` and a NumPy array all hold their memory, so that none of
    them is ever written over. Copies and pickles begin empty.

    Example:
        >>> recycler, like = Recycler(), torch.zeros(2**14)
        >>> address = recycler.empty_like(like).data_ptr()  # nobody keeps the tensor
        >>> kept = recycler.empty_like(like)
        >>> kept.data_ptr() == address, recycler.empty_like(like).data_ptr() == address
        (True, False)
    """

    def __init__(self) -> None:
        self._kept: list[
            tuple[torch.UntypedStorage, int]
        ] = []  # with the number of its users when there are none

    def empty_like(self, like: Tensor) -> Tensor:
        """Return an uninitialised tensor in the shape, dtype and layout of ``like``, and on its device."""
        if (
            like.numel() < _LARGE
            or _use_count is None
            or like.device.type != "cpu"
            or not like.is_contiguous()
        ):
            return torch.empty_like(like)
        if type(like) not in (
            Tensor,
            torch.nn.Parameter,
        ):  # a subclass knows itself what is like it
            return torch.empty_like(like)
        size = like.numel() * like.element_size()
        self._kept = [
            entry for entry in self._kept if entry[0].nbytes() == size
        ]  # of a model that was converted
        storage = next((s for s, unused in self._kept if _use_count(s._cdata) == unused), None)
        if storage is None:
            storage = torch.UntypedStorage(size)
            self._kept.append((storage, _use_count(storage._cdata)))
        return torch.empty(0, dtype=like.dtype, device=like.device).set_(
            storage, 0, like.shape, like.stride()
        )

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Recycler, ()
