"""Traffic: bytes per layer-step follow from the layout, and from a flush cadence that is simulated."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from ssmspec import layout
from ssmspec.acceptance import from_rate
from ssmspec.geometry import Arch, Conv, DType, Geometry, Mode, Window
from ssmspec.measure import traffic
from ssmspec.presets import PRESETS


def fp32(name: str) -> Geometry:
    return replace(PRESETS[name].geometry, state_dtype=DType.FP32)


def sixteen(g: Geometry) -> Geometry:
    return replace(g, state_dtype=DType.BF16)


QWEN35_4B = fp32("qwen3.5-4b")
QWEN35_122B = fp32("qwen3.5-122b-a10b")
KIMI_LINEAR_48B = fp32("kimi-linear-48b-a3b")
NEMOTRON3_SUPER = fp32("nemotron-3-super-120b-a12b")
KIB = 1024
S = 32 * 128 * 128 * 4  # one fp32 state of Qwen3.5-4B
RECORD = 4 * 32 * 128 + 16 * (2 * 128 + 4) + 4 * 32  # its c, raw k with 1/norm, decay


@dataclass(frozen=True)
class Listed:
    counts: tuple[int, ...]
    mean: float = 0.0

    def sample(self, n: int, seed: int) -> Iterator[int]:
        return (self.counts[i % len(self.counts)] for i in range(n))


# KiB per layer-step, worked out from the formulas by hand and apart from this code: L = 16 where no other is
# named, draft acceptance 0.8, fused activations. The checkpointing column leaves out the records that a flush folds.
# KDA's records hold fp32 decays: 8 KiB more each than its raw gates would, of 2.952 read + 4 written by recover and
# every-step, and of (1 + 2 + 3 + 4) / 5 times 2.952 read + 4 written by checkpointing.
TABLE = [
    (QWEN35_4B, 2, 16, 6320, 6397, 4349, 2648),
    (QWEN35_4B, 4, 16, 10512, 6557, 4509, 2930),
    (QWEN35_4B, 6, 16, 14705, 6708, 4660, 3295),
    (QWEN35_4B, 8, 16, 18897, 6855, 4807, 3741),
    (sixteen(QWEN35_4B), 2, 16, 3248, 3325, 2301, 1496),
    (sixteen(QWEN35_4B), 4, 16, 5392, 3485, 2461, 1701),
    (sixteen(QWEN35_4B), 6, 16, 7537, 3636, 2612, 1930),
    (sixteen(QWEN35_4B), 8, 16, 9681, 3783, 2759, 2205),
    (QWEN35_122B, 4, 16, 20921, 12981, 8885, 5716),
    (QWEN35_122B, 8, 16, 37626, 13492, 9396, 7272),
    (QWEN35_122B, 8, 32, 37626, 13492, 9396, 6209),
    (sixteen(QWEN35_122B), 4, 16, 10681, 6837, 4789, 3258),
    (KIMI_LINEAR_48B, 4, 16, 10648, 6776 + 56, 4728 + 56, 3184 + 79),
    (sixteen(KIMI_LINEAR_48B), 4, 16, 5528, 3704 + 56, 2680 + 56, 1955 + 79),
    (NEMOTRON3_SUPER, 4, 16, 20869, 12806, 8710, 5487),
    (sixteen(NEMOTRON3_SUPER), 4, 16, 10629, 6662, 4614, 3030),
]
IDS = [f"{g.arch}-{g.num_v_heads}-{g.state_dtype}-T{t}-L{limit}" for g, t, limit, *_ in TABLE]


@pytest.mark.parametrize(("g", "t", "limit", "native", "recover", "every", "ckpt"), TABLE, ids=IDS)
def test_every_model_moves_the_bytes_of_the_table(
    g: Geometry, t: int, limit: int, native: int, recover: int, every: int, ckpt: int
) -> None:
    w, rate = Window(max_len=t, ring_len=limit), from_rate(0.8, t - 1)
    for policy, kib in (("native", native), ("recover", recover), ("every-step", every)):
        assert traffic.of(policy, g, w, rate, steps=4000).total / KIB == pytest.approx(kib, rel=0.01)

    form = traffic.closed_form("checkpointing", g, w, rate.mean)
    # a flush folds 2.952 records; KDA's, 40 KiB each with fp32 decays, are 5.8 % of what a 16-bit state moves
    most = 0.06 if g.arch is Arch.KDA else 0.05
    assert 0 < form.total / KIB / ckpt - 1 <= most
    folded = rate.mean * sum(form.record_fields.values())  # na records in n steps
    assert (form.total - folded) / KIB == pytest.approx(ckpt, rel=0.002)


@pytest.mark.parametrize(
    ("g", "policy", "ratio"),
    [
        (QWEN35_4B, "recover", 1.60),
        (QWEN35_4B, "every-step", 2.33),
        (QWEN35_122B, "recover", 1.61),
        (KIMI_LINEAR_48B, "every-step", 10648 / (4728 + 56)),
        (sixteen(NEMOTRON3_SUPER), "recover", 1.60),
    ],
)
def test_the_share_of_native_is_the_tables_ratio(g: Geometry, policy: str, ratio: float) -> None:
    moved = traffic.of(policy, g, Window(max_len=4), from_rate(0.8, 3), steps=4000)
    assert 1 / moved.vs_native == pytest.approx(ratio, abs=0.006)


def test_native_is_its_own_measure() -> None:
    assert traffic.closed_form("native", QWEN35_4B, Window(max_len=4), 3).vs_native == 1


def test_recover_at_one_draft_moves_more_than_native() -> None:
    assert traffic.of("recover", QWEN35_4B, Window(max_len=2), from_rate(0.8, 1)).vs_native > 1


def test_state_and_records_by_hand() -> None:
    w, a = Window(max_len=4, ring_len=16), 3
    moved = {p: traffic.closed_form(p, QWEN35_4B, w, a) for p in layout.POLICY_NAMES}
    got = {p: (m.reads.state, m.writes.state, m.reads.records, m.writes.records) for p, m in moved.items()}
    assert got["native"] == (S, 4 * S, 0, 0)
    assert got["recover"] == (2 * S, S, 3 * RECORD, 4 * RECORD)
    assert got["every-step"] == (S, S, 3 * RECORD, 4 * RECORD)
    # verifies find 3, 6, 9, 12 and 15 records, and the fifth folds
    assert got["checkpointing"] == pytest.approx((S, S / 5, 9 * RECORD, 4 * RECORD))


def test_layer_inputs_by_hand() -> None:
    w = Window(max_len=4)
    moved = traffic.closed_form("native", QWEN35_4B, w, 1)
    assert moved.reads.activations == 2 * 4 * (8192 + 2 * 32 + 4096)  # q, k, v; a, b; z
    assert moved.writes.activations == 2 * 4 * 4096
    assert (moved.reads.conv, moved.writes.conv) == (2 * 8192 * 3, 2 * 8192 * 6)
    kda = traffic.closed_form("native", KIMI_LINEAR_48B, w, 1)
    assert kda.reads.activations == 2 * 4 * (12288 + 32 * 128 + 32 + 4096)
    mamba = traffic.closed_form("native", NEMOTRON3_SUPER, w, 1)
    assert mamba.reads.activations == 2 * 4 * (10240 + 128 + 8192)


def test_a_dilated_conv_keeps_more_inputs() -> None:
    g = replace(QWEN35_4B, conv=Conv(channels=8192, dilation=3))
    moved = traffic.closed_form("native", g, Window(max_len=4), 1)
    assert (moved.reads.conv, moved.writes.conv) == (2 * 8192 * 9, 2 * 8192 * 12)


@pytest.mark.parametrize(("g", "kib"), [(QWEN35_4B, 192), (QWEN35_122B, 320)])
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
def test_three_launches_instead_of_one_cost_the_intermediate_tensors(
    policy: str, g: Geometry, kib: int
) -> None:
    w = Window(max_len=4)
    fused, unfused = (traffic.closed_form(policy, g, w, 3, fused=fused).total for fused in (True, False))
    assert unfused - fused == pytest.approx(kib * KIB)


def test_fast_mode_norms_in_its_window_and_hands_over_the_probes_of_decays_per_channel() -> None:
    """Mamba2's norm is of several heads. KDA: 8 probes, the keys of 3 tokens, and in one of 5 steps a decay, of 128 fp32."""

    def between(g: Geometry) -> float:
        w = Window(max_len=4, ring_len=16, mode=Mode.FAST)
        fused, unfused = (
            traffic.closed_form("checkpointing", g, w, 3, fused=fused).total for fused in (True, False)
        )
        return unfused - fused

    assert between(QWEN35_4B) == pytest.approx(2 * 4 * 8192 * 2)
    assert between(NEMOTRON3_SUPER) == pytest.approx(2 * 4 * (10240 + 8192) * 2)
    vectors = 32 * (8 + 3 + 1 / 5) * 512
    assert between(KIMI_LINEAR_48B) == pytest.approx(2 * (4 * 12288 * 2 + vectors))


