"""A life on a device is that of the host: no tensor meets one of the host, and few values are waited for."""

import random
from dataclasses import replace

import pytest
import torch
from pretend_device import Away, Met, pretended
from shapes import geometry
from torch import Tensor

from ssmspec.geometry import Window
from ssmspec.kernels.base import Tokens
from ssmspec.layout import POLICY_NAMES
from ssmspec.measure import soak
from ssmspec.measure.lives import Life, draw_setup
from ssmspec.runtime import events as ev
from ssmspec.runtime.content import Content
from ssmspec.runtime.engine import Engine, Seen
from ssmspec.runtime.layers import Layers
from ssmspec.runtime.setup import Device, Setup

every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device: tests marked gpu play on it")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@torch.inference_mode()
def played(policy: str, setup: Setup, script: list[ev.Event]) -> list[Seen]:
    seen: list[Seen] = []
    e = Engine(policy, setup, seen.append)
    for event in script:
        e.play(event)
    on_device = setup.device is Device.CUDA
    assert all(isinstance(t, Away) == on_device for t in e.layers.pool.tensors.values())
    return seen


@every_policy
@pytest.mark.usefixtures("there")
def test_a_life_on_a_device_is_the_hosts_and_meets_no_tensor_of_it(policy: str) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        setup = draw_setup(rng, "torch")
        if seed == 3:  # the noise is made on the device, too
            setup = replace(setup, geometry=geometry("kda", "bf16-stochastic"))
        if policy == "native":
            setup = replace(setup, geometry=replace(setup.geometry, read_dtype=None))
        script = list(Life(setup, rng, lossy=policy == "native").events(25))
        want = played(policy, setup, script)
        with pretended():
            got = played(policy, replace(setup, device=Device.CUDA), script)
        assert len(want) == len(got) > 0
        for a, b in zip(want, got, strict=True):
            assert (a.what, a.request, a.tokens) == (b.what, b.request, b.tokens)
            assert not isinstance(b.value, Away), "what is seen is on the host"
            assert torch.equal(a.value, b.value)


def index_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layers, "_index", lambda self, value: torch.tensor([value]))


def step_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layers, "_moved", lambda self, what: what)


def inputs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Content.__init__
    monkeypatch.setattr(Content, "__init__", lambda self, g, seed, device: made(self, g, seed))


@pytest.mark.parametrize("bug", [index_on_the_host, step_on_the_host, inputs_on_the_host])
@pytest.mark.usefixtures("there")
def test_a_tensor_left_on_the_host_is_noticed(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    setup = Setup(device=Device.CUDA)
    script = [ev.Admit(request="a", prompt=2), ev.Prefill(chunks={"a": 2}), ev.Verify(windows={"a": 2})]
    with pretended(), pytest.raises(Met):
        played("recover", setup, script)


@every_policy
@pytest.mark.usefixtures("there")
def test_one_copy_to_the_host_is_waited_for_where_something_is_seen(policy: str) -> None:
    """Kernels aside: a prompt chunk and a verify bring their outputs, and an accept brings nothing."""

    def verify(layer: object, x: Tokens, *args: object, **rest: object) -> Tensor:
        return torch.zeros_like(x.v)

    window = Window(max_len=4, align=4)
    setup = Setup(geometry=geometry("kda"), window=window, device=Device.CUDA, poison=0xFF)
    with pretended() as reads:
        e = Engine(policy, setup)
        p = e.layers.policy
        p.kernels = replace(p.kernels, verify=verify, fold=lambda layers, plan: None)
        for event, most in (
            (ev.Admit(request="a", prompt=3), 0),
            (ev.Prefill(chunks={"a": 3}), 1),
            (ev.Fork(request="a", to="b"), 0),
            (ev.Verify(windows={"a": 4, "b": 2}, padding=1), 1),
            (ev.Accept(accepted={"a": 3, "b": 0}, boundary={"a": "copy"}), 2),  # a boundary is looked at
            (ev.Move(request="a"), 0),
            (ev.Verify(windows={"a": 1}), 1),
            (ev.Accept(accepted={"a": 1}), 0),
            (ev.Flush(request="a"), 2),
        ):
            reads.clear()
            e.play(event)
            assert len(reads) <= most, (event, reads)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device=cuda: PyTorch finds no CUDA device; device=cpu needs none"):
        soak.run(soak.Soak(seed=0, device=Device.CUDA), events=1)


def test_kernels_that_are_compiled_for_a_device_are_refused_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="device=cpu: backend=triton computes there with TRITON_INTERPRET=1"):
        soak.run(soak.Soak(seed=0, backend="triton"), events=1)


@pytest.mark.interpreter
def test_a_life_of_the_triton_backend_is_natives() -> None:
    report = soak.run(soak.Soak(seed=0, backend="triton"), events=10)
    assert report.found is None
    assert report.events >= 10


@pytest.mark.gpu
def test_lives_on_a_gpu_are_natives() -> None:
    report = soak.run(soak.Soak(seed=2, backend="triton", device=Device.CUDA), events=300)
    assert report.found is None
