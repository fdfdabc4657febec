"""A session over pages that move as vLLM's align mode moves them, against the accepted tokens one by one."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from ssmspec import kernels, layout
from ssmspec.geometry import Arch, Conv, DType, Geometry, Window
from ssmspec.kernels.base import Layer, LayerParams, Tokens
from ssmspec.runtime.rows import Batch, Rows
from ssmspec.runtime.vllm import pages
from ssmspec.runtime.vllm.config import ServeConfig
from ssmspec.runtime.vllm.session import Session

T, BLOCK, REQUESTS, LAYERS = 4, 5, 3, 3
GROUPS = ((0, 2), (1,))  # layers 0 and 2 share a block table, layer 1 has its own
CONV = Conv(channels=2 * 4 + 2 * 4, width=4)
POLICIES = ("recover", "every-step", "checkpointing")


def geometry(dtype: DType) -> Geometry:
    shape = {"num_layers": LAYERS, "num_k_heads": 1, "num_v_heads": 2, "head_k": 4, "head_v": 4}
    return Geometry(arch=Arch.GDN, conv=CONV, act_dtype=DType.FP32, state_dtype=dtype, **shape)


@dataclass
class Truth:
    """One request in one layer: its state and its last conv inputs after every accepted token, nothing else."""

    state: Tensor  # [2, HV, V, K]; row 1 is the state
    inputs: list[Tensor] = field(default_factory=lambda: [torch.zeros(CONV.channels)] * CONV.history)


def one_window(g: Geometry) -> Tokens:
    """Of one row, random."""
    return Tokens.unpack(g, torch.randn(1, T, CONV.channels), *torch.randn(2, 1, T, 2))


class Engine:
    """Does what vLLM does around a session: block tables, the copy into the next block, counts."""

    def __init__(self, policy: str, dtype: DType, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.g, self.w = geometry(dtype), Window(max_len=T, align=BLOCK, ring_len=6)
        params = [LayerParams(index=i, A_log=torch.randn(2), dt_bias=torch.randn(2)) for i in range(LAYERS)]
        self.params, self.weight = params, torch.randn(CONV.channels, 4)
        blocks = 1 + REQUESTS * 64
        self.states = [torch.randn(blocks, 2, 4, 4).to(self.stored) for _ in range(LAYERS)]
        self.windows = [torch.randn(blocks, CONV.channels, CONV.history + T - 1) for _ in range(LAYERS)]
        self.tables = [torch.randperm(blocks - 1).view(REQUESTS, 64) + 1 for _ in GROUPS]
        self.session = Session(
            ServeConfig(policy=policy, ring_len=None), self.g, self.w, REQUESTS, torch.device("cpu")
        )
        fields = layout.of(policy, self.g, self.w)
        self.convs = [pages.ConvPages(p, self.weight, None) for p in self.windows]
        self.session.bind(
            GROUPS,
            self.tables,
            self.states,
            self.convs,
            [pages.allocate_records(fields, REQUESTS + 1, torch.device("cpu")) for _ in range(LAYERS)],
            params,
        )
        self.boundaries: list[tuple[int, int, int, Tensor, Tensor]] = []  # of the last step
        self.computed = [0] * REQUESTS
        self.column = [-1] * REQUESTS
        self.truth = [
            [Truth(torch.zeros(2, 2, 4, 4, dtype=self.stored)) for _ in range(LAYERS)]
            for _ in range(REQUESTS)
        ]
        for r in range(REQUESTS):
            self.admit(r)

    @property
    def stored(self) -> torch.dtype:
        return getattr(torch, self.g.state_dtype)  # type: ignore[no-any-return]

    def group_of(self, layer: int) -> int:
        return next(i for i, members in enumerate(GROUPS) if layer in members)

    def page(self, layer: int, request: int, column: int) -> int:
        return int(self.tables[self.group_of(layer)][request, column])

    def admit(self, request: int) -> None:
        """A request starts in this slot, with zeros in its first page."""
        self.computed[request] = self.column[request] = 0
        for layer in range(LAYERS):
            block = self.page(layer, request, 0)
            self.states[layer][block] = 0
            self.windows[layer][block] = 0
            self.truth[request][layer] = Truth(torch.zeros(2, 2, 4, 4, dtype=self.stored))
        self.session.admit(request)

    def step(self, rows: list[int], lens: list[int], accepted: list[int], tails: list[bool]) -> None:
        self.boundaries = []
        self._move(rows, lens)
        blocks = torch.stack([t[rows, [self.column[r] for r in rows]] for t in self.tables])
        self.session.stage(
            Batch(
                rows=torch.arange(len(rows)),
                count=len(rows),
                requests=torch.tensor(rows),
                starts=torch.tensor([0, *lens]).cumsum(0),
                ends=torch.tensor([self.computed[r] + n for r, n in zip(rows, lens, strict=True)]),
                settle=torch.tensor(tails),
            )
        )
        for layer in range(LAYERS):
            x, a, b = torch.randn(len(rows), T, CONV.channels), *torch.randn(2, len(rows), T, 2)
            mixed = self.convs[layer].verify(
                blocks[self.group_of(layer)], torch.zeros(len(rows), dtype=torch.int64), x
            )
            out = self.session.verify(layer, Tokens.unpack(self.g, mixed, a, b))
            for i, r in enumerate(rows):
                wanted = self._expected(layer, r, x[i], a[i], b[i], lens[i], accepted[i])
                assert torch.equal(out[i, : lens[i]], wanted), f"layer {layer}, request {r}"
        self.session.commit(torch.tensor(accepted))
        for i, r in enumerate(rows):
            self.computed[r] += accepted[i]
            if tails[i]:
                self.check_page(r, self.column[r])

    def _move(self, rows: list[int], lens: list[int]) -> None:
        """Before the step, vLLM copies a page whole where the window's end lies in another block."""
        for r, n in zip(rows, lens, strict=True):
            column = (self.computed[r] + n - 1) // BLOCK
            for layer in range(LAYERS):
                src, dst = self.page(layer, r, self.column[r]), self.page(layer, r, column)
                if src != dst:
                    self.states[layer][dst] = self.states[layer][src]
                    self.windows[layer][dst] = self.windows[layer][src]
            self.column[r] = column

    def _expected(
        self, layer: int, request: int, x: Tensor, a: Tensor, b: Tensor, n: int, keep: int
    ) -> Tensor:
        """The window's outputs from the true state; then the truth moves on by ``keep`` tokens."""
        truth = self.truth[request][layer]
        inputs = torch.stack([*truth.inputs, *x[:n]])
        taps = inputs.unfold(0, 4, 1)  # [n, D, W]
        mixed = torch.nn.functional.silu((taps * self.weight).sum(-1))[None]
        verify = kernels.make("torch", self.g, self.w).verify
        rows = torch.cat([truth.state, torch.zeros(T, 2, 4, 4, dtype=self.stored)])
        alone = Layer(params=self.params[layer], state=rows, read=None, records={})
        snapshots = torch.arange(2, 2 + n)[None]
        tokens = Tokens.unpack(self.g, mixed, a[None, :n], b[None, :n])
        out = verify(alone, tokens, torch.tensor([1]), torch.tensor([n]), snapshots=snapshots)
        mark = (self.computed[request] // BLOCK + 1) * BLOCK - self.computed[request]
        if mark <= keep:
            self.boundaries.append(
                (
                    layer,
                    request,
                    self.computed[request] // BLOCK,
                    rows[1 + mark].clone(),
                    inputs[mark : mark + 3],
                )
            )
        truth.state[1] = rows[1 + keep]
        truth.inputs = list(inputs[keep : keep + 3])
        return out[0]

    def check_page(self, request: int, column: int) -> None:
        for layer in range(LAYERS):
            block, truth = self.page(layer, request, column), self.truth[request][layer]
            assert torch.equal(self.states[layer][block], truth.state[1])
            assert torch.equal(self.windows[layer][block][:, :3], torch.stack(truth.inputs).T)

    def check_boundaries(self) -> int:
        """A boundary that was crossed by this step is exact in its block, in every layer."""
        for layer, request, column, state, inputs in self.boundaries:
            block = self.page(layer, request, column)
            assert torch.equal(self.states[layer][block], state), f"layer {layer}, request {request}"
            assert torch.equal(self.windows[layer][block][:, :3], inputs.T)
        return len(self.boundaries)


class Replayed:
    """In the place of a CUDA graph."""

    def __init__(self, work: Callable[[int], None], rows: int) -> None:
        self.work, self.rows = work, rows

    def replay(self) -> None:
        self.work(self.rows)


def record(session: Session, *sizes: int) -> None:
    """As ``Session.capture`` would; a batch is then padded to the next size."""
    session.recorded = {n: Replayed(session._apply, n) for n in sizes}  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_boundaries_and_settled_pages_are_those_of_the_accepted_tokens(
    policy: str, dtype: DType
) -> None:
    crossed = 0
    for seed in range(2):
        engine = Engine(policy, dtype, seed)
        if seed:
            record(engine.session, 2, REQUESTS)
        for _ in range(25):
            rows = engine.rng.sample(range(REQUESTS), engine.rng.randint(1, REQUESTS))
            if engine.rng.random() < 0.1:
                engine.admit(rows[0])
            lens = [engine.rng.randint(1, T) for _ in rows]
            accepted = [engine.rng.randint(1, n) for n in lens]
            engine.step(rows, lens, accepted, [engine.rng.random() < 0.1 for _ in rows])
            crossed += engine.check_boundaries()
        engine.session.policy.settle(torch.arange(1, REQUESTS + 1))
        for request in range(REQUESTS):
            engine.check_page(request, engine.column[request])
    assert crossed > 20


def test_a_row_that_sampled_nothing_keeps_its_one_token() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    engine.step([0], [1], [1], [False])
    before = engine.session.cursors["count"].clone()
    _stage_one(engine)
    engine.session.commit(torch.tensor([0]))
    assert int(engine.session.cursors["count"][1]) == int(before[1]) + 1


def test_a_dummy_batch_changes_nothing() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    states = [s.clone() for s in engine.states]
    windows = [w.clone() for w in engine.windows]
    cursors = {n: c.clone() for n, c in engine.session.cursors.items()}
    _stage_one(engine, dummy=True)
    for layer in range(LAYERS):
        engine.session.verify(layer, one_window(engine.g))
    engine.session.commit(torch.tensor([1]))
    assert all(torch.equal(a, b) for a, b in zip(states, engine.states, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(windows, engine.windows, strict=True))
    assert all(torch.equal(c, engine.session.cursors[n]) for n, c in cursors.items())


def test_a_window_without_a_staged_step_is_an_error() -> None:
    engine = Engine("recover", DType.FP32, 0)
    with pytest.raises(RuntimeError, match="before its step was staged"):
        engine.session.verify(0, one_window(engine.g))


def test_a_row_is_settled_where_vllm_says_so_and_in_that_step_alone() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    engine.step([0], [4], [1], [True])
    _stage_one(engine)
    assert engine.session.rows.step(1).force_flush.tolist() == [False]


def test_a_verify_that_was_never_committed_is_an_error_of_the_next_step() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    _stage_one(engine)
    with pytest.raises(RuntimeError, match="verified but not committed"):
        _stage_one(engine)


def test_a_dummy_batch_needs_no_commit() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    _stage_one(engine, dummy=True)
    engine.step([0], [1], [1], [False])


def test_a_smaller_step_leaves_null_rows_behind_it() -> None:
    """A CUDA graph of three rows may read them."""
    engine = Engine("checkpointing", DType.FP32, 0)
    record(engine.session, 1, REQUESTS)
    engine.step([0, 1, 2], [4, 4, 4], [1, 1, 1], [False] * 3)
    _stage_one(engine)
    padded = engine.session.rows.step(3)
    assert padded.slots.tolist() == [1, 0, 0]
    assert padded.lens.tolist() == [1, 0, 0]


def test_the_report_counts_what_happened() -> None:
    engine = Engine("checkpointing", DType.FP32, 0)
    engine.step([0, 1], [4, 2], [3, 1], [False, False])
    engine.step(
        [0], [4], [4], [False]
    )  # tokens 4..7: across the boundary at 5, and 3 + 4 records do not fit 6
    report = engine.session.report()
    assert {k: report[k] for k in ("steps", *Rows.COUNTERS)} == {
        "steps": 2,
        "rows": 3,
        "tokens": 8,
        "flushes": 1,
        "boundaries": 1,
    }
    assert (report["policy"], report["align"]) == ("checkpointing", BLOCK)


def _stage_one(engine: Engine, dummy: bool = False) -> None:
    starts = torch.arange(2)
    batch = Batch(
        rows=slice(1), count=1, requests=starts[:1], starts=starts, ends=starts[1:] + 1, dummy=dummy
    )
    engine.session.stage(batch)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_line_that_says_what_runs_names_the_ring_where_there_is_one(policy: str) -> None:
    line = Engine(policy, DType.FP32, 0).session.describe(LAYERS)
    assert f"policy={policy} mode=exact align={BLOCK}, {LAYERS} GDN layers, state float32, T={T}," in line
    assert (" L=6," in line) == (policy == "checkpointing")
