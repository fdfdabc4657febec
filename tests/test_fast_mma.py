"""Fast mode's Gluon kernel on the CPU, with products in fp32: its tiles, and its norm, in values."""

import types
from collections import deque
from typing import Any

import gluon_on_cpu
import pytest
import torch
from gluon_on_cpu import Memory, Pointer, Value
from test_hopper import Draw, clone, near
from torch import Tensor

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels.base import History, Layer, Tokens
from ssmspec.kernels.fast_call import Gated
from ssmspec.kernels.norm import GatedNorm
from ssmspec.step import Step

pytest.importorskip("triton.experimental.gluon")

from ssmspec.kernels import fast, fast_mma, fast_norm, fast_store, fast_tile, launch


class Machine(gluon_on_cpu.Machine):
    """With groups of copies, of which the youngest may still be under way, and zeros for what is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: deque[list[tuple[Memory, Value]]] = deque()

    def async_load(self, memory: Memory, pointer: Pointer, mask: Any = None) -> None:
        poison = gluon_on_cpu.POISON.get(memory.data.dtype, float("nan"))
        self.pending.append((memory, pointer.load(mask, 0)))
        memory.data.fill_(poison)

    def commit_group(self) -> None:
        self.groups.append(self.pending)
        self.pending = []

    def wait_group(self, n: int) -> None:
        while len(self.groups) > n:
            self.pending, late = self.groups.popleft(), self.pending
            super().wait_group(0)
            self.pending = late


def where(keep: Any, a: Any, b: Any) -> Any:
    if isinstance(a, Pointer):
        assert a.base.data_ptr() == b.base.data_ptr()
        return Pointer(a.base, torch.where(keep.data, a.offset, b.offset))
    return Value(torch.where(*(torch.as_tensor(gluon_on_cpu.plain(x)) for x in (keep, a, b))))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon_on_cpu, "Machine", Machine)
    for kind, name, member in (
        (Value, "shape", property(lambda x: x.data.shape)),
        (Pointer, "__getitem__", lambda p, at: Pointer(p.base, p.offset[at])),
        (Memory, "permute", lambda m, order: Memory(m.data.permute(order))),
        (Memory, "slice", lambda m, at, n, dim: Memory(m.data.narrow(dim, at, n))),
    ):
        monkeypatch.setattr(kind, name, member, raising=False)
    kernel = gluon_on_cpu.Kernel(fast_mma.window, [fast_tile, fast_store, fast_norm, fast_mma])
    machine = kernel.machine
    own = {
        "product": lambda x, y: Value(x.data.float() @ y.data.float()),
        "mma_v2": lambda x, y, acc, **_: Value(x.data.float() @ y.data.float() + acc.data),
        "tf32_parts": lambda x: (x, x * 0),
        "bf16_parts": lambda x: (x, x * 0, x * 0),
        "_beside": lambda x, y: Value(torch.cat([x.data, y.data], 1)),
        "above": lambda x, y: Value(torch.cat([x.data, y.data], 0)),
        "libdevice": types.SimpleNamespace(
            fast_dividef=lambda x, y: Value(x.data / y.data), fast_expf=lambda x: Value(x.data.exp())
        ),
        "async_load": machine.async_load,
        "async_copy": types.SimpleNamespace(commit_group=machine.commit_group, wait_group=machine.wait_group),
    }
    for function in kernel.functions.values():
        function.__globals__.update(own)
        function.__globals__["gl"].__dict__.update(
            where=where,
            num_warps=lambda: 4,
            join=lambda x, y: Value(torch.stack([x.data, y.data], -1)),
            convert_layout=lambda x, *_, **__: x,
        )
    monkeypatch.setattr(fast_mma, "window", kernel)
    monkeypatch.setattr(fast, "_tuned", lambda *_: True)
    monkeypatch.setattr(fast, "FEW", 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=3)
    )
    monkeypatch.setattr(launch, "REGISTERS_A_PROCESSOR", 256 * 32 * 4)  # a program: each meets several tiles


class Run:
    """Windows over the same states, records and random couplings: this is about what is done with them."""

    SLOTS, LENS, TURNS = [2, 0, 5, 1, 4], [3, 3, 1, 2, 3], [3, 0, 4, 1, 2]

    def __init__(self, arch: Arch, v: int) -> None:
        h, hv, self.t = 3 if arch is Arch.KDA else 1, 3, 3
        self.g = Geometry(
            arch=arch,
            num_layers=1,
            num_k_heads=h,
            num_v_heads=hv,
            head_k=64,
            head_v=v,
            state_dtype=DType.FP32,
        )
        self.draw = Draw(v)
        self.layer, self.x = self.draw.layer(self.g, 6, 8), self.draw.tokens(self.g, 5, self.t)
        counts = torch.tensor([0, 3, 6, 0, 7, 2]).int()
        self.past = History(base=self.draw.ints(8, 6).int(), count=counts, limit=8)
        self.step = Step.of(self.SLOTS, self.LENS, self.t)
        self.couplings: tuple[Any, ...] = ()
        self.shape: Any = None

    def rows(self) -> list[tuple[int, int, int, int, bool]]:
        """(slot, tokens, first record, records, flush), per row."""
        at = zip(self.SLOTS, self.LENS, strict=True)
        rows = [(s, n if s else 0, int(self.past.base[s]), int(self.past.count[s])) for s, n in at]
        return [(s, n, first, count, n > 0 and count + n > 8) for s, n, first, count in rows]

    def couple(
        self, g: object, layer: object, x: object, call: fast_tile.Call, at: object, c: object
    ) -> None:
        self.couplings = self.couplings or tuple(
            None if f is None else self.draw.normal(*f.shape) / 4 for f in call.w[:3]
        )
        self.shape = c
        for field, value in zip(call.w[:3], self.couplings, strict=True):
            if field is not None:
                field.copy_(value)
        for row, (slot, n, first, count, flush) in enumerate(self.rows()):
            numbers = slot << 39 | slot << 19 | flush << 18 | count << 12 | first << 6 | n
            call.w.cursors[self.TURNS[row]] = torch.tensor([numbers, row])

    def __call__(self, x: Tokens) -> tuple[Tensor, Layer]:
        layer, w = clone(self.layer), Window(max_len=self.t, ring_len=8, mode=Mode.FAST)
        verify = fast.make_verify(self.g, w, lambda *_: None, self.couple)
        return verify(layer, x, self.step.slots, self.step.lens, history=self.past), layer


def answered(run: Run, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """One head's outputs [T, V], updates [T, V] and state behind all records [V, K], from the couplings."""
    g, c, x, (slot, n, first, count, _) = run.g, run.shape, run.x, run.rows()[row]
    heads, seen, vectors = run.couplings
    w, h, layer, per = heads[row, head], head // g.group, run.layer, c.PROBES
    solve = w[: c.NC * c.TP].view(c.NC, c.TP)
    fold, total = w[c.FOLD : c.FOLD + count], w[c.TOTAL : c.TOTAL + 4].repeat(g.head_v // 4)[:, None]
    ring = [(first + i) % 8 for i in range(8)]
    if c.CHANNELS:
        probes, keys = vectors[row, head, : c.NC].clone(), vectors[row, head, c.NC : c.NC + count]
        probes[per * n :] = 0
        decay = vectors[row, head, -1][None, :]
    else:
        probes, keys, decay = torch.zeros(c.NC, g.head_k), layer.records["k"][slot, h, ring[:count]], total
        probes[per - 1 : per * n : per] = x.q[row, :n, h].float()
        if per == 2:
            probes[: per * n : per] = x.k[row, :n, h].float()
    records = layer.records["x" if c.MAMBA else "c"][slot, head].float()
    old = records[ring[:count]] * fold[:, None]
    state = layer.state[slot, head]
    value = torch.zeros(c.TP, g.head_v)
    value[:n] = x.v[row, :n, head].float()
    on = seen[row, head // c.SHARED, :, :count]
    y = (total.mT * (probes @ state.mT) + on @ old) * w[c.SCALE : c.SCALE + c.NC, None]
    if c.MAMBA:
        o, update = y + solve @ value, value
    else:
        solved = solve @ (value - y[::2])
        o, update = y[1::2] + solved[1::2], solved[::2]
    return o[:n], update[:n], state * decay + old.mT @ keys.float()


@pytest.mark.parametrize(
    ("arch", "v"), [(Arch.GDN, 64), (Arch.GDN, 128), (Arch.KDA, 128), (Arch.MAMBA2, 64), (Arch.MAMBA2, 96)]
)
def test_a_window_does_what_its_couplings_say(on_cpu: None, arch: Arch, v: int) -> None:
    run = Run(arch, v)
    out, layer = run(run.x)
    for row, (slot, n, first, count, flush) in enumerate(run.rows()):
        for head in range(3):
            assert not out[row, n:, head].any()
            if n:
                o, update, state = answered(run, row, head)
                near(out[row, :n, head], o.to(out.dtype))
                field = layer.records["x" if arch is Arch.MAMBA2 else "c"][slot, head]
                near(field[[(first + count + i) % 8 for i in range(n)]], update.to(field.dtype))
                near(layer.state[slot, head], state if flush else run.layer.state[slot, head])
    assert {flush for *_, flush in run.rows()} == {False, True}


@pytest.mark.parametrize("v", [64, 96, 128])
@pytest.mark.parametrize("arch", [Arch.GDN, Arch.KDA])
def test_a_normed_window_has_the_values_of_the_norm_behind_it(on_cpu: None, arch: Arch, v: int) -> None:
    run = Run(arch, v)
    x, weight, gates = run.x, run.draw.normal(v), run.draw.normal(5, run.t, 3 * v + 8)
    z, norm = gates[..., 8:].view(5, run.t, 3, v), GatedNorm.of(run.g)
    plain, left = run(x)
    got, ours = run(Gated(**vars(x), norm=norm, z=z, weight=weight, step=run.step))
    assert torch.equal(ours.state, left.state)
    assert all(torch.equal(ours.records[name], field) for name, field in left.records.items())
    near(got, norm(plain, z, weight, run.step))
    assert not got[1].any()
