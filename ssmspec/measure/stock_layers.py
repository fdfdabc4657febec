"""The kernels of vLLM and of flash-linear-attention, as a layer of theirs.

The calls are those of vLLM 0.33.0's ``qwen_gdn_linear_attn.py``, ``kimi_gdn_linear_attn.py`` and ``mamba_mixer2.py``;
a window of one token takes the kernels of its standard decode.
"""

from typing import Any

import torch
from torch import Tensor

from ssmspec.geometry import Arch
from ssmspec.kernels.base import Tokens
from ssmspec.measure.stock import MAMBA, Peer, Stock, apart, found

OPS = "vllm.third_party.flash_linear_attention.ops"
KDA = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
FLA = "fla.ops"


class FusedOp(Stock):
    """GDN, vLLM's default: recurrence and norm in one CUDA op."""

    normed = True

    def setup(self) -> None:
        self.op = found("vllm._custom_ops", "fused_gdn_decode_post_conv_mtp")

    def core(self, layer: int, x: Tensor) -> Tensor:
        z = self.rig.inputs[layer].z.flatten(0, 1)
        out: Tensor = self.op(
            mixed_qkv=x,
            state_indices=self.columns,
            state=self.states[layer],
            output_gate=z,
            norm_weight=self.rig.weights[layer].norm,
            out=torch.empty_like(z),
            scale=self.g.head_k**-0.5,
            norm_eps=self.rig.layer.norm.eps,
            output_gate_activation="silu",
            cu_seqlens=self.starts,
            num_accepted_tokens=self.accepted,
            **self.gates(layer),
        )
        return out


class Gdn(Stock):
    """GDN's Triton path. It wants q, k and v apart, one copy each; one token alone stays packed."""

    def setup(self) -> None:
        name = "fused_recurrent_gated_delta_rule_packed_decode"
        self.windows = found(f"{OPS}.fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update")
        self.decode = found(f"{OPS}.fused_recurrent", name)
        self.rmsnorm = found(f"{OPS}.layernorm_guard", "rmsnorm_fn")

    def core(self, layer: int, x: Tensor) -> Tensor:
        if self.t == 1:
            out = torch.empty_like(self.rig.inputs[layer].z.flatten(0, 1))
            self.decode(
                mixed_qkv=x,
                scale=self.g.head_k**-0.5,
                initial_state=self.states[layer],
                out=out[:, None],
                ssm_state_indices=self.columns[:, 0],
                use_qk_l2norm_in_kernel=True,
                **self.gates(layer),
            )
            return out
        t = self.tokens(layer, x)
        y: Tensor = self.windows(
            **apart(t),
            initial_state=self.states[layer],
            inplace_final_state=True,
            ssm_state_indices=self.columns,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=self.starts,
            num_accepted_tokens=self.accepted,
            **self.gates(layer),
        )[0]
        return y

    def norm(self, layer: int, y: Tensor, z: Tensor) -> Tensor:
        v = self.g.head_v
        out: Tensor = self.rmsnorm(
            y.reshape(-1, v),
            self.rig.weights[layer].norm,
            None,
            z=z.reshape(-1, v),
            eps=self.rig.layer.norm.eps,
            norm_before_gate=True,
            activation="silu",
        )
        return out


class Kda(Stock):
    """KDA with its gates in the kernel, as Kimi-Linear runs it."""

    def setup(self) -> None:
        self.windows = found(KDA, "fused_recurrent_kda")
        self.decode = found(KDA, "fused_recurrent_kda_packed_decode")
        self.rmsnorm = found(f"{OPS}.fused_norm_gate", "rms_norm_gated")

    def core(self, layer: int, x: Tensor) -> Tensor:
        t, gates = self.tokens(layer, x), self.gates(layer)
        shared = {
            "raw_g": t.a,
            "raw_beta": t.b,
            "A_log": gates["A_log"],
            "dt_bias": gates["dt_bias"],
            "lower_bound": self.g.gate_lower_bound,
            "initial_state": self.states[layer],
        }
        if self.t == 1:
            one: Tensor = self.decode(mixed_qkv=x, state_indices=self.columns[:, 0], **shared)[0]
            return one
        y: Tensor = self.windows(
            q=t.q,
            k=t.k,
            v=t.v,
            cu_seqlens=self.starts,
            ssm_state_indices=self.columns,
            num_accepted_tokens=self.accepted,
            **shared,
        )[0]
        return y

    def norm(self, layer: int, y: Tensor, z: Tensor) -> Tensor:
        eps = self.rig.layer.norm.eps
        out: Tensor = self.rmsnorm(y, z, self.rig.weights[layer].norm, None, activation="sigmoid", eps=eps)
        return out


