"""Outputs of a window without its states: matrix products with the checkpoint, and a triangular solve (UT/WY form).

Unrolled, S_i = P_i S_0 + sum_{j<=i} P_ij c_j k_j^T with P_ij the product of the decays after j up to i. So
o_i = S_0 (P_i q_i) + sum_{j<=i} c_j (k_j . P_ij q_i), and c_i = beta_i (v_i - S_0 (P_i k_i) - sum_{j<i} c_j (k_j . P_ij k_i)).
(Yang et al., Parallelizing Linear Transformers with the Delta Rule; Gated Delta Networks.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ssmspec.kernels.recurrence import Token


def window(s: Tensor, past: Sequence[Token], tokens: Sequence[Token]) -> tuple[list[Tensor], list[Tensor]]:
    """s [HV, V, K] fp32, the past tokens in front of the window -> outputs and applied c [HV, V] of each token.

    Products of decays are multiplied up rather than subtracted as logs: a decay of 0 stays 0.
    """
    chain = [*past, *tokens]
    h, n = len(past), len(chain)
    k = torch.stack([t.k for t in chain], 1)  # [HV, n, K]
    q = torch.stack([t.q for t in tokens if t.q is not None], 1)  # [HV, T, K]
    total, between = _products(torch.stack([t.decay for t in chain], 1))
    probes = torch.cat([total * k, total[:, h:] * q], 1)  # [HV, n + T, K]
    from_state = probes @ s.transpose(-1, -2)  # [HV, n + T, V]
    keys = torch.einsum("hjk,hijk,hik->hij", k, between.expand(-1, -1, -1, k.shape[-1]), k)
    queries = torch.einsum("hjk,hijk,hik->hij", k, between[:, h:].expand(-1, -1, -1, k.shape[-1]), q)
    c = s.new_zeros(s.shape[0], n, s.shape[1])  # [HV, n, V]
    for i, t in enumerate(chain):
        if t.c is not None:
            c[:, i] = t.c
        else:
            assert t.v is not None
            assert t.beta is not None
            seen = from_state[:, i] + (keys[:, i, :i, None] * c[:, :i]).sum(1)
            c[:, i] = t.beta[:, None] * (t.v - seen)
    outs = from_state[:, n:] + queries @ c
    skips = [0.0 if t.skip is None else t.skip for t in tokens]
    return [outs[:, i] + skip for i, skip in enumerate(skips)], [c[:, h + i] for i in range(n - h)]


def _products(decay: Tensor) -> tuple[Tensor, Tensor]:
    """decay [HV, n, 1|K] -> products from the start [HV, n, 1|K], and between tokens [HV, n, n, 1|K] (0 above i)."""
    n = decay.shape[1]
    between = decay.new_zeros(decay.shape[0], n, n, decay.shape[2])
    total = torch.empty_like(decay)
    for i in range(n):
        total[:, i] = decay[:, i] * (total[:, i - 1] if i else 1.0)
        if i:
            between[:, i, :i] = between[:, i - 1, :i] * decay[:, i, None]
        between[:, i, i] = 1.0
    return total, between