def test_cursors_are_read_by_every_layer_and_moved_once() -> None:
    moved = traffic.closed_form("checkpointing", QWEN35_4B, Window(max_len=4), 3)
    assert moved.writes.cursors * 24 == pytest.approx(8)  # base and count
    assert moved.reads.cursors * 24 == pytest.approx(24 * 8 + 8)


def test_parts_add_up_and_a_model_step_is_all_layers_of_all_requests() -> None:
    moved = traffic.closed_form("checkpointing", QWEN35_4B, Window(max_len=4), 3)
    parts = moved.parts
    listed = parts.state + parts.records + parts.conv + parts.activations + parts.cursors
    assert listed == pytest.approx(moved.total)
    assert moved.total == moved.read + moved.write
    assert moved.model_step(32) == (24 * 32 * moved.read, 24 * 32 * moved.write)


def test_the_kda_decay_is_a_part_of_its_own() -> None:
    fields = traffic.closed_form("checkpointing", KIMI_LINEAR_48B, Window(max_len=1), 1).record_fields
    assert fields["rec_decay"] == 32 * 128 * 4
    assert sum(fields.values()) == 4 * 32 * 128 + 32 * (2 * 128 + 4) + 4 * 32 * 128
    gdn = traffic.closed_form("checkpointing", QWEN35_4B, Window(max_len=1), 1).record_fields
    assert gdn["rec_decay"] == 32 * 4  # K times less


