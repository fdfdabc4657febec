"""A policy driven step by step, every output checked against an oracle that knows one token at a time and no policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from ssmspec import kernels, layout, policies
from ssmspec.geometry import Arch, Conv, Geometry, Window
from ssmspec.kernels.base import Tokens
from ssmspec.kernels.conv import ConvWindow
from ssmspec.pool import StatePool
from ssmspec.runtime import events as ev
from ssmspec.runtime.content import Content, layer_params
from ssmspec.runtime.engine import Engine, Seen
from ssmspec.runtime.setup import Setup
from ssmspec.step import Commit, Step

W = Window(max_len=4, ring_len=16)
RECORD_POLICIES = ("recover", "every-step", "checkpointing")
RING_POLICIES = ("every-step", "checkpointing")
every_policy = pytest.mark.parametrize("policy", layout.POLICY_NAMES)
record_policies = pytest.mark.parametrize("policy", RECORD_POLICIES)
every_recurrence = pytest.mark.parametrize("arch", [*Arch])


def shape(arch: Arch = Arch.GDN, width: int = 4, **changes: object) -> Geometry:
    """H=2, HV=4, K=V=16, W=4, two layers, fp32 state."""
    values = {
        "arch": arch,
        "num_layers": 2,
        "num_k_heads": 2,
        "num_v_heads": 4,
        "head_k": 16,
        "head_v": 16,
        **changes,
    }
    h, hv, k, v = (values[n] for n in ("num_k_heads", "num_v_heads", "head_k", "head_v"))
    return Geometry(conv=Conv(channels=2 * h * k + hv * v, width=width), **values)


@dataclass(frozen=True)
class Point:
    """S* and conv* after some tokens, and the output of the last."""

    state: Tensor  # [layers, HV, V, K]
    conv: Tensor  # [layers, D, W - 1]
    output: Tensor  # [layers, HV, V]


class Oracle:
    """Tokens one after another from a zero state, straight through the primitive; fp32 state."""

    def __init__(self, g: Geometry, seed: int, backend: str) -> None:
        self.g, self.content = g, Content(g, seed)
        w = Window(max_len=1)
        self.pool = StatePool.allocate((layout.state(g),), g.num_layers, 2)
        self.conv_pool = StatePool.allocate((layout.conv(g.conv, 1, g.act_dtype),), g.num_layers, 2)
        self.kernels = kernels.make(backend, g, w)
        self.layers = [
            policies.base.Layer.of(self.pool, p, self.pool["state"][p.index]) for p in layer_params(g, seed)
        ]
        self.points: dict[tuple[int, ...], Point] = {
            (): Point(
                self.pool["state"][:, 1].clone(),
                self.conv_pool["conv"][:, 1, :, : g.conv.history].clone(),
                torch.empty(0),
            )
        }

    def after(self, ids: Sequence[int]) -> Point:
        key = tuple(ids)
        known = len(key)
        while key[:known] not in self.points:
            known -= 1
        for n in range(known, len(key)):
            self.points[key[: n + 1]] = self._next(self.points[key[:n]], key[n])
        return self.points[key]

    def _next(self, p: Point, token: int) -> Point:
        one, outs, convs = torch.tensor([1]), [], []
        self.pool["state"][:, 1] = p.state
        conv = ConvWindow(self.g.conv, self.conv_pool)
        for layer, (x, a, b) in zip(self.layers, self.content.inputs([[token]], 1), strict=True):
            i = layer.params.index
            convs.append(torch.cat([p.conv[i], x[0].mT], -1)[:, 1:])
            self.conv_pool["conv"][i, 1, :, : self.g.conv.history] = p.conv[i]
            packed = conv.verify(i, Step.of([1], [1], 1), x, self.content.conv_weight[i])
            tokens = Tokens.unpack(self.g, packed, a, b)
            outs.append(self.kernels.verify(layer, tokens, one, one, snapshots=one[:, None])[0, 0])
        return Point(self.pool["state"][:, 1].clone(), torch.stack(convs), torch.stack(outs))


@cache
def oracle(g: Geometry, seed: int, backend: str) -> Oracle:
    return Oracle(g, seed, backend)


class Rig:
    """One policy and its pool. ``tokens`` are the accepted ones of each slot; ids are drawn as they are needed."""

    def __init__(
        self,
        policy: str,
        g: Geometry | None = None,
        w: Window = W,
        *,
        backend: str = "torch",
        num_slots: int = 12,
        poison: int = 0xFF,
        seed: int = 0,
    ) -> None:
        self.g, self.w, self.drawn = g or shape(), w, 0
        fields = (*layout.of(policy, self.g, w), layout.conv(self.g.conv, w.max_len, self.g.act_dtype))
        self.pool = StatePool.allocate(fields, self.g.num_layers, num_slots)
        self.pool.poison(poison)
        self.policy = policies.make(policy, self.g, w, self.pool, layer_params(self.g, seed), backend)
        self.conv, self.content = ConvWindow(self.g.conv, self.pool), Content(self.g, seed)
        self.oracle = oracle(self.g, seed, backend)
        self.tokens: dict[int, list[int]] = {}

    def ids(self, n: int) -> list[int]:
        self.drawn += n
        return [*range(self.drawn - n, self.drawn)]

    def start(self, *slots: int) -> "Rig":
        """Requests without a past."""
        for slot in slots:
            self.policy.start(index(slot), index(slot))
            self.conv.reset(index(slot))
            self.tokens[slot] = []
        return self

    def prefill(self, slot: int, n: int, behind: int = 0) -> Tensor:
        """``n`` prompt tokens in one chunk, with ``behind`` tokens of padding -> out [layers, n, HV, V]."""
        ids, outs, lens = self.ids(n), [], index(n)
        for layer, (x, a, b) in enumerate(self.content.inputs([ids], n + behind)):
            packed = self.conv.prefill(layer, index(slot), lens, x, self.content.conv_weight[layer])
            outs.append(self.policy.prefill(layer, index(slot), lens, Tokens.unpack(self.g, packed, a, b))[0])
        self.policy.advance(index(slot), lens)
        self._equal(torch.stack(outs)[:, :n], self.tokens[slot], ids)
        self.tokens[slot] += ids
        return torch.stack(outs)

    def verify(
        self, rows: Sequence[tuple[int, Sequence[int]]], step: Step | None = None
    ) -> tuple[Step, Tensor]:
        """Windows [(slot, ids)] without checks -> the open step and out [layers, B, T, HV, V]."""
        if step is None:
            step = Step.of([s for s, _ in rows], [len(ids) for _, ids in rows], self.w.max_len)
        outs, ids = [], [ids for _, ids in rows]
        for layer, (x, a, b) in enumerate(self.content.inputs(ids, self.w.max_len)):
            packed = self.conv.verify(layer, step, x, self.content.conv_weight[layer])
            outs.append(self.policy.verify(layer, step, Tokens.unpack(self.g, packed, a, b)))
        return step, torch.stack(outs)

    def accept(self, step: Step, accepted: Sequence[int], **rest: Sequence[int]) -> Commit:
        """Close a step with these counts; ``rest`` as in Step.stage, with the step's own slots and lengths."""
        values: dict[str, Sequence[int]] = {"slots": step.slots.tolist(), "lens": step.lens.tolist(), **rest}
        step.stage(values.pop("slots"), values.pop("lens"), accepted=accepted, **values)
        commit = step.close()
        self.conv.accept(commit)
        self.policy.accept(commit)
        return commit

    def open(self, windows: Mapping[int, int]) -> tuple[Step, dict[int, list[int]]]:
        """Windows {slot: length} of fresh tokens, their outputs checked -> the open step and the tokens."""
        rows = {slot: self.ids(n) for slot, n in windows.items()}
        step, outs = self.verify([*rows.items()])
        for b, (slot, ids) in enumerate(rows.items()):
            self._equal(outs[:, b, : len(ids)], self.tokens[slot], ids)
            assert not outs[:, b, len(ids) :].any(), "outputs behind a window are zero"
        return step, rows

    def step(self, windows: Mapping[int, int], accepted: Mapping[int, int], **rest: Sequence[int]) -> None:
        """A whole step, outputs and then states checked."""
        step, rows = self.open(windows)
        self.accept(step, [accepted[slot] for slot in windows], **rest)
        for slot, ids in rows.items():
            self.tokens[slot] += ids[: accepted[slot]]
        for slot in windows if "next_slots" not in rest else ():
            self.check(slot)

    def look(self, slot: int) -> tuple[Tensor, Tensor]:
        """State and conv window, by settling a copy: the slot itself stays as it is."""
        spare = self.pool.num_slots - 1
        self.pool.copy(index(slot), index(spare))
        self.policy.settle(index(spare))
        return self.settled(spare)

    def settled(self, slot: int) -> tuple[Tensor, Tensor]:
        """State [layers, HV, V, K] and conv inputs [layers, D, W-1] of a settled slot, read in place."""
        states = [self.policy.checkpoint(i)[slot] for i in range(self.g.num_layers)]
        return torch.stack(states), self.conv.field[:, slot, :, : self.g.conv.history].clone()

    def check(self, *slots: int, settled: bool = False) -> None:
        """The slots hold S* and conv* of their accepted tokens, bit for bit."""
        for slot in slots:
            state, conv = self.settled(slot) if settled else self.look(slot)
            wanted = self.oracle.after(self.tokens[slot])
            assert torch.equal(state, wanted.state), f"state of slot {slot}"
            assert torch.equal(conv, wanted.conv), f"conv window of slot {slot}"

    def cursors(self, slot: int) -> dict[str, int]:
        return {f.name: int(self.pool[f.name][slot]) for f in self.pool.layout if f.shared}

    def bytes(self, *slots: int) -> Tensor:
        """Everything that slots hold, as bytes; for a later ``torch.equal``."""
        parts = [
            self.pool[f.name][[*slots]] if f.shared else self.pool[f.name][:, [*slots]]
            for f in self.pool.layout
        ]
        return torch.cat([p.reshape(-1).contiguous().view(torch.uint8) for p in parts])

    def _equal(self, out: Tensor, past: Sequence[int], ids: Sequence[int]) -> None:
        for t in range(len(ids)):
            wanted = self.oracle.after([*past, *ids[: t + 1]]).output
            assert torch.equal(out[:, t], wanted), f"output {t} after {len(past)} tokens"


def engine(
    policy: str,
    events: Iterable[ev.Event] = (),
    backend: str = "torch",
    *,
    g: Geometry | None = None,
    w: Window = W,
    see: Callable[[Seen], None] = lambda seen: None,
    **rest: object,
) -> Engine:
    """An engine in poisoned memory that has played some events."""
    its = {"geometry": g or shape(), "window": w, "slots": 6, "backend": backend, "poison": 0xFF, **rest}
    e = Engine(policy, Setup(**its), see)
    for event in events:
        e.play(event)
    return e


def decoding(name: str = "a", prompt: int = 3) -> list[ev.Event]:
    """A request enters and its prompt is computed."""
    return [ev.Admit(request=name, prompt=prompt), ev.Prefill(chunks={name: prompt})]


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
