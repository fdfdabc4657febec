"""Fast mode's Gluon kernel on the CPU, with products in fp32: its tiles, and its norm, in values."""

import types
from collections import deque
from typing import Any

import gluon_on_cpu
import pytest
import torch
from gluon_on_cpu import Memory, Pointer, Value
from test_hopper import Draw, clone, near

from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels.base import History
from ssmspec.kernels.norm import GatedNorm
from ssmspec.step import Step

pytest.importorskip("triton.experimental.gluon")

from ssmspec.kernels import fast, fast_mma, fast_norm, fast_store, fast_tile


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
        "_above": lambda x, y: Value(torch.cat([x.data, y.data], 0)),
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
    monkeypatch.setattr(fast, "REGISTERS_A_PROCESSOR", 255 * 32 * 4)  # a program: each meets several tiles


@pytest.mark.parametrize("v", [64, 96, 128])
@pytest.mark.parametrize("arch", [Arch.GDN, Arch.KDA])
def test_a_normed_window_has_the_values_of_the_norm_behind_it(on_cpu: None, arch: Arch, v: int) -> None:
    """Couplings are random numbers: this is about what is done with the outputs."""
    h, hv, k, t = 3 if arch is Arch.KDA else 1, 3, 64, 3
    g = Geometry(
        arch=arch, num_layers=1, num_k_heads=h, num_v_heads=hv, head_k=k, head_v=v, state_dtype=DType.FP32
    )
    w, draw = Window(max_len=t, ring_len=8, mode=Mode.FAST), Draw(v)
    layer = draw.layer(g, 6, 8)
    past = History(base=draw.ints(8, 6).int(), count=torch.tensor([0, 3, 6, 0, 7, 2]).int(), limit=8)
    step = Step.of([2, 0, 5, 1, 4], [t, t, 1, t - 1, t], t)
    x, weight, gates = draw.tokens(g, 5, t), draw.normal(v), draw.normal(5, t, hv * v + 8)
    z, norm = gates[..., 8:].view(5, t, hv, v), GatedNorm.of(g)
    couplings, turns = [], [3, 0, 4, 1, 2]

    def couple(g: Geometry, layer: object, x: object, call: fast_tile.Call, at: object, c: object) -> None:
        if not couplings:
            couplings.extend(None if f is None else draw.normal(*f.shape) / 4 for f in call.w[:3])
        for field, value in zip(call.w[:3], couplings, strict=True):
            if field is not None:
                field.copy_(value)
        for row, (slot, n) in enumerate(zip(step.slots.tolist(), step.lens.tolist(), strict=True)):
            first, count = int(past.base[slot]), int(past.count[slot])
            flush = int(count > 0 and count + n > past.limit)
            live = n if slot > 0 else 0
            call.w.cursors[turns[row], 0] = (
                slot << 39 | slot << 19 | flush << 18 | count << 12 | first << 6 | live
            )
            call.w.cursors[turns[row], 1] = row

    def run(x: object) -> tuple[torch.Tensor, list[torch.Tensor]]:
        own = clone(layer)
        verify = fast.make_verify(g, w, lambda *_: None, couple)
        out = verify(own, x, step.slots, step.lens, history=past)
        return out, [own.state, *own.records.values()]

    plain, left = run(x)
    got, ours = run(fast.Gated(**vars(x), norm=norm, z=z, weight=weight, step=step))
    assert all(torch.equal(a, b) for a, b in zip(ours, left, strict=True))
    assert not torch.equal(left[0], layer.state)  # a row was folded
    near(got, norm(plain, z, weight, step))
    assert not got[1].any()
    assert plain[0].any()
