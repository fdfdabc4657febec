"""KDA's couplings in Gluon on the CPU: with the window behind them they have the values of the reference."""

import types
from typing import Any

import gluon_on_cpu
import pytest
import test_fast_mma
import torch
from gluon_on_cpu import Value, plain
from hopper_draws import Draw, each, near

from ssmspec import layout
from ssmspec.geometry import Arch, DType, Geometry, Mode, Window
from ssmspec.kernels import reference
from ssmspec.kernels.base import History

pytest.importorskip("triton.experimental.gluon")

from ssmspec.kernels import (
    conv_math,
    fast,
    fast_channels_history,
    fast_channels_mma,
    fast_couplings,
    fast_math,
    fast_mma,
    fast_rows,
    handed,
    hopper_tile,
)

windows_on_cpu = test_fast_mma.on_cpu
MODULES = [
    conv_math,
    fast_math,
    fast_rows,
    handed,
    hopper_tile,
    fast_mma,
    fast_couplings,
    fast_channels_history,
    fast_channels_mma,
]


@pytest.fixture
def on_cpu(windows_on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Value, "__xor__", lambda x, y: Value(x.data ^ plain(y)), raising=False)
    monkeypatch.setattr(Value, "shape", property(lambda x: x.data.shape), raising=False)
    kernel = gluon_on_cpu.Kernel(fast_channels_mma.couple, MODULES)
    language = {
        "where": test_fast_mma.where,
        "gather": lambda x, index, axis: Value(x.data.gather(axis, index.data.long())),
        "cast": lambda x, d: Value(x).to(d),
        "maximum": lambda x, y: Value(torch.maximum(*(torch.as_tensor(plain(i)) for i in (x, y)))),
        **{name: one(getattr(torch, name)) for name in ("abs", "rsqrt")},
    }
    own = {
        "above": lambda x, y: Value(torch.cat([x.data, y.data], 0)),
        "normal_exp": one(torch.exp),
        "product": lambda x, y: Value(x.data.float() @ y.data.float()),
        "async_load": kernel.machine.async_load,
        "async_copy": types.SimpleNamespace(
            commit_group=kernel.machine.commit_group, wait_group=kernel.machine.wait_group
        ),
    }
    for function in kernel.functions.values():
        names = function.__globals__
        names["gl"].__dict__.update(language)
        names.update(own, tl=names["gl"])
    monkeypatch.setattr(fast_channels_mma, "couple", kernel)


def one(f: Any) -> Any:
    return lambda x: Value(f(x.data))


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *a, **k: (t := empty(*a, **k)).fill_(float("nan") if t.is_floating_point() else 0),
    )


@pytest.mark.parametrize(
    ("policy", "t", "ring", "h", "bound"),
    [
        ("recover", 3, 16, 3, None),
        ("every-step", 4, 16, 3, None),
        ("checkpointing", 1, 11, 1, None),
        ("checkpointing", 2, 11, 3, -5.0),
        ("checkpointing", 4, 11, 3, None),
        ("checkpointing", 5, 20, 1, None),
    ],
)
def test_a_window_has_the_values_of_the_reference(
    on_cpu: None, poisoned: None, policy: str, t: int, ring: int, h: int, bound: float | None
) -> None:
    """Any ring position and count, wraps and flushes included; a null row, a short and an empty window; key heads
    with several value heads, and decays of 0."""
    g = Geometry(
        arch=Arch.KDA, num_layers=1, num_k_heads=h, num_v_heads=3, head_k=80, head_v=64,
        state_dtype=DType.FP32, gate_lower_bound=bound,
    )  # fmt: skip
    w, draw = Window(max_len=t, ring_len=ring, mode=Mode.FAST), Draw(t)
    kept = layout.ring(policy, w)
    counts = [kept.limit or t, 9, 0, 3, 0, 1]
    past = None
    if policy != "recover":
        count = torch.tensor(counts).clamp(max=kept.limit or t).int()
        past = History(base=draw.ints(kept.capacity, 6).int(), count=count, limit=kept.limit)
    x, start = draw.tokens(g, 5, t), draw.layer(g, 6, kept.capacity)
    start.records["decay"][:, :, :, 3] = 0
    x.a[..., 5] = 1000.0
    rows, lens = torch.tensor([3, 1, 0, 5, 4]), torch.tensor([t, t, t, 0, max(1, t - 1)])
    verifies = reference.make(g, w).verify, fast.make_verify(g, w, lambda *_: None)
    (wanted, theirs), (got, ours) = each(verifies, start, x, rows, lens, past)
    near(got, wanted)
    near(ours.state, theirs.state)
    for name in start.records:
        near(ours.records[name], theirs.records[name])
    assert not got[2:4].any()