@pytest.mark.parametrize(
    ("policy", "read", "write"),
    [
        ("recover", 0.25 * S + S, 1.25 * S),
        ("every-step", S, 1.25 * S),
        ("checkpointing", 0.2 * S + 0.8 * 0.25 * S, 0.2 * 1.25 * S),
    ],
)
def test_outputs_read_the_copy_and_a_fold_writes_anchor_and_copy(
    policy: str, read: float, write: float
) -> None:
    g = replace(QWEN35_4B, read_dtype=DType.FP8)
    moved = traffic.closed_form(policy, g, Window(max_len=4, ring_len=16), 3)
    assert (moved.reads.state, moved.writes.state) == pytest.approx((read, write))
    assert "rec_v" in moved.record_fields
    assert moved.native_bytes == traffic.closed_form("native", QWEN35_4B, Window(max_len=4), 3).total


def test_a_verify_flushes_when_its_window_would_not_fit() -> None:
    # the verifies find 0, 4, 8, 12 records; 12 + 4 fits into 16 and 13 + 4 does not
    assert traffic.cadence(16, 4, [4, 4, 4, 1, 2]).flush_fraction == 1 / 5
    assert traffic.cadence(16, 4, [4, 4, 4, 1, 2]).fill == (0 + 4 + 8 + 12 + 13) / 5
    assert traffic.cadence(16, 4, [4, 4, 4, 4, 2, 1]).fill == (0 + 4 + 8 + 12 + 16 + 2) / 6
    assert traffic.cadence(16, 4, [4, 4, 4]).flush_fraction == 0


