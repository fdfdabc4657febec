"""The rows of one step, staged and closed in a launch each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssmspec.kernels.step_rows import close_rows, stage_rows
from ssmspec.runtime.rows import Batch, Rows
from ssmspec.step import Commit

PER_PROGRAM = 128
_ENTRIES = {torch.int32: tl.int32, torch.int64: tl.int64}


class LaunchedRows(Rows):
    """As Rows."""

    def __init__(self, num_requests: int, max_len: int, device: torch.device) -> None:
        super().__init__(num_requests, max_len, device)
        self.addresses = torch.zeros(0, 2, dtype=torch.int64, device=device)
        self._commit, self._told = torch.zeros_like(self.numbers), torch.zeros_like(self.flags)

    def bind(self, tables: Sequence[Tensor], align: int) -> None:
        super().bind(tables, align)
        entries = [(table.data_ptr(), table.stride(0)) for table in tables]
        self.addresses = torch.tensor(entries, dtype=torch.int64, device=self.device)

    def stage(self, batch: Batch) -> None:
        ordered, settled = not isinstance(batch.rows, slice), batch.settle is not None
        stage_rows[(triton.cdiv(self.num_requests, PER_PROGRAM),)](
            batch.requests,
            batch.starts,
            batch.ends,
            batch.rows if ordered else self.numbers,
            int(ordered),
            batch.settle if settled else self.flags,
            int(settled),
            0 if batch.dummy else batch.count,
            self.addresses,
            _ENTRIES[self.tables[0].dtype],
            len(self.tables),
            self.numbers,
            self.flags,
            self.pages,
            self.num_requests,
            self.align,
            PER_PROGRAM,
        )

    def close(self, n: int, count: Tensor | None, limit: int) -> Commit:
        close_rows[(triton.cdiv(n, PER_PROGRAM),)](
            self.numbers,
            self.flags,
            count,
            limit,
            self._commit,
            self._told,
            self.counters,
            n,
            self.num_requests,
            PER_PROGRAM,
        )
        slots, lens, accepted, next_slots, mark, mark_slots = self._commit[:, :n].unbind()
        return Commit(slots, lens, accepted, next_slots, mark, mark_slots, self._told[:n])
