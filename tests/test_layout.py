"""Bytes, counted by hand."""

from math import prod

import pytest
import torch
from shapes import GATES, STORES, geometry

from ssmspec import layout
from ssmspec.geometry import READ_DTYPES, Arch, Conv, DType, Geometry, Mode, Window
from ssmspec.pool import StatePool

QWEN = Geometry(
    arch=Arch.GDN,
    num_layers=24,
    num_k_heads=16,
    num_v_heads=32,
    head_k=128,
    head_v=128,
    conv=Conv(channels=8192),
)


def nbytes(policy: str, g: Geometry, w: Window) -> dict[str, int]:
    return {f.name: f.nbytes for f in layout.of(policy, g, w)}


def test_a_gdn_record_is_20_kib() -> None:
    """4*HV*V + H*(2K+4) + 4*HV = 20,672 bytes: fp32 c, raw bf16 key with its 1/norm, exp(g)."""
    fields = nbytes("recover", QWEN, Window(max_len=1))
    assert sum(v for k, v in fields.items() if k.startswith("rec_")) == 20_672
    assert fields["state"] == 32 * 128 * 128 * 4


@pytest.mark.parametrize(("policy", "capacity"), [("recover", 4), ("every-step", 8), ("checkpointing", 20)])
def test_a_ring_holds_what_its_policy_needs(policy: str, capacity: int) -> None:
    fields = {f.name: f for f in layout.of(policy, QWEN, Window(max_len=4))}
    assert fields["rec_c"].shape == (32, capacity, 128)
    assert fields["rec_k"].shape == (16, capacity, 128)


def test_native_keeps_a_snapshot_per_token() -> None:
    assert nbytes("native", QWEN, Window(max_len=4)) == {"snapshots": 4 * 2 * 2**20, "winner": 4}


def test_step_ends_are_kept_where_replay_must_round_at_them() -> None:
    for store, wanted in (("fp32", False), ("bf16", True), ("nvfp4", True)):
        g = geometry("gdn", store)
        assert ("ends" in nbytes("checkpointing", g, Window(max_len=4))) == wanted
        assert "ends" not in nbytes("checkpointing", g, Window(max_len=4, mode=Mode.FAST))
        assert "ends" not in nbytes("every-step", g, Window(max_len=4))


def test_nvfp4_counts_its_scales() -> None:
    """Half a byte a value, one e4m3 byte per 16, one fp32 per head."""
    g = geometry("gdn", "nvfp4")
    values = 4 * 8 * 16
    assert nbytes("recover", g, Window(max_len=2))["state"] == values // 2 + values // 16 + 4 * 4


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
def test_what_is_allocated_is_what_is_declared(policy: str, gate: str, store: str) -> None:
    """Emulated formats aside, whose storage is wider than what they stand for."""
    g, w = geometry(gate, store), Window(max_len=3)
    fields = layout.of(policy, g, w)
    pool = StatePool.allocate(fields, g.num_layers, 5)
    for f in fields:
        t = pool[f.name]
        assert t.numel() == 5 * prod(f.shape) * (1 if f.shared else g.num_layers)
        if f.dtype is not DType.NVFP4:
            assert t.element_size() * t.numel() == f.nbytes * 5 * (1 if f.shared else g.num_layers)


@pytest.mark.parametrize("read", READ_DTYPES)
def test_a_read_copy_is_declared_and_records_raw_inputs(read: DType) -> None:
    fields = nbytes("checkpointing", geometry("kda", read_dtype=read), Window(max_len=2))
    assert {"read", "rec_v", "rec_beta", "rec_decay"} <= fields.keys()
    assert "rec_c" not in fields
    with pytest.raises(ValueError, match="read_dtype"):
        layout.of("native", geometry("kda", read_dtype=read), Window(max_len=2))


def test_poison_reaches_every_byte_and_only_the_slots_named() -> None:
    g = geometry("gdn", "bf16", read_dtype=DType.FP8)
    pool = StatePool.allocate(layout.of("checkpointing", g, Window(max_len=2)), 2, 4)
    pool.poison(0x3E, torch.tensor([2]))
    for f in pool.layout:
        raw = pool[f.name].view(torch.uint8) if f.shape else pool[f.name].unsqueeze(-1).view(torch.uint8)
        at = raw if f.shared else raw.transpose(0, 1)
        assert (at[2] == 0x3E).all()
        assert (at[[0, 1, 3]] == 0).all()


def test_copy_moves_everything_durable() -> None:
    """Pending records lost on a move: sgl-project/sglang#38485."""
    g = geometry("kda", "fp16-stochastic", read_dtype=DType.FP8)
    pool = StatePool.allocate(layout.of("checkpointing", g, Window(max_len=2)), 2, 4)
    pool.poison(0x3E, torch.tensor([1]))
    pool.copy(torch.tensor([1]), torch.tensor([3]))
    for f in pool.layout:
        t = pool[f.name] if f.shared else pool[f.name].transpose(0, 1)
        assert f.durable
        assert torch.equal(t[3].float().nan_to_num(), t[1].float().nan_to_num())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: geometry(num_v_heads=5), r"num_v_heads=5 is not a multiple of num_k_heads=2; .* is 4"),
        (lambda: geometry(head_k=0), "head_k=0 must be positive"),
        (lambda: geometry(state_dtype=DType.FP8), "state_dtype=float8_e4m3fn is not one of"),
        (lambda: geometry(stochastic=True), "needs a 16-bit state"),
        (lambda: geometry(gate_lower_bound=-5.0), "KDA's alone"),
        (lambda: Window(max_len=0), "at least one token"),
        (lambda: Window(max_len=4, align=3), "align=3 < max_len=4: .* is 4"),
        (lambda: Window(max_len=4, ring_len=3), "ring_len=3 cannot hold a window of max_len=4; .* is 4"),
        (lambda: Window(max_len=4, ring_len=60), "exceeds 63 records; .* is 59"),
        (lambda: geometry().shard(3), "tp=3 does not divide num_v_heads=4; .* is 2"),
        (lambda: geometry("gdn", num_v_heads=8).shard(4), "tp=4 does not divide num_k_heads=2; .* is 2"),
        (lambda: geometry("mamba2", num_k_heads=4, num_v_heads=12).shard(6), "replicated only where"),
        (lambda: layout.of("nativ", QWEN, Window(max_len=2)), "policy='nativ' is not one of native"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_that_can(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_mamba2_groups_are_replicated_when_tp_exceeds_them() -> None:
    """n_groups = 8 at TP 16: every rank holds one group (vllm-project/vllm#13660)."""
    g = Geometry(
        arch=Arch.MAMBA2,
        num_layers=1,
        num_k_heads=8,
        num_v_heads=128,
        head_k=128,
        head_v=64,
        conv=Conv(channels=128 * 64 + 2 * 8 * 128),
    )
    assert [g.shard(tp).num_k_heads for tp in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    assert g.shard(16).conv.channels == 8 * 64 + 2 * 128
