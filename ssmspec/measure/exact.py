"""Exactness, computed and then checked: which policy gives native's bits, and how far away the others are."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.measure.difference import Error, Tally
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime import events

ORACLE = "oracle"


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Whether outputs and settled states must be bit-equal to native's, and what speaks against it."""

    outputs: bool
    states: bool
    why: str = ""

    @property
    def equal(self) -> bool:
        return self.outputs and self.states


def expected(policy: str, g: Geometry, w: Window) -> Expected:
    """Computed from what is recorded, in which order it is summed, and where the state is rounded."""
    if policy == "native":
        return Expected(outputs=True, states=True)
    fast = w.mode is Mode.FAST
    raw = g.arch is Arch.MAMBA2 or g.read_dtype is not None  # records do not depend on the state
    lossy = g.record_dtype is not DType.FP32 and not raw
    flushes = policy == "checkpointing" and g.state_dtype is not DType.FP32
    at_flush = flushes and not layout.rounds_at_ends(policy, g, w)
    reasons = [
        text
        for holds, text in (
            (lossy, f"{g.record_dtype} records lose bits"),
            (fast, "matrix products sum in another order"),
            (at_flush, f"the {g.state_dtype} state is rounded at a flush, not at every step's end"),
            (g.read_dtype is not None, f"outputs read the {g.read_dtype} copy"),
        )
        if holds
    ]
    states = not (lossy or at_flush or (fast and not raw))
    outputs = states and not fast and g.read_dtype is None
    return Expected(outputs=outputs, states=states, why="; ".join(reasons))


@dataclass(frozen=True, kw_only=True)
class First:
    """The first place where a policy left native."""

    step: int  # speculative steps played before it, this one included
    tokens: int  # accepted tokens of the request before it
    request: str
    layer: int
    field: str


@dataclass(frozen=True, kw_only=True)
class Exactness:
    """One policy against native on the same life, and both against native in float64."""

    policy: str
    mode: Mode
    state_dtype: DType
    expected: Expected
    outputs: Tally
    states: Tally
    first: First | None
    error: Error  # of settled states
    native_error: Error

    @property
    def equal(self) -> bool:
        return not (self.outputs.different or self.states.different)

    @property
    def ok(self) -> bool:
        """What must be equal is."""
        outputs_ok = not (self.expected.outputs and self.outputs.different)
        return outputs_ok and not (self.expected.states and self.states.different)


def reduced(g: Geometry) -> Geometry:
    """Two layers, a group of heads and 16 rows of a geometry: layers, heads and rows of S do not mix."""
    h, v = 1 if g.group > 1 else min(2, g.num_k_heads), min(16, g.head_v)
    hv = h * min(g.group, 2)
    conv = replace(g.conv, channels=2 * h * g.head_k + hv * v)
    return replace(g, num_layers=2, num_k_heads=h, num_v_heads=hv, head_v=v, conv=conv)


def life(w: Window, *, requests: int, steps: int, seed: int) -> Iterator[events.Event]:
    """Requests of mixed lengths, prefilled in chunks, then ``steps`` ragged windows with random acceptance.

    Every eighth step a fork of each request is settled and looked at, which leaves the request as it is.
    """
    rng, names = random.Random(seed), [chr(ord("a") + i) for i in range(requests)]
    for i, name in enumerate(names):
        yield events.Admit(request=name, prompt=5 + 6 * i, text=i)
        yield events.Prefill(chunks={name: 4 + 6 * i})
        yield events.Prefill(chunks={name: 1})
    for step in range(1, steps + 1):
        rng.shuffle(names)
        windows = {name: rng.randint(1, w.max_len) for name in names}
        yield events.Verify(windows=windows, padding=step % 2)
        yield events.Accept(accepted={name: rng.randint(1, n) for name, n in windows.items()})
        for name in names if step % 8 == 0 or step == steps else []:
            yield events.Fork(request=name, to=f"{name}'")
            yield events.Free(request=f"{name}'")


class _Judge:
    """Collects what one lockstep shows, per contender."""

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.step = 0
        self.outputs = {c.name: Tally() for c in contenders}
        self.states = {c.name: Tally() for c in contenders}
        self.first: dict[str, First] = {}
        self.errors = {c.name: Error() for c in contenders}
        self.native_error = Error()
        self._oracle: dict[tuple[str, int, int], Pair] = {}

    def __call__(self, pair: Pair) -> None:
        a, b, name = pair.native, pair.other, pair.contender
        if name == ORACLE:  # the first of the contenders, so its value is at hand for the others
            self._oracle[a.request, a.layer, a.tokens] = pair
            if a.what == "state":
                self.native_error = self.native_error.add(a.value, b.value)
            return
        tallies = self.outputs if a.what == "output" else self.states
        before = tallies[name].different
        tallies[name] = tallies[name].add(a.value, b.value)
        if tallies[name].different > before and name not in self.first:
            self.first[name] = First(
                step=self.step, tokens=a.tokens, request=a.request, layer=a.layer, field=a.what
            )
        if a.what == "state":
            oracle = self._oracle[a.request, a.layer, a.tokens].other.value
            self.errors[name] = self.errors[name].add(b.value, oracle)


def compare(
    g: Geometry,
    windows: Sequence[Window],
    names: Sequence[str] = layout.POLICY_NAMES,
    *,
    requests: int = 3,
    steps: int = 64,
    seed: int = 0,
    backend: str = "torch",
    progress: Callable[[str], None] = lambda text: None,
) -> list[Exactness]:
    """Play one life under native and under each of ``names`` in each window's mode; native itself comes first.

    ``windows`` differ in mode only. A policy that cannot serve the geometry raises ValueError.
    """
    plain = replace(g, read_dtype=None)
    native = Contender(name="native", policy="native", g=plain, w=windows[0])
    oracle = Contender(
        name=ORACLE,
        policy="native",
        g=replace(plain, state_dtype=DType.FP64, stochastic=False),
        w=windows[0],
    )
    runs = [
        Contender(name=f"{policy} {w.mode}", policy=policy, g=g, w=w)
        for w in windows
        for policy in names
        if policy != "native"
    ]
    judge = _Judge(runs)
    lockstep = Lockstep(native, [oracle, *runs], judge, seed=seed, backend=backend)
    for event in life(windows[0], requests=requests, steps=steps, seed=seed):
        if isinstance(event, events.Verify):
            judge.step += 1
            progress(f"{g.arch} {g.state_dtype} step {judge.step}/{steps}")
        lockstep.play(event)
    assert not lockstep.unmatched()

    def result(c: Contender) -> Exactness:
        return Exactness(
            policy=c.policy,
            mode=c.w.mode,
            state_dtype=g.state_dtype,
            expected=expected(c.policy, c.g, c.w),
            outputs=judge.outputs.get(c.name, Tally()),
            states=judge.states.get(c.name, Tally()),
            first=judge.first.get(c.name),
            error=judge.errors.get(c.name, judge.native_error),
            native_error=judge.native_error,
        )

    return [result(c) for c in ([native] if "native" in names else []) + runs]