def test_a_ring_as_long_as_the_window_flushes_at_every_step() -> None:
    w = Window(max_len=8, ring_len=8)
    moved = traffic.closed_form("checkpointing", QWEN35_4B, w, 3)
    assert moved.cadence == traffic.closed_form("every-step", QWEN35_4B, w, 3).cadence
    assert moved.cadence.flush_fraction == 1


def test_the_random_cadence_is_that_of_the_markov_chain() -> None:
    # T=2, L=3, counts 1 and 2 alike: a cycle finds 2, or 1 and then 2 or 3; 1.5 steps on average
    c = traffic.cadence(3, 2, from_rate(0.5, 1).sample(40_000, seed=1))
    assert c.accepted == pytest.approx(1.5, rel=0.01)
    assert c.flush_fraction == pytest.approx(2 / 3, rel=0.01)
    assert c.fill == pytest.approx((0.5 * 2 + 0.5 * (1 + 2.5)) / 1.5, rel=0.01)


@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
@pytest.mark.parametrize("arch", list(Arch))
@pytest.mark.parametrize(("t", "limit", "a"), [(1, 16, 1), (2, 16, 2), (4, 16, 3), (4, 8, 1), (8, 32, 5)])
def test_the_closed_form_is_the_simulation_of_constant_acceptance(
    policy: str, arch: Arch, t: int, limit: int, a: int
) -> None:
    g = Geometry(
        arch=arch, num_layers=3, num_k_heads=2, num_v_heads=4, head_k=16, head_v=32, conv=Conv(channels=192)
    )
    w = Window(max_len=t, ring_len=limit)
    form = traffic.closed_form(policy, g, w, a)
    assert traffic.of(policy, g, w, Listed((a,))).total == pytest.approx(form.total, rel=0.005)


def test_a_seed_decides_the_process() -> None:
    w, rate = Window(max_len=4), from_rate(0.8, 3)
    one, same, other = (
        traffic.of("checkpointing", QWEN35_4B, w, rate, steps=500, seed=s).total for s in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.NVFP4])
def test_a_snapshot_is_a_state(dtype: DType) -> None:
    g = replace(QWEN35_4B, state_dtype=dtype)
    moved = traffic.closed_form("native", g, Window(max_len=4), 1)
    assert moved.reads.state == layout.state(g).nbytes


def test_impossible_requests_are_refused_by_name() -> None:
    g, w = QWEN35_4B, Window(max_len=4)
    with pytest.raises(ValueError, match="policy='rewind'"):
        traffic.of("rewind", g, w, Listed((1,)))
    with pytest.raises(ValueError, match="read_dtype"):
        traffic.of("native", replace(g, read_dtype=DType.FP8), w, Listed((1,)))
    with pytest.raises(ValueError, match=r"count of 5 is outside 1\.\.4"):
        traffic.of("checkpointing", g, w, Listed((4, 5)))
    with pytest.raises(ValueError, match=r"count of 0 is outside 1\.\.4"):
        traffic.of("native", g, w, Listed((0,)))
    with pytest.raises(ValueError, match="steps=0"):
        traffic.of("native", g, w, Listed((1,)), steps=0)
    with pytest.raises(ValueError, match=r"a=4\.5"):
        traffic.closed_form("checkpointing", g, w, 4.5)


def test_traffic_needs_no_torch() -> None:
    code = "import sys; import ssmspec.measure.checks as c; c.traffic_checks(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
