"""FlashInfer's kernels over a rig's inputs: those that keep a state per token, and those that keep a ring.

The calls are those of FlashInfer 0.7.4's ``gdn_decode.py``, ``gdn_kernels``, ``kda.py`` and ``mamba``.
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


class Mamba2(Peer):
    """Mamba2 with a state per token."""

    def setup(self) -> None:
        self.op = found("flashinfer.mamba", "selective_state_update")
        self.constants = constants(self, self.rig.inputs[0].a.dtype)
        shared = {"num_accepted_tokens": self.accepted, "cu_seqlens": self.starts, "cache_steps": self.t}
        self.of_windows = shared if self.t > 1 else {}

    def core(self, layer: int, x: Tensor) -> Tensor:
        t = self.tokens(layer, x)
        y: Tensor = self.op(
            self.states[layer],
            t.v[0],
            t.a[0, :, :, None].expand(-1, -1, self.g.head_v),
            B=t.k[0],
            C=t.q[0],
            dt_softplus=self.g.dt_softplus,
            state_batch_indices=self.columns,
            dst_state_batch_indices=self.columns,
            out=torch.empty(t.v.shape[1:], dtype=x.dtype, device=x.device),
            **self.constants[layer],
            **self.of_windows,
        )
        return y


def constants(peer: Peer, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """A Mamba2 layer's, spread over a head without copies; D and the bias in the time step's dtype."""
    g, all_layers = peer.g, []
    for p in peer.rig.params:
        assert p.D is not None
        all_layers.append(
            {
                "A": (-torch.exp(p.A_log))[:, None, None].expand(-1, g.head_v, g.head_k),
                "D": p.D.to(dtype)[:, None].expand(-1, g.head_v),
                "dt_bias": p.dt_bias.to(dtype)[:, None].expand(-1, g.head_v),
            }
        )
    return all_layers


class Ring(Peer):
    """One state per request, and behind it a ring of tokens that a step folds in where no window more has room.

    Kernels read how far a row is, ``stage`` moves all rows at once. At first a ring holds tokens of zeros, which change
    nothing, so that rows are folded at different steps.
    """

    size = SLOTS

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig)
        rows = torch.arange(len(self.slots), dtype=torch.int32, device=rig.device)
        self.held = rows % (RING - self.t + 1)
        self.base = (self.size - 1 - rows) % self.size

    def rows(self, batch: int) -> int:
        return batch + 1

    def ring(self, heads: int, *dims: int, dtype: torch.dtype) -> Tensor:
        """[layers, slots, heads, size, *dims] of zeros."""
        shape = (self.g.num_layers, len(self.slots) + 1, heads, self.size, *dims)
        return torch.zeros(shape, dtype=dtype, device=self.rig.device)

    def stage(self, i: int) -> None:
        """Tokens that were folded leave the ring; those that were accepted join it."""
        self.accepted.copy_(self.rig.accepted[(i - 1) % self.rig.steps])
        folded = torch.where(self.held > RING - self.t, self.held, 0)
        self.base.add_(folded).remainder_(self.size)
        self.held.sub_(folded).add_(self.accepted)


class GdnRing(Ring):
    """GDN's ``ucache_flush``."""

    def setup(self) -> None:
        g, act = self.g, storage(self.g.act_dtype)
        self.op = found(KERNELS, "gated_delta_rule_mtp_ucache_flush")
        self.k = self.ring(g.num_k_heads, g.head_k, dtype=act)
        self.u = self.ring(g.num_v_heads, g.head_v, dtype=act)
        self.decay = self.ring(g.num_v_heads, dtype=torch.float32)

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


class Mamba2Ring(Ring):
    """Mamba2's ``checkpointing_ssu``."""

    def setup(self) -> None:
        g, act = self.g, storage(self.g.act_dtype)
        self.size = RING + self.t
        self.op = found("flashinfer.mamba", "checkpointing_ssu")
        scratch = found("flashinfer.mamba.checkpointing_ssu", "allocate_checkpointing_ssu_scratch")
        self.x = self.ring(g.num_v_heads, g.head_v, dtype=act)
        self.b = self.ring(g.num_k_heads, g.head_k, dtype=act)
        self.dt = self.ring(g.num_v_heads, dtype=torch.float32)
        self.constants = constants(self, self.rig.params[0].dt_bias.dtype)
        self.places = torch.zeros(2, len(self.slots) + 1, dtype=torch.int32, device=self.rig.device)
        made = scratch(len(self.slots), g.num_v_heads, self.t, RING, act, self.rig.device)
        self.scratch = dict(zip(("cb_scaled", "cumAdt_vec", "cb_old"), made, strict=True))

    def stage(self, i: int) -> None:
        super().stage(i)
        self.places[0, self.slots], self.places[1, self.slots] = self.base, self.held

    def core(self, layer: int, x: Tensor) -> Tensor:
        t = self.by_window(layer, x)
        y: Tensor = self.op(
            self.states[layer],
            self.x[layer],
            self.b[layer],
            self.dt[layer],
            *self.places,
            t.v,
            t.a[..., None].expand(*t.a.shape, self.g.head_v),
            B=t.k,
            C=t.q,
            out=torch.empty(t.v.shape, dtype=x.dtype, device=x.device),
            dt_softplus=self.g.dt_softplus,
            state_batch_indices=self.slots,
            **self.constants[layer],
            **self.scratch,
        )
        return y


PER_TOKEN: dict[Arch, type[Peer]] = {Arch.GDN: Gdn, Arch.KDA: Kda, Arch.MAMBA2: Mamba2}
RINGS: dict[Arch, type[Peer]] = {Arch.GDN: GdnRing, Arch.MAMBA2: Mamba2Ring}
