"""The page of benchmarks says what the JSON files say."""

import json
from pathlib import Path
from typing import Any

from ssmspec.measure.tables import counters, rendered, tables

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_page_is_generated() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "<!-- bench: " in page
    assert rendered(page, ROOT) == page


def row(policy: str, us: float | None, **rest: Any) -> dict[str, Any]:
    return {
        "policy": policy, "mode": "exact", "state_dtype": "float32", "draft": 3, "ring": 16, "batch": 256,
        "layer_us": us, "share": 0.5, "bandwidth": 4.3e12, "absent": None, "refused": None, **rest,
    }  # fmt: skip


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    environment = {"driver": "NVIDIA Module  580.1  Release Build", "torch": "2.11", "triton": "3.6.0"}
    head = {"command": "ssmspec bench", "device": "NVIDIA H200", "vllm": "0.33.0", "environment": environment}
    return {**head, "timings": rows}


def test_losing_cells_are_as_plain_as_winning_ones() -> None:
    text = tables([record(
        row("vllm-fused-op", 200.0), row("vllm-triton", 300.0), row("recover", 100.0), row("every-step", 400.0),
        row("checkpointing", 12.34, mode="fast"), row("every-step", 500.0, fused=False),
    )])  # fmt: skip
    assert "| recover | 100 (2.00x, 50 %) |" in text
    assert "| every-step | 400 (0.50x, 50 %) |" in text
    assert "| every-step, in pieces | 500 (0.40x, 50 %) |" in text
    assert "| checkpointing, L=16, fast | 12.3 (16.21x, 50 %) |" in text
    assert "| vLLM, Triton kernels | 300 (50 %) |" in text
    assert text.index("fused op |") < text.index("| recover")


def test_what_is_absent_or_refused_is_said() -> None:
    text = tables([record(
        row("vllm-fused-op", None, absent="vllm is not installed"), row("recover", None, refused="states differ"),
    )])  # fmt: skip
    assert "| absent |" in text
    assert "| recover | refused |" in text
    assert "- recover, fp32 T=4, B=256: states differ" in text


def test_columns_are_states_then_windows_and_batches_fall() -> None:
    rows = [
        row("recover", 100.0, state_dtype=s, draft=k, batch=b)
        for b in (1, 256) for k in (7, 1) for s in ("bfloat16", "float32")
    ]  # fmt: skip
    text = tables([record(*rows)])
    assert text.index("| B=256, us | fp32 T=2 | fp32 T=8 | bf16 T=2 | bf16 T=8 |") < text.index("| B=1, us |")


def test_the_recurrence_alone_has_a_table_of_its_own() -> None:
    """With the layer's part of the accept; a peer's conv and norm do not count."""
    cores = [
        row(policy, us, model="kda-model", accepted=3.0, core_us={"median": core}, accept_us={"median": accept})
        for policy, us, core, accept in (
            ("vllm-triton", 900.0, 600.0, 0.0), ("flash-linear-attention", None, 500.0, 0.0), ("every-step", 450.0, 240.0, 10.0),
        )
    ]  # fmt: skip
    cores.append(
        row("vllm-fused-op", None, model="kda-model", accepted=3.0, absent="it serves gdn", core_us=None)
    )
    text = tables([record(*cores)], core=True)
    assert "| kda-model, B=256, us | fp32 T=4 (3) |" in text
    assert "| every-step | 250 (2.00x) |" in text
    assert "| vLLM, Triton kernels | 600 |" in text
    assert "fused" not in text
    assert "| flash-linear-attention | core only |" in tables([record(*cores)])


def test_counted_bytes_stand_beside_the_predicted() -> None:
    """Two layers, five steps: a tenth of the sums is a layer's step."""
    small = {
        "launches": 10.0,
        "read_bytes": 1e3,
        "write_bytes": 0.0,
        "ns": 1e4,
        "dram": 1.0,
        "issue": 1.0,
        "fma": 1.0,
        "l1": 1.0,
    }
    large = {
        "launches": 10.0,
        "read_bytes": 1.5e9,
        "write_bytes": 0.6e9,
        "ns": 2e6,
        "dram": 84.6,
        "issue": 30.2,
        "fma": 12.4,
        "l1": 5.0,
    }
    run = row("recover", None, model="m", layers=2, steps=5, measured_bytes=2.1e9, predicted_bytes=2e9,
              kernels={"window": large, "tiny": small})  # fmt: skip
    text = counters([run])
    assert "| m, recover, fp32 T=4, B=256 | | | | | | 210 (+5.0 %) | 200 |" in text
    assert "| `window` | 200 | 85 % | 30 % | 12 % | 5 % | 210 | |" in text
    assert "tiny" not in text


def test_a_block_is_replaced_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(record(row("recover", 100.0))))
    page = "above\n<!-- bench: a.json -->\nold\n<!-- end -->\nbelow\n"
    new = rendered(page, tmp_path)
    assert "old" not in new
    assert new.startswith(
        "above\n<!-- bench: a.json -->\nNVIDIA H200, driver 580.1, torch 2.11, Triton 3.6.0, vLLM 0.33.0:"
    )
    assert new.endswith("<!-- end -->\nbelow\n")
    assert rendered(new, tmp_path) == new
    (tmp_path / "a.json").write_text(
        json.dumps([record(row("recover", 100.0)), record(row("native", 200.0))])
    )
    assert "| native | 200 (50 %) |" in rendered(page, tmp_path)


def test_shares_are_of_the_fastest_copy_on_the_page(tmp_path: Path) -> None:
    """A copy of 8 TB/s beside one table halves the share of a row whose own run copied 4 TB/s."""
    (tmp_path / "a.json").write_text(
        json.dumps(record(row("recover", 100.0) | {"bandwidth": 4e12, "share": 0.9}))
    )
    (tmp_path / "b.json").write_text(
        json.dumps(record(row("native", 100.0) | {"bandwidth": 8e12, "share": 0.7}))
    )
    page = "".join(f"<!-- bench: {name}.json -->\n<!-- end -->\n" for name in "ab")
    new = rendered(page, tmp_path)
    assert "| recover | 100 (45 %) |" in new
    assert "| native | 100 (70 %) |" in new
