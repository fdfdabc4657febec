"""FlashInfer's contracts, played by torch: what its kernels are given makes the outputs that ours make."""

from typing import Any

import pytest
import torch
from shapes import geometry
from torch import Tensor

from ssmspec.acceptance import Acceptance, from_rate
from ssmspec.geometry import Geometry, Window
from ssmspec.measure import peer_flashinfer, peers
from ssmspec.measure.peer_flashinfer import RING, SLOTS
from ssmspec.measure.rig import Rig


def on_heads(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[-2], -2)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


class Delta:
    """One request's delta rule over a window: a gate of [T, HV] or [T, HV, K]."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
    ) -> None:
        heads, self.v, self.beta = v.shape[1], v.float(), b.float().sigmoid()[..., None]
        self.q, self.k = (unit(on_heads(x, heads)) for x in (q, k))
        steps = torch.nn.functional.softplus(a.float() + dt_bias.view(a.shape[1:]))
        self.g = -A_log.exp().view(heads, *[1] * (a.dim() - 2)) * steps

    def __call__(self, t: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> output, state, and what was written beside the key."""
        decayed = state * self.g[t].exp().view(len(state), 1, -1)
        u = self.beta[t] * (self.v[t] - (decayed @ self.k[t][..., None])[..., 0])
        state = decayed + u[..., None] * self.k[t][:, None]
        return (state @ self.q[t][..., None])[..., 0] * self.q.shape[-1] ** -0.5, state, u


def windows(q: Tensor, v: Tensor, states: Tensor, reads: Tensor, writes: Tensor, **rest: Tensor) -> Tensor:
    """[B, T, ...]; the state behind every token goes to its own row."""
    out, constants = torch.empty_like(v), {n: rest.pop(n) for n in ("A_log", "dt_bias")}
    for i in range(len(q)):
        window = Delta(q[i], v=v[i], **{n: x[i] for n, x in rest.items()}, **constants)
        state = states[reads[i]].float()
        for t in range(q.shape[1]):
            y, state, _ = window(t, state)
            out[i, t], states[writes[i, t]] = y.to(v.dtype), state.to(states.dtype)
    return out


