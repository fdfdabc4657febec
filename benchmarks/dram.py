"""DRAM bytes of whole layers, counted by Nsight Compute, beside those that measure/traffic predicts, as JSON.

python benchmarks/dram.py POLICY MODE STATE T RATE BATCH, for instance: checkpointing exact float32 4 0.81 128
"""

import csv
import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, replace

from ssmspec import acceptance, presets
from ssmspec.acceptance import Acceptance
from ssmspec.geometry import DType, Geometry, Mode, Window
from ssmspec.measure import traffic

LAYERS, STEPS = 2, 6
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def profiled(policy: str, mode: str, state: str, t: str, rate: str, batch: str) -> None:
    """Steps of a rig that has run a cycle before, between the profiler's marks."""
    import torch

    from ssmspec.measure.rig import Rig

    g, w, accepted = shape(mode, state, t, rate)
    where = {"steps": 16, "seed": 0, "device": "cuda", "backend": "triton"}
    rig = Rig(policy, replace(g, num_layers=LAYERS), w, int(batch), accepted, **where)
    rig.cycle()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    for i in range(STEPS):
        rig.verify(i)
        rig.accept()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def shape(mode: str, state: str, t: str, rate: str) -> tuple[Geometry, Window, Acceptance]:
    g = replace(presets.load(presets.DEFAULT).geometry, state_dtype=DType(state))
    return g, Window(max_len=int(t), mode=Mode(mode)), acceptance.from_rate(float(rate), int(t) - 1)


def counted(*arguments: str) -> dict[str, dict[str, float]]:
    """MB read and written by each kernel in all steps. Caches stay as they are, as in a step that is not profiled."""
    ncu = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    form = ["--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--print-units", "base"]
    run = [*ncu, *form, sys.executable, __file__, "inside", *arguments]
    lines = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    table = csv.DictReader(line for line in lines if line.startswith('"'))
    bytes_of: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(METRICS, 0.0))
    for row in table:
        if row["ID"]:  # the row of units has none
            for metric in METRICS:
                bytes_of[row["Kernel Name"]][metric] += float(row[metric].replace(",", "")) / 1e6
    return dict(bytes_of)


if __name__ == "__main__":
    if sys.argv[1] == "inside":
        profiled(*sys.argv[2:])
    else:
        policy, *rest, batch = sys.argv[1:]
        kernels = counted(*sys.argv[1:])
        g, w, accepted = shape(*rest)
        predicted = {
            name: traffic.of(policy, g, w, accepted, fused=fused)
            for name, fused in (("fused", True), ("apart", False))
        }
        times = LAYERS * STEPS * int(batch) / 1e6
        sys.stdout.write(json.dumps({
            "arguments": sys.argv[1:], "layers": LAYERS, "steps": STEPS,
            "measured_mb": sum(sum(k.values()) for k in kernels.values()),
            "predicted_mb": {name: t.total * times for name, t in predicted.items()},
            "predicted_parts": asdict(predicted["apart"].parts), "kernels_mb": kernels,
        }, indent=1) + "\n")  # fmt: skip
