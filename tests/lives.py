"""Random lives: every event there is, in legal orders, from a seed."""

import random
from collections.abc import Iterator

from ssmspec.geometry import Window
from ssmspec.runtime import events as ev


class Life:
    """Knows just enough of what is alive to name legal events; the engine judges them."""

    def __init__(self, w: Window, seed: int, drops: bool = True) -> None:
        self.w, self.rng, self.drops = w, random.Random(seed), drops
        self.tokens: dict[str, int] = {}  # decoding requests and prompt lengths
        self.open: list[dict[str, int]] = []
        self.away: dict[str, str] = {}  # preempted or offloaded
        self.count = 0

    def events(self, n: int) -> Iterator[ev.Event]:
        while self.count < n:
            yield from self.some()
        while self.open:
            yield self.accept()
        for name in [*self.tokens]:
            yield self.end(name)

    def some(self) -> Iterator[ev.Event]:
        self.count += 1
        rng, idle = self.rng, [r for r in self.tokens if not any(r in o for o in self.open)]
        choice = rng.random()
        if len(self.tokens) + len(self.away) < 3:
            yield from self.admit()
        elif self.open and (choice < 0.45 or not idle):
            yield self.accept()
        elif idle and choice < 0.75:
            yield self.verify(idle)
        elif self.away and choice < 0.85:
            yield from self.back()
        elif idle:
            yield from self.other(rng.choice(idle))
        elif self.open and choice > 0.97:
            yield self.abort()

    def admit(self) -> Iterator[ev.Event]:
        name, n = f"r{self.count}", self.rng.randint(1, 12)
        yield ev.Admit(request=name, prompt=n, text=self.rng.randint(0, 1))
        yield from self.prompt(name)

    def prompt(self, name: str) -> Iterator[ev.Event]:
        for size in self.rng.choice([[100], [3, 1, 100], [1, 100], [5, 5, 100]]):
            yield ev.Prefill(chunks={name: size})
            if size == 100:
                break
        self.tokens[name] = 1

    def verify(self, idle: list[str]) -> ev.Event:
        rows = self.rng.sample(idle, self.rng.randint(1, len(idle)))
        self.open.append({r: self.rng.randint(1, self.w.max_len) for r in rows})
        return ev.Verify(windows=self.open[-1], padding=self.rng.randint(0, 2))

    def accept(self) -> ev.Event:
        rows, rng = self.open.pop(0), self.rng
        low = 0 if self.drops and rng.random() < 0.15 else 1
        return ev.Accept(
            accepted={r: rng.randint(low, n) for r, n in rows.items()},
            force_flush=[r for r in rows if rng.random() < 0.1],
            boundary={r: rng.choice(["leave", "copy", "stay"]) for r in rows},
        )

    def abort(self) -> ev.Event:
        rows = self.rng.choice([o for o in self.open if o])
        name = self.rng.choice([*rows])
        del rows[name], self.tokens[name]
        return ev.Abort(request=name)

    def end(self, name: str) -> ev.Event:
        del self.tokens[name]
        return ev.Free(request=name)

    def back(self) -> Iterator[ev.Event]:
        name = self.rng.choice([*self.away])
        if self.away.pop(name) == "offload":
            yield ev.Restore(request=name)
            self.tokens[name] = 1
        else:
            yield ev.Resume(request=name)
            yield from self.prompt(name)

    def other(self, name: str) -> Iterator[ev.Event]:
        kind = self.rng.choice(["flush", "move", "fork", "preempt", "offload", "unsettled", "free", "abort"])
        if kind == "flush":
            yield ev.Flush(request=name)
        elif kind == "move":
            yield ev.Move(request=name)
        elif kind == "fork":
            self.tokens[f"{name}.{self.count}"] = 1
            yield ev.Fork(request=name, to=f"{name}.{self.count}")
        elif kind == "preempt":
            del self.tokens[name]
            self.away[name] = "preempt"
            yield ev.Preempt(request=name)
        elif kind in ("offload", "unsettled"):
            del self.tokens[name]
            self.away[name] = "offload"
            yield ev.Offload(request=name, settle=kind == "offload")
        elif kind == "free":
            yield self.end(name)
        else:
            del self.tokens[name]
            yield ev.Abort(request=name)
