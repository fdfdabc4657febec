"""The cells of a release's tables in one process: python benchmarks/release.py FILE GROUP [GROUP ..]

FILE is a list of records as `ssmspec bench --json` prints them, written after every cell. A cell that fails is printed
to stderr and left out.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch

from ssmspec import acceptance, presets
from ssmspec.geometry import DType, Mode, Window
from ssmspec.measure import bench, environment, peers
from ssmspec.measure.bench import Timing

GDN, KDA, MAMBA2 = "qwen3.5-4b", "kimi-linear-48b-a3b", "nemotron-3-super-120b-a12b"
RATES = {1: 0.5, 2: 1.0, 4: 0.811, 8: 0.86}  # 1, 2, 3 and 5 accepted
FEWER = 0.682  # at T=8: 3 accepted
STATES = (DType.FP32, DType.BF16)
VLLM = (peers.FUSED, peers.TRITON)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a table."""

    model: str
    policy: str  # or a peer's name
    state: DType
    tokens: int
    batch: int = 256
    ring: int = 16
    mode: Mode = Mode.EXACT
    rate: float | None = None
    fused: bool = True

    def timed(self, bandwidth: float) -> Timing:
        g = replace(presets.load(self.model).geometry, state_dtype=self.state)
        w = Window(max_len=self.tokens, ring_len=self.ring, mode=self.mode)
        accepted = acceptance.from_rate(self.rate or RATES[self.tokens], self.tokens - 1)
        if self.policy in peers.PEERS:
            return peers.run(self.policy, g, w, self.batch, accepted, bandwidth=bandwidth)
        return bench.run(self.policy, g, w, self.batch, accepted, bandwidth=bandwidth, fused=self.fused)


def steps(
    model: str, policies: str, windows: tuple[int, ...] = (2, 4, 8), **rest: int | float | Mode
) -> Iterator[Cell]:
    """Every policy, in every window and state."""
    for t, state, policy in product(windows, STATES, policies.split()):
        yield Cell(model=model, policy=policy, state=state, tokens=t, **rest)  # type: ignore[arg-type]


def rings(batch: int) -> Iterator[Cell]:
    """Checkpointing of GDN: the rings that paid somewhere."""
    for t, ring in ((2, 4), (2, 8), (4, 8)):
        yield from steps(GDN, "checkpointing", (t,), ring=ring, batch=batch)
    yield from steps(GDN, "checkpointing", batch=batch)
    yield from steps(GDN, "checkpointing", batch=batch, mode=Mode.FAST)
    yield from steps(GDN, "checkpointing", (8,), ring=32, batch=batch, mode=Mode.FAST)


def whole(model: str, batch: int) -> Iterator[Cell]:
    """All policies of a model beside its peers."""
    yield from steps(model, " ".join(VLLM if model == GDN else (peers.TRITON, peers.FLASH)), batch=batch)
    yield from steps(model, "every-step", batch=batch)
    if model == GDN:
        yield from rings(batch)
        yield from steps(model, "recover native", batch=batch)
    else:
        yield from steps(model, "checkpointing", batch=batch, mode=Mode.FAST)
        yield from steps(model, "checkpointing", batch=batch, ring=8, windows=(2, 4))
        yield from steps(model, "checkpointing", batch=batch)
        yield from steps(model, "recover native", (4,), batch=batch)


def decode() -> Iterator[Cell]:
    """Windows of one token: standard decode."""
    for model in (GDN, KDA, MAMBA2):
        yield from steps(model, f"{peers.TRITON} {peers.FLASH} every-step", (1,))
        for ring in (8, 16):
            yield from steps(model, "checkpointing", (1,), ring=ring)
        for ring in (16, 32):
            yield from steps(model, "checkpointing", (1,), mode=Mode.FAST, ring=ring)


def fewer() -> Iterator[Cell]:
    """GDN at T=8 where fewer are accepted."""
    yield from steps(GDN, f"{' '.join(VLLM)} every-step checkpointing", (8,), rate=FEWER)
    yield from steps(GDN, "checkpointing", (8,), rate=FEWER, mode=Mode.FAST)
    yield from steps(GDN, "checkpointing", (8,), rate=FEWER, ring=32, mode=Mode.FAST)


def smaller(batch: int) -> Iterator[Cell]:
    """GDN where a batch is small: the policies that are advised."""
    yield from steps(GDN, f"{' '.join(VLLM)} every-step", batch=batch)
    yield from steps(GDN, "checkpointing", batch=batch, mode=Mode.FAST)
    yield from steps(GDN, "checkpointing", (2, 4), batch=batch, ring=8)
    if batch == 1:
        yield from steps(GDN, "recover", batch=batch)


def pieces() -> Iterator[Cell]:
    """Exact layers of GDN in a launch for every piece."""
    for batch in (256, 1):
        yield from steps(GDN, "every-step checkpointing", (4,), batch=batch, ring=8, fused=False)


GROUPS: dict[str, Callable[[], Iterator[Cell]]] = {
    "gdn": partial(whole, GDN, 256),
    "kda": partial(whole, KDA, 256),
    "mamba2": partial(whole, MAMBA2, 256),
    **{f"gdn-{batch}": partial(smaller, batch) for batch in (128, 32, 8, 1)},
    "decode": decode,
    "fewer": fewer,
    "pieces": pieces,
}


def rows(cells: Iterator[Cell], bandwidth: float) -> Iterator[dict[str, object]]:
    for cell in cells:
        try:
            t = cell.timed(bandwidth)
        except Exception as error:  # one cell's, and there are many
            sys.stderr.write(f"{cell}: {error!r}\n")
            continue
        sys.stderr.write(f"{cell.model} {t.policy} {t.mode} {t.state_dtype} T={cell.tokens} L={t.ring} B={t.batch}"
                         f" layer {t.layer_us} core {t.core_us and t.core_us.median} {t.absent or t.refused or ''}\n")  # fmt: skip
        yield asdict(t) | {"layer_us": t.layer_us, "share": t.share, "model": cell.model}
        torch.cuda.empty_cache()


def main(target: str, *names: str) -> None:
    records: list[dict[str, object]] = []
    bandwidth = max(bench.copy_bandwidth() for _ in range(3))
    for name in names:
        timings: list[dict[str, object]] = []
        record = {
            "schema": 3,
            "command": f"python benchmarks/release.py {target} {name}",
            "device": torch.cuda.get_device_name(),
            "vllm": environment.installed("vllm"),
            "environment": asdict(environment.record()),
            "timings": timings,
        }
        records.append(record)
        for row in rows(GROUPS[name](), bandwidth):
            timings.append(row)
            Path(target).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
