"""Exactness, computed and then checked: which policy gives native's bits, and how far away the others are."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ssmspec import layout
from ssmspec.geometry import DType, Geometry, Mode, Window
from ssmspec.measure.difference import Error, Tally
from ssmspec.measure.expected import Expected, expected
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime import events
from ssmspec.runtime.setup import Device, Setup, reduced

__all__ = ["Exactness", "Expected", "First", "compare", "expected", "life", "play", "reduced"]

ORACLE = "oracle"


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
            if a.what == "state":
                self._oracle[a.request, a.layer, a.tokens] = pair
                self.native_error = self.native_error.add(a.value, b.value)
            return
        tallies = self.outputs if a.what == "output" else self.states
        before = tallies[name].different
        tallies[name] = tallies[name].add(a.value, b.value)
        if tallies[name].different > before and name not in self.first:
            self.first[name] = First(
                step=self.step, tokens=a.tokens, request=a.request, layer=a.layer, field=a.what
            )
        if a.what == "state" and self._oracle:
            oracle = self._oracle[a.request, a.layer, a.tokens].other.value
            self.errors[name] = self.errors[name].add(b.value, oracle)

    def result(self, c: Contender) -> Exactness:
        return Exactness(
            policy=c.policy,
            mode=c.w.mode,
            state_dtype=c.g.state_dtype,
            expected=expected(c.policy, c.g, c.w, c.backend),
            outputs=self.outputs.get(c.name, Tally()),
            states=self.states.get(c.name, Tally()),
            first=self.first.get(c.name),
            error=self.errors.get(c.name, self.native_error),
            native_error=self.native_error,
        )


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
    """Play one random life under native and under each of ``names`` in each window's mode; native itself comes first.

    ``windows`` differ in mode only. A policy that cannot serve the geometry raises ValueError.
    """
    setup = Setup(geometry=g, window=windows[0], seed=seed, backend=backend, device=Device.of(backend))
    script = life(windows[0], requests=requests, steps=steps, seed=seed)

    def tell(step: int) -> None:
        progress(f"{g.arch} {g.state_dtype} T={windows[0].max_len}: step {step} of {steps}")

    return play(setup, script, [w.mode for w in windows], names, progress=tell)


@torch.inference_mode()
def play(
    setup: Setup,
    script: Iterable[events.Event],
    modes: Sequence[Mode],
    names: Sequence[str] = layout.POLICY_NAMES,
    *,
    oracle: bool = True,
    progress: Callable[[int], None] = lambda step: None,
) -> list[Exactness]:
    """Play any script the same way. Without ``oracle`` the errors are not measured, and windows may be dropped."""
    plain = replace(setup.geometry, read_dtype=None)
    native = Contender(name="native", policy="native", g=plain, w=setup.window, backend=setup.backend)
    double = replace(plain, state_dtype=DType.FP64, stochastic=False)
    runs = [
        replace(
            native,
            name=f"{policy} {mode}",
            policy=policy,
            g=setup.geometry,
            w=replace(setup.window, mode=mode),
        )
        for mode in modes
        for policy in names
        if policy != "native"
    ]
    judge = _Judge(runs)
    reference = replace(native, name=ORACLE, g=double, backend="torch")
    lockstep = Lockstep(native, [*([reference] if oracle else []), *runs], judge, setup)
    for event in script:
        if isinstance(event, events.Verify):
            judge.step += 1
            progress(judge.step)
        lockstep.play(event)
    assert not oracle or not lockstep.unmatched(), "a life closes its windows"
    return [judge.result(c) for c in ([native] if "native" in names else []) + runs]
