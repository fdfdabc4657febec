"""Fast mode's merged layer over vLLM's pages: the bits of the one over rings, and the page as vLLM's conv leaves it."""

import pytest
import torch
from test_fast_layer import FEW, MANY, ROWS, SLOTS, Draw, bits, of, side
from triton_lives import ON_GPU, ints, staged

from ssmspec.geometry import Conv, Mode, Window
from ssmspec.kernels import fast_layer
from ssmspec.kernels.norm_triton import TritonNorm

pytestmark = [pytest.mark.interpreter, pytest.mark.gpu]

PAGED = (
    [((1, 2), 3, FEW), ((2, 2), 1, MANY)]
    if not ON_GPU
    else [
        ((4, heads), t, cut) for heads in (4, 8, 16) for t, cut in ((1, MANY), (4, FEW), (4, MANY), (8, MANY))
    ]
)


@pytest.mark.parametrize(("heads", "t", "cut"), PAGED)
def test_a_layer_over_vllms_pages_is_the_one_over_rings(
    heads: tuple[int, int], t: int, cut: fast_layer.Cut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, into the room given; a page has its inputs but the oldest, in order, as vLLM's conv leaves them."""
    g, w = of("gdn", heads, Conv(channels=0, width=4)), Window(max_len=t, ring_len=max(4, t), mode=Mode.FAST)
    draw = Draw(g, seed=t)
    weights = draw.weights(bias=True)
    rings, paged = (side(g, w, weights, True) for _ in range(2))
    taps = weights.conv.contiguous()
    inputs = g.conv.history + t - 1
    pages = draw(3 * SLOTS, inputs, g.conv.channels).mT
    pages[:, :, : g.conv.history] = 0
    page = ints(*(0 if slot == 0 else 3 * SLOTS - 2 * slot for slot in range(SLOTS)))
    monkeypatch.setattr(fast_layer, "cut", lambda *_: cut)
    for _ in range(12 if ON_GPU else 4):
        lens = [1 + n for n in draw.ints(t - 1, len(ROWS))]
        accepted = [1 + draw.ints(n - 1, 1)[0] if slot > 0 else 0 for slot, n in zip(ROWS, lens, strict=True)]
        p, room = draw.projected(t, lens), draw(len(ROWS), t, g.num_v_heads, g.head_v)
        step = staged(w, ROWS, lens, accepted=accepted)
        want = rings.run(step, p)
        before = pages.clone()
        settled = fast_layer.Settled(conv=g.conv, field=pages, pages=page)
        assert fast_layer.merges(g, settled, p.x, taps)
        tokens = fast_layer.Unconvolved.of(
            g, p, settled, taps, weights.conv_bias,
            norm=TritonNorm.of(g), weight=weights.norm, step=step, out=room,
        )  # fmt: skip
        got = paged.policy.verify(0, step, tokens)
        assert got.data_ptr() == room.data_ptr()
        assert torch.equal(bits(want), bits(got))
        expected = before.clone()
        for row, (slot, n) in enumerate(zip(ROWS, lens, strict=True)):
            if slot > 0:
                seen = torch.cat([before[page[slot], :, : g.conv.history], p.x[row, :n].mT], 1)[:, 1:]
                expected[page[slot], :, : seen.shape[1]] = seen
        assert torch.equal(bits(expected), bits(pages))
        for slot, n in zip(ROWS, accepted, strict=True):
            if slot > 0:  # as keep_windows
                pages[page[slot], :, : g.conv.history] = pages[
                    page[slot], :, n - 1 : n - 1 + g.conv.history
                ].clone()
        commit = step.close()
        for kept in (rings, paged):
            kept.policy.accept(commit)
        rings.conv.accept(commit)


def test_pages_whose_keys_several_programs_read_are_not_merged() -> None:
    """The one that is through first would have moved them."""
    for group, merged in ((1, True), (2, True), (3, False), (4, True), (8, False)):
        g = of("gdn", (1, group), Conv(channels=0, width=4))
        inputs, taps = (
            torch.zeros(2, 4, g.conv.channels).bfloat16().mT,
            torch.zeros(g.conv.channels, 4).bfloat16(),
        )
        x = torch.zeros(1, 2, g.conv.channels).bfloat16()
        assert fast_layer.merges(g, fast_layer.Settled(conv=g.conv, field=inputs), x, taps) == merged
        ring = fast_layer.Settled(conv=g.conv, field=inputs, at=torch.zeros(2))
        assert fast_layer.merges(g, ring, x, taps)
        assert not fast_layer.merges(g, ring, x, taps[:, :2].float().contiguous())  # 8 bytes too, but of two
