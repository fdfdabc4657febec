"""What Nsight Compute counts in whole layers, DRAM bytes beside those that measure/traffic predicts, as JSON.

python benchmarks/counters.py MODEL POLICY MODE STATE T RING RATE BATCH, for instance:
qwen3.5-4b checkpointing exact float32 4 8 0.811 256
"""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace

from ssmspec import acceptance, presets
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import DType, Geometry, Mode, Window
from ssmspec.measure import traffic

LAYERS, STEPS = 2, 6
SUMS = {
    "read_bytes": "dram__bytes_read.sum",
    "write_bytes": "dram__bytes_write.sum",
    "ns": "gpu__time_duration.sum",
}
SHARES = {
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_elapsed",
    "l1": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}


def profiled(model: str, policy: str, *rest: str) -> None:
    """Steps of a rig that has run a cycle before, between the profiler's marks."""
    import torch

    from ssmspec.measure.rig import Rig

    *rest, batch = rest
    g, w, accepted = shape(model, *rest)
    one = replace(g, num_layers=LAYERS)
    rig = Rig(policy, one, w, int(batch), accepted, steps=16, seed=0, device="cuda", backend="triton")
    rig.spread()
    rig.cycle()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for i in range(STEPS):
        rig.verify(i)
        rig.accept()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def shape(
    model: str, mode: str, state: str, t: str, ring: str, rate: str
) -> tuple[Geometry, Window, Acceptance]:
    g = replace(presets.load(model).geometry, state_dtype=DType(state))
    w = Window(max_len=int(t), ring_len=int(ring), mode=Mode(mode))
    return g, w, acceptance.from_rate(float(rate), w.max_len - 1)


def launches(*arguments: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Every kernel launch. Caches stay as they are, as in a step that is not profiled."""
    ncu = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    metrics = SUMS | SHARES
    form = ["--metrics", ",".join(metrics.values()), "--csv", "--page", "raw", "--print-units", "base"]
    run = [*ncu, *form, sys.executable, __file__, "inside", *arguments]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    for row in csv.DictReader(line for line in lines if line.startswith('"')):
        if row["ID"]:  # the row of units has none
            yield (
                row["Kernel Name"],
                {name: float(row[metric].replace(",", "")) for name, metric in metrics.items()},
            )


def kernels(*arguments: str) -> dict[str, dict[str, float]]:
    """Sums over all launches of a kernel, and its shares of what the GPU could do, weighted by time."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("launches", *SUMS, *SHARES), 0.0))
    for name, row in launches(*arguments):
        total = found[name.split("(")[0][:80]]
        total["launches"] += 1
        for key in SUMS:
            total[key] += row[key]
        for key in SHARES:
            total[key] += row[key] * row["ns"]
    return {k: v | {key: v[key] / v["ns"] for key in SHARES} for k, v in found.items()}


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        profiled(*sys.argv[2:])
    else:
        model, policy, *rest, batch = sys.argv[1:]
        g, w, accepted = shape(model, *rest)
        predicted = traffic.of(policy, g, w, accepted, fused=False)
        times = LAYERS * STEPS * int(batch)
        found = kernels(*sys.argv[1:])
        sys.stdout.write(json.dumps({
            "command": f"python benchmarks/counters.py {' '.join(sys.argv[1:])}",
            "model": model, "policy": policy, "mode": str(w.mode), "state_dtype": str(g.state_dtype),
            "draft": w.max_len - 1, "ring": w.limit, "batch": int(batch), "layers": LAYERS, "steps": STEPS,
            "measured_bytes": sum(k["read_bytes"] + k["write_bytes"] for k in found.values()),
            "predicted_bytes": predicted.total * times, "predicted_parts": asdict(predicted.parts), "kernels": found,
        }, indent=1) + "\n")  # fmt: skip
