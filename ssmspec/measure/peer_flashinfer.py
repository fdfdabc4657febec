"""FlashInfer's kernels over a rig's inputs: those that keep a state per token, and those that keep a ring.

The calls are those of FlashInfer 0.7.4's ``gdn_decode.py``, ``gdn_kernels`` and ``kda.py``.
"""

import torch
from torch import Tensor

from ssmspec.geometry import Arch, DType
from ssmspec.measure.rig import Rig
from ssmspec.measure.stock import Peer, apart, found
from ssmspec.pool import storage

KERNELS = "flashinfer.gdn_kernels"
RING = 16  # tokens that its rings hold behind a state
SLOTS = 32  # of GDN's rings


class PerToken(Peer):
    """Starts from the state of the last accepted token, whose row is looked up once for all layers."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        self.before = self.columns[:, 0] - 1
        self.start = self.before + 1

    def stage(self, i: int) -> None:
        super().stage(i)
        torch.add(self.before, self.accepted, out=self.start)


class Gdn(PerToken):
    """GDN with a state per token: CuTe kernels of their own for one token, and for fp32 and bf16 windows."""

    def setup(self) -> None:
        self.one = found("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose")
        self.fp32 = found("flashinfer.gdn_decode", "gated_delta_rule_mtp")
        self.bf16 = found(KERNELS, "gated_delta_rule_mtp")

    def core(self, layer: int, x: Tensor) -> Tensor:
        t, params, states = self.by_window(layer, x), self.rig.params[layer], self.states[layer]
        shared = {"q": t.q, "k": t.k, "v": t.v, "a": t.a, "b": t.b} | {
            "A_log": params.A_log,
            "dt_bias": params.dt_bias,
            "initial_state_indices": self.start,
        }
        if self.t == 1:
            y: Tensor = self.one(state=None, initial_state=states, backend="flashinfer", **shared)[0]
        elif self.g.state_dtype is DType.FP32:
            y = self.fp32(
                initial_state=states, ssm_state_indices=self.columns, disable_state_update=False, **shared
            )[0]
        else:
            y = self.bf16(initial_state_source=states, ssm_state_indices=self.columns, **shared)
        return y


class Kda(Peer):
    """KDA with a bf16 state per token, its gates in the kernel. That of windows reads q, k and v as if each were dense."""

    def setup(self) -> None:
        self.op = found("flashinfer.kda", "recurrent_kda")
        self.bias = [p.dt_bias.flatten() for p in self.rig.params]

    def core(self, layer: int, x: Tensor) -> Tensor:
        t = self.tokens(layer, x)
        inputs, windows = {"q": t.q, "k": t.k, "v": t.v}, {}
        if self.t > 1:
            inputs = apart(t)
            windows = {"num_spec_tokens": self.t - 1, "num_accepted_tokens": self.accepted}
        y: Tensor = self.op(
            g=t.a,
            beta=t.b,
            A_log=self.rig.params[layer].A_log,
            dt_bias=self.bias[layer],
            initial_state=self.states[layer],
            use_gate_in_kernel=True,
            lower_bound=self.g.gate_lower_bound,
            beta_is_logit=True,
            cu_seqlens=self.starts,
            ssm_state_indices=self.columns if self.t > 1 else self.columns[:, 0],
            **inputs,
            **windows,
        )[0]
        return y


class GdnRing(Peer):
    """GDN's ``ucache_flush``: one bf16 state per request, and behind it a ring of tokens that a step folds in where no
    window more has room.

    The kernel reads how far a row is, ``stage`` moves all rows at once. At first a ring holds tokens of zeros, which
    change nothing, so that rows are folded at different steps.
    """

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        rows = torch.arange(len(self.slots), dtype=torch.int32, device=rig.device)
        self.held = rows % (RING - self.t + 1)
        self.base = (SLOTS - 1 - rows) % SLOTS

    def rows(self, batch: int) -> int:
        return batch + 1

    def setup(self) -> None:
        g, act = self.g, storage(self.g.act_dtype)
        self.op = found(KERNELS, "gated_delta_rule_mtp_ucache_flush")
        self.k = self._ring(g.num_k_heads, g.head_k, dtype=act)
        self.u = self._ring(g.num_v_heads, g.head_v, dtype=act)
        self.decay = self._ring(g.num_v_heads, dtype=torch.float32)

    def _ring(self, heads: int, *dims: int, dtype: torch.dtype) -> Tensor:
        """[layers, slots, heads, SLOTS, *dims] of zeros."""
        shape = (self.g.num_layers, len(self.slots) + 1, heads, SLOTS, *dims)
        return torch.zeros(shape, dtype=dtype, device=self.rig.device)

    def stage(self, i: int) -> None:
        """Tokens that were folded leave the ring; those that were accepted join it."""
        self.accepted.copy_(self.rig.accepted[(i - 1) % self.rig.steps])
        folded = torch.where(self.held > RING - self.t, self.held, 0)
        self.base.add_(folded).remainder_(SLOTS)
        self.held.sub_(folded).add_(self.accepted)

    def core(self, layer: int, x: Tensor) -> Tensor:
        t, params = self.by_window(layer, x), self.rig.params[layer]
        y: Tensor = self.op(
            q=t.q,
            k=t.k,
            v=t.v,
            a=t.a,
            b=t.b,
            A_log=params.A_log,
            dt_bias=params.dt_bias,
            initial_state_source=self.states[layer],
            initial_state_indices=self.slots,
            k_cache=self.k[layer],
            u_cache=self.u[layer],
            g_cache=self.decay[layer],
            hist_len=self.held,
            cache_base=self.base,
            restart_hist_on_flush=False,
        )
        return y


PER_TOKEN: dict[Arch, type[Peer]] = {Arch.GDN: Gdn, Arch.KDA: Kda}
RINGS: dict[Arch, type[Peer]] = {Arch.GDN: GdnRing}