def mtp(*, initial_state: Tensor, initial_state_indices: Tensor, ssm_state_indices: Tensor, disable_state_update: bool, **rest: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert initial_state.dtype == torch.float32
    assert not disable_state_update
    return windows(
        states=initial_state, reads=initial_state_indices, writes=ssm_state_indices, **rest
    ), initial_state


def mtp_bf16(*, initial_state_source: Tensor, initial_state_indices: Tensor, ssm_state_indices: Tensor, **rest: Tensor) -> Tensor:  # fmt: skip
    assert initial_state_source.dtype == torch.bfloat16
    return windows(states=initial_state_source, reads=initial_state_indices, writes=ssm_state_indices, **rest)


def decode(*, state: None, initial_state: Tensor, initial_state_indices: Tensor, backend: str, **rest: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = initial_state_indices
    return windows(states=initial_state, reads=rows, writes=rows[:, None], **rest), initial_state


def kda(*, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, ssm_state_indices: Tensor, cu_seqlens: Tensor, num_spec_tokens: int = 0, num_accepted_tokens: Tensor | None = None, lower_bound: float | None, use_gate_in_kernel: bool, beta_is_logit: bool, **constants: Tensor) -> tuple[Tensor, None]:  # fmt: skip
    assert lower_bound is None
    assert use_gate_in_kernel
    assert beta_is_logit
    assert num_spec_tokens == 0 or all(x.is_contiguous() for x in (q, k, v))
    batch, t = len(cu_seqlens) - 1, num_spec_tokens + 1
    rows = ssm_state_indices.view(batch, t)
    ends = torch.ones(batch, dtype=torch.long) if num_accepted_tokens is None else num_accepted_tokens.long()
    apart = {n: x[0].unflatten(0, (batch, t)) for n, x in {"q": q, "k": k, "v": v, "a": g, "b": beta}.items()}
    reads = rows.gather(1, ends[:, None] - 1)[:, 0]
    return windows(states=initial_state, reads=reads, writes=rows, **apart, **constants).flatten(0, 1)[
        None
    ], None


def gdn_ring(*, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state_source: Tensor, initial_state_indices: Tensor, k_cache: Tensor, u_cache: Tensor, g_cache: Tensor, hist_len: Tensor, cache_base: Tensor, restart_hist_on_flush: bool, **constants: Tensor) -> Tensor:  # fmt: skip
    """A full row is folded, and its new tokens decay from there."""
    out, (t, heads) = torch.empty_like(v), v.shape[1:3]
    for i, row in enumerate(initial_state_indices.tolist()):
        held, base = int(hist_len[i]), int(cache_base[i])
        assert 0 <= held <= RING
        assert 0 <= base < SLOTS
        assert not restart_hist_on_flush
        live, new = ([(base + j) % SLOTS for j in r] for r in (range(held), range(held, held + t)))
        window, total = Delta(q[i], k[i], v[i], a[i], b[i], **constants), torch.zeros(heads)
        state = initial_state_source[row].float()
        if live:
            total = g_cache[row, :, live[-1]]
            keys = k_cache[row].float().repeat_interleave(heads // k_cache.shape[1], 0)
            state = total.exp()[:, None, None] * state
            for j in live:
                left = (total - g_cache[row, :, j]).exp()[:, None, None]
                state = state + left * u_cache[row, :, j, :, None].float() * keys[:, j, None]
        if held > RING - t:
            initial_state_source[row], total = state.to(initial_state_source.dtype), torch.zeros(heads)
        for s, slot in enumerate(new):
            y, state, u = window(s, state)
            out[i, s], total = y.to(v.dtype), total + window.g[s]
            u_cache[row, :, slot], g_cache[row, :, slot] = u.to(u_cache.dtype), total
            k_cache[row, :, slot] = unit(k[i, s].float()).to(k_cache.dtype)
    return out


PLAYED: dict[tuple[str, str], Any] = {
    ("flashinfer.gdn_decode", "gated_delta_rule_decode_pretranspose"): decode,
    ("flashinfer.gdn_decode", "gated_delta_rule_mtp"): mtp,
    ("flashinfer.gdn_kernels", "gated_delta_rule_mtp"): mtp_bf16,
    ("flashinfer.gdn_kernels", "gated_delta_rule_mtp_ucache_flush"): gdn_ring,
    ("flashinfer.kda", "recurrent_kda"): kda,
}
CASES = [
    *((peers.FLASHINFER, "gdn", state, t) for state in ("fp32", "bf16") for t in (1, 3)),
    *((peers.FLASHINFER, "kda", "bf16", t) for t in (1, 3)),
    *((peers.RING, "gdn", "bf16", t) for t in (4, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("peer", "gate", "state", "t"), CASES)
def test_kernels_that_keep_the_contract_agree(
    peer: str, gate: str, state: str, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rig(g: Geometry, w: Window, batch: int, acceptance: Acceptance, number: int, seed: int) -> Rig:
        return Rig("recover", g, w, batch, acceptance, steps=7, seed=seed, device="cpu", backend="torch")

    monkeypatch.setattr(peer_flashinfer, "found", lambda module, name: PLAYED[module, name])
    monkeypatch.setattr(peers, "_rig", rig)
    g = geometry(gate, state, num_layers=1)
    assert peers.disagreement(peer, g, Window(max_len=t), from_rate(0.6, t - 1), seed=0) is None


def test_a_kernel_of_another_version_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails where it is called, by whatever it raises."""

    def disagreement(*_: object, **__: object) -> None:
        raise TypeError("got an unexpected keyword argument")

    monkeypatch.setattr(peers, "absent", lambda *_: None)
    monkeypatch.setattr(peers, "disagreement", disagreement)
    g = geometry("gdn", "bf16", head_k=128, head_v=128)
    found = peers.run(peers.RING, g, Window(max_len=4), 2, from_rate(0.6, 3), bandwidth=4e12)
    assert "unexpected keyword" in str(found.absent)
    assert (found.layer_us, found.bytes) == (None, 0.0)
