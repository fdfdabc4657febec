"""Random lives: a setup, and events in a legal order, both drawn from a seed."""

import random
from collections.abc import Iterable, Iterator

from ssmspec.geometry import Arch, Conv, DType, Geometry, Mode, Window
from ssmspec.measure.ledger import Ledger
from ssmspec.runtime import events as ev
from ssmspec.runtime.setup import Device, Setup

WHOLE = 1 << 12  # a chunk that no prompt of a life exceeds

_WEIGHTS = {
    "verify": 36,
    "accept": 32,
    "prefill": 12,
    "admit": 6,
    **dict.fromkeys(("move", "resume", "restore", "fork", "offload"), 3),
    **dict.fromkeys(("flush", "recompute", "preempt", "free"), 2),
    "abort": 1,
}


class Life:
    """Draws events; every one is legal when it comes. ``drops``: windows are dropped now and then."""

    def __init__(self, setup: Setup, rng: random.Random, *, lossy: bool) -> None:
        self.w, self.rng, self.ledger = setup.window, rng, Ledger(setup.slots, lossy=lossy)
        self.drawn = 0
        self.running: list[str] = []  # rows of the last verify

    def events(self, n: int) -> Iterator[ev.Event]:
        """``n`` events, and those that close every window and free every request that can be."""
        while self.drawn < n:
            yield from self._tell(self._some(self.rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0]))
        while self.ledger.open:
            yield from self._tell([self._accept()])
        for name in [*self.ledger.requests]:
            yield from self._tell([ev.Free(request=name)])

    def _tell(self, wanted: Iterable[ev.Event | None]) -> Iterator[ev.Event]:
        for e in wanted:
            legal = e and self.ledger.repair(e)
            if legal:
                self.ledger.apply(legal)
                self.drawn += 1
                yield legal

    def _some(self, kind: str) -> Iterator[ev.Event | None]:
        rng, ledger = self.rng, self.ledger
        match kind:
            case "admit":
                longest = 3 * max(4, self.w.align)
                yield ev.Admit(
                    request=f"r{self.drawn}",
                    prompt=min(rng.randint(1, longest) for _ in range(2)),  # most are short: steps count
                    text=rng.randint(0, 2),
                    reuse=rng.random() < 0.8,
                )
            case "prefill":
                rows = [r for r in ledger.named(decoding=False) if ledger.requests[r].missing]
                chunk = rng.choice((1, 2, 5, WHOLE))
                yield ev.Prefill(chunks={r: chunk for r in rows if rng.random() < 0.7})
            case "verify":
                yield self._verify()
            case "accept":
                yield self._accept()
            case (
                "recompute"
            ):  # what steps made of the state must be what the prompt path makes of the same tokens
                for name in ledger.named()[:1]:
                    flush = ev.Flush(request=name)
                    yield from (flush, ev.Preempt(request=name), ev.Resume(request=name))
                    yield from (ev.Prefill(chunks={name: WHOLE}), flush)
            case _:
                yield self._one(kind)

    def _verify(self) -> ev.Event | None:
        if len(self.ledger.open) > 2:
            return None
        idle = self.ledger.named()
        rows = [r for r in self.running if r in idle]
        if not rows or self.rng.random() < 0.2:  # else the same go on, as a server's do
            rows = self.rng.sample(idle, self.rng.randint(min(1, len(idle)), min(3, len(idle))))
        self.running = rows
        windows = {r: self.rng.randint(1, self.w.max_len) for r in rows}
        return ev.Verify(windows=windows, padding=self.rng.choice((0, 0, 1, 3)), salt=self.drawn)

    def _accept(self) -> ev.Event:
        rng, rows = self.rng, self.ledger.open[0] if self.ledger.open else {}
        return ev.Accept(
            accepted={r: 0 if rng.random() < 0.1 else rng.randint(1, n) for r, n in rows.items()},
            force_flush=[r for r in rows if rng.random() < 0.1],
            boundary={r: how for r in rows if (how := rng.choice(("leave", "copy", "stay"))) != "leave"},
        )

    def _one(self, kind: str) -> ev.Event | None:
        """An event of one request, of those for which it is legal."""
        for name in self.rng.sample([*self.ledger.requests], len(self.ledger.requests)):
            if kind == "fork":
                e: ev.Event = ev.Fork(request=name, to=f"f{self.drawn}")
            elif kind == "offload":
                e = ev.Offload(request=name, settle=self.rng.random() < 0.5)
            else:
                e = ev.EVENTS[kind](request=name)  # type: ignore[call-arg]
            if self.ledger.repair(e):
                return e
        return None


def draw_setup(
    rng: random.Random, backend: str, device: Device = Device.CPU, shapes: random.Random | None = None
) -> Setup:
    """A small shape and a window: any recurrence and gate, any way to store the state that the backend has.

    ``shapes`` draws what a kernel is compiled for, where that should repeat.
    """
    compiled = backend == "triton"
    return Setup(
        geometry=_geometry(shapes or rng, compiled=compiled, large=device is Device.CUDA),
        window=_window(shapes or rng),
        poison=rng.choice((None, 0xFF, 0x3E)),
        slots=rng.randint(4, 9),
        seed=rng.randrange(2**16),
        backend=backend,
        device=device,
    )


def _geometry(rng: random.Random, *, compiled: bool, large: bool) -> Geometry:
    arch, k = rng.choice([*Arch]), rng.choice((16, 64, 128)) if large else 16
    h, v = rng.choice((1, 2)), rng.choice((8, 64, 128) if large else (4, 8))
    hv = h * rng.choice((1, 2))
    states = (DType.FP32, DType.FP32, DType.BF16, DType.FP16, DType.NVFP4)
    state = rng.choice(states[:4] if compiled else states)
    return Geometry(
        arch=arch,
        num_layers=rng.choice((1, 1, 2)),
        num_k_heads=h,
        num_v_heads=hv,
        head_k=k,
        head_v=v,
        conv=Conv(channels=2 * h * k + hv * v, width=rng.choice((2, 3, 4)), dilation=rng.choice((1, 1, 2))),
        act_dtype=rng.choice((DType.BF16, DType.FP16, DType.FP32)),
        state_dtype=state,
        stochastic=not compiled and state in (DType.BF16, DType.FP16) and rng.random() < 0.3,
        record_dtype=rng.choice((DType.FP32,) * 8 + (DType.BF16, DType.FP16)),
        read_dtype=None if compiled else rng.choice((None,) * 9 + (DType.BF16, DType.FP8, DType.NVFP4)),
        gate_lower_bound=-5.0 if arch is Arch.KDA and rng.random() < 0.5 else None,
        dt_softplus=rng.random() < 0.7,
    )


def _window(rng: random.Random) -> Window:
    t = rng.randint(1, 6)
    return Window(
        max_len=t,
        ring_len=rng.choice((None, t, rng.randint(t, 20))),
        align=rng.choice((0, t, rng.randint(t, t + 8))),
        mode=rng.choice((Mode.EXACT,) * 4 + (Mode.FAST,)),
    )
