"""Scalars of torch's optimizers (``step``), which go with every commit.

They lie in one buffer, and in one more on a GPU for those that a fused or capturable optimizer keeps there: a commit copies
that to the host at once, and not one by one.
"""

from __future__ import annotations

import torch

from shardd.torch._process.extension import _C

__all__ = ["Scalars"]

_MOST = 4  # of a parameter: NAdam 2, ASGD 3
_BYTES = 8  # of each


class Scalars:
    """Of one job. The first of all parameters, then the second of all. Buffers are never reallocated: scalars lie in them."""

    def __init__(self, param_count: int) -> None:
        self._param_count = param_count
        self._host = torch.zeros(_MOST * param_count * _BYTES, dtype=torch.uint8)
        self._gpu: torch.Tensor | None = None
        self._on_gpu = torch.zeros(_MOST * param_count, dtype=torch.bool)
        self._lying: dict[int, torch.Tensor] = {}  # by number of the place
        self.used = 0  # of each parameter, at most

    def takes(self, scalar: torch.Tensor, place: int) -> bool:
        return scalar.numel() == 1 and scalar.element_size() <= _BYTES and place < _MOST

    def keep(self, scalar: torch.Tensor, index: int, place: int) -> None:
        """Moves ``scalar``, which is alone in its storage, into a buffer with its value.

        What lay there, as of another optimizer of the same parameters, moves out with its own.
        """
        number = place * self._param_count + index
        before = self._lying.get(number)
        if before is not None and before is not scalar and before.untyped_storage().nbytes() <= _BYTES:
            _C.place_in(before, torch.empty(_BYTES, dtype=torch.uint8, device=before.device), 0)
        self._lying[number] = scalar
        self._on_gpu[number] = scalar.is_cuda
        if scalar.is_cuda and self._gpu is None:
            self._gpu = torch.zeros(self._host.shape, dtype=torch.uint8, device=scalar.device)
        buffer = self._gpu if scalar.is_cuda else self._host
        assert buffer is not None
        _C.place_in(scalar, buffer, number * _BYTES)

    def pack(self) -> bytes:
        """Returns those in use. It waits for the current stream where some are on a GPU."""
        count = self.used * self._param_count
        packed = self._host[: count * _BYTES]
        if self._gpu is not None:
            of_gpu = self._gpu[: count * _BYTES].cpu().view(-1, _BYTES)
            packed = torch.where(self._on_gpu[:count, None], of_gpu, packed.view(-1, _BYTES))
        return packed.numpy().tobytes()

    def restore(self, packed: bytes) -> None:
        """For ``made``. What was kept before does not count any more."""
        self._on_gpu.zero_()
        if packed:
            values = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            self._host[: values.numel()] = values

    def made(
        self, index: int, place: int, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """What was restored there, kept anew."""
        begin = (place * self._param_count + index) * _BYTES
        value = self._host[begin : begin + dtype.itemsize].clone().view(dtype).reshape(shape).to(device, copy=True)
        self.keep(value, index, place)
        return value
