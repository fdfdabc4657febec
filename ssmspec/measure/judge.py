"""Any script under any policies against native: what is wrong with it, if anything."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ssmspec.geometry import DType, Mode
from ssmspec.measure.expected import expected
from ssmspec.measure.ledger import repaired
from ssmspec.measure.lockstep import Contender, Lockstep, Pair
from ssmspec.runtime import events as ev
from ssmspec.runtime.setup import Setup


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong: a kind that survives shrinking, and a sentence."""

    kind: str
    text: str
    policy: str | None = None  # whose it is, where one alone is wrong


class _Wrong(Exception):
    def __init__(self, kind: str, text: str, policy: str | None = None) -> None:
        super().__init__(text)
        self.failure = Failure(kind=kind, text=text, policy=policy)


class Judge:
    """Raises at the first pair that is not what ``exact.expected`` says, and where a recomputed state is another."""

    def __init__(self, setup: Setup, contenders: Sequence[Contender]) -> None:
        self.expected = {c.name: expected(c.policy, c.g, c.w, c.backend) for c in contenders}
        self.near = {c.name for c in contenders if _only_reordered(c)}
        self.functional = setup.geometry.state_dtype is DType.FP32  # of the tokens, however they came in
        self.known: dict[tuple[str, str, int, int], torch.Tensor] = {}

    def __call__(self, pair: Pair) -> None:
        a, b = pair.native, pair.other
        where = f"event {pair.event}: {a.what} of {a.request!r}, layer {a.layer}, after {a.tokens} tokens"
        if a.what == "conv" or (a.what == "state" and self.functional):
            before = self.known.setdefault((a.what, a.request, a.layer, a.tokens), a.value)
            if not torch.equal(before, a.value):
                raise _Wrong(f"recomputed {a.what}", f"{where}: native, recomputed, is not what it was")
        e, policy = self.expected[pair.contender], pair.contender
        equal = {"output": e.outputs, "state": e.states, "conv": True}[a.what]
        if equal and not torch.equal(a.value, b.value):
            raise _Wrong(a.what, f"{where}: {policy} is not native's, by {_gap(pair):.2g}", policy)
        if not bool(b.value.isfinite().all()):
            raise _Wrong(f"finite {a.what}", f"{where}: {policy} is not finite", policy)
        if policy in self.near and _gap(pair) > _tolerance(pair):
            raise _Wrong(f"near {a.what}", f"{where}: {policy} is {_gap(pair):.2g} away from native", policy)


def _only_reordered(c: Contender) -> bool:
    """Fast mode without a further loss: matrix products sum in another order."""
    return c.w.mode is Mode.FAST and {c.g.state_dtype, c.g.record_dtype, c.g.read_dtype or DType.FP32} == {
        DType.FP32
    }


def _gap(pair: Pair) -> float:
    gap = (pair.native.value.double() - pair.other.value.double()).abs()
    return float(gap.max()) if gap.numel() else 0.0


def _tolerance(pair: Pair) -> float:
    """Two units in the last place of the largest output, and 2**-14 for sums of fp32 in another order."""
    value = pair.native.value
    largest = max(1.0, float(value.double().abs().max()))
    return largest * (2 * torch.finfo(value.dtype).eps + 2.0**-14)


def contenders(setup: Setup, policies: Sequence[str]) -> tuple[Contender, list[Contender]]:
    """Native the judge, and the policies; native among them plays dropped windows too, and loses their requests."""
    plain = replace(setup.geometry, read_dtype=None)

    def contender(policy: str) -> Contender:
        g = plain if policy == "native" else setup.geometry
        return Contender(name=policy, policy=policy, g=g, w=setup.window, backend=setup.backend)

    return replace(contender("native"), name="the judge"), [contender(p) for p in policies]


@torch.inference_mode()
def play(setup: Setup, policies: Sequence[str], script: Iterable[ev.Event]) -> tuple[int, Failure | None]:
    """Events that were played, and what went wrong with the last of them."""
    played = opened = 0
    native, others = contenders(setup, policies)
    try:
        lockstep = Lockstep(native, others, Judge(setup, others), setup)
        for event in script:
            played += 1
            opened += isinstance(event, ev.Verify) - isinstance(event, ev.Accept)
            lockstep.play(event)
        if not opened and lockstep.unmatched():
            raise _Wrong("unmatched", f"not seen by all: {lockstep.unmatched()[:3]}")
    except _Wrong as wrong:
        return played, wrong.failure
    except Exception as e:  # whatever it is, a legal event raised it
        return played, Failure(kind=type(e).__name__, text=f"event {played}: {type(e).__name__}: {e}")
    return played, None


def check(setup: Setup, policies: Sequence[str], script: Sequence[ev.Event]) -> Failure | None:
    """What a soak says of a script. Native plays along where requests with a dropped window start over."""
    restarts = [*repaired(script, setup.slots, lossy=True)] == [*script]
    native = restarts and setup.geometry.read_dtype is None
    return play(setup, [p for p in policies if p != "native" or native], script)[1]
