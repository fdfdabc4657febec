"""What a step leaves in the conv windows of all layers: the inputs behind the last accepted token, at the front."""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.kernels.keep_windows import keep_windows
from ssmspec.runtime.vllm.pages import ConvPages
from ssmspec.step import Commit

CHANNELS = 1024  # of one program: eight 16-bit inputs, one 16-byte load, for each of 128 threads
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Windows:
    """The conv windows of all layers, each layer's in the pages at ``rows`` [slots]."""

    def __init__(self, layers: Sequence[ConvPages], rows: Sequence[Tensor]) -> None:
        self.layers, self.rows = layers, rows
        entries = [
            [layer.pages.data_ptr(), layer.pages.stride(0), at.data_ptr()]
            for layer, at in zip(layers, rows, strict=True)
        ]
        self.table = torch.tensor(entries, dtype=torch.int64, device=rows[0].device)
        self.align = gcd(16, *(number for entry in entries for number in entry[:2]))

    def keep(self, commit: Commit) -> None:
        """Move every window to its accepted token, and copy it to a crossed boundary's page as it was there."""
        if self.table.device.type == "cpu":
            self._keep_by_layer(commit)
        else:
            self._keep_at_once(commit)

    def _keep_at_once(self, commit: Commit) -> None:
        pages, history = self.layers[0].pages, self.layers[0].history
        channels = pages.shape[1]
        keep_windows[(len(commit.slots), len(self.layers), triton.cdiv(channels, CHANNELS))](
            self.table,
            commit.slots,
            commit.accepted,
            commit.mark,
            commit.mark_slots,
            channels,
            *pages.stride()[1:],
            _TYPES[pages.dtype],
            self.align,
            history,
            CHANNELS,
        )

    def _keep_by_layer(self, commit: Commit) -> None:
        for layer, rows in zip(self.layers, self.rows, strict=True):
            blocks = rows[commit.slots]
            window = layer.pages[blocks]
            layer.keep(window, commit.mark, rows[commit.mark_slots])
            layer.keep(window, commit.accepted, blocks)