class Mamba2(Stock):
    """Mamba2. Its norm is vLLM's Triton kernel, which its layer calls for one group and torch.compile stands in for."""

    def setup(self) -> None:
        g, params = self.g, self.rig.params
        self.update = found(f"{MAMBA}.mamba_ssm", "selective_state_update")
        self.rmsnorm = found(f"{MAMBA}.layernorm_gated", "rms_norm_gated")
        rates = [-torch.exp(p.A_log) for p in params]
        self.rates = [a[:, None, None].expand(-1, g.head_v, g.head_k) for a in rates]
        windows = {"num_accepted_tokens": self.accepted, "cu_seqlens": self.starts}
        self.windows = windows if self.t > 1 else {}

    def core(self, layer: int, x: Tensor) -> Tensor:
        t, params, v = self.tokens(layer, x), self.rig.params[layer], self.g.head_v
        assert params.D is not None
        out = torch.empty(t.v.shape[1:], dtype=x.dtype, device=x.device)
        self.update(
            self.states[layer],
            t.v[0],
            t.a[0, :, :, None].expand(-1, -1, v),
            self.rates[layer],
            t.k[0],
            t.q[0],
            params.D[:, None].expand(-1, v),
            params.dt_bias[:, None].expand(-1, v),
            dt_softplus=self.g.dt_softplus,
            state_batch_indices=self.columns,
            dst_state_batch_indices=self.columns,
            out=out,
            **self.windows,
        )
        return out

    def norm(self, layer: int, y: Tensor, z: Tensor) -> Tensor:
        norm = self.rig.layer.norm
        out: Tensor = self.rmsnorm(
            y.flatten(1),
            self.rig.weights[layer].norm,
            None,
            z=z.flatten(1),
            eps=norm.eps,
            group_size=norm.group,
            norm_before_gate=False,
        )
        return out


def _flash(t: Tokens, gates: dict[str, Tensor]) -> dict[str, Any]:
    """What flash-linear-attention's kernels take of a layer, to norm and gate in the kernel."""
    names = "state_v_first", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"
    own = {"g": t.a, "beta": t.b, "A_log": gates["A_log"], "dt_bias": gates["dt_bias"]}
    return {**apart(t), **own, **dict.fromkeys(names, True)}


class FlaGdn(Gdn):
    """flash-linear-attention's GDN: one state per row, in the order of the batch, made anew by every call."""

    whole = False

    def setup(self) -> None:
        super().setup()
        self.op = found(f"{FLA}.gated_delta_rule", "fused_recurrent_gated_delta_rule")
        self.now = [states[1 :: self.t].float() for states in self.states]

    def core(self, layer: int, x: Tensor) -> Tensor:
        p, gates = self.rig.inputs[layer], self.gates(layer)
        t = Tokens.unpack(self.g, x.view(p.x.shape), p.a, p.b)
        y, self.now[layer] = self.op(
            initial_state=self.now[layer],
            output_final_state=True,
            **_flash(t, gates),
        )
        out: Tensor = y
        return out


class FlaKda(Kda):
    """flash-linear-attention's KDA, which knows slots and accepted tokens."""

    whole = False

    def setup(self) -> None:
        super().setup()
        self.op = found(f"{FLA}.kda.fused_recurrent", "fused_recurrent_kda_fwd")

    def core(self, layer: int, x: Tensor) -> Tensor:
        t, gates = self.tokens(layer, x), self.gates(layer)
        y: Tensor = self.op(
            initial_state=self.states[layer],
            inplace_final_state=True,
            lower_bound=self.g.gate_lower_bound,
            cu_seqlens=self.starts,
            ssm_state_indices=self.columns,
            num_accepted_tokens=self.accepted,
            **_flash(t, gates),
        )[0]
        return y


TRITON: dict[Arch, type[Peer]] = {Arch.GDN: Gdn, Arch.KDA: Kda, Arch.MAMBA2: Mamba2}
FLASH: dict[Arch, type[Peer]] = {Arch.GDN: FlaGdn, Arch.KDA: FlaKda}
