"""After a commit every conv page starts behind its last accepted token, and a crossed boundary's page as it was there."""

import pytest
import torch
from torch import Tensor

from ssmspec.runtime.vllm.pages import ConvPages
from ssmspec.runtime.vllm.windows import Windows
from ssmspec.step import Commit

LAYERS, PAGES, CHANNELS, WIDTH, DRAFTS, ROWS = 2, 12, 6, 4, 3, 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def windows() -> Windows:
    """Input number i of a page has the value 100 * page + i in every channel; pages are farther apart than they are long."""
    number = torch.arange(PAGES)[:, None] * 100 + torch.arange(WIDTH - 1 + DRAFTS)
    pages = number[:, :, None].expand(-1, -1, CHANNELS).float()
    layers = []
    for _ in range(LAYERS):
        memory = torch.full((PAGES, WIDTH - 1 + DRAFTS + 1, CHANNELS), -1.0, device=DEVICE)
        memory[:, :-1] = pages
        layers.append(ConvPages(memory[:, :-1].mT, torch.zeros(CHANNELS, WIDTH), None))
    rows = [ints(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10), ints(0, 11, 2, 9, 4, 5, 6, 7, 8, 3, 10)]
    return Windows(layers, rows)


def commit() -> Commit:
    """Rows: one accepted; three accepted; two, with the boundary after the first; all, onto the boundary itself; null."""
    slots, accepted = ints(1, 2, 3, 4, 0), ints(1, 3, 2, 4, 0)
    mark, mark_slots = ints(0, 0, 1, 4, 0), ints(0, 0, 8, 4, 0)
    return Commit(slots, ints(4, 4, 4, 4, 0), accepted, slots, mark, mark_slots, accepted > 9)


def front(w: Windows, layer: int, slot: int) -> list[float]:
    page = w.layers[layer].pages[w.rows[layer][slot]]
    assert (page == page[:1]).all(), "channels differ"
    return page[0, : WIDTH - 1].tolist()


BOTH = [
    pytest.param("_keep_by_layer", id="torch"),
    pytest.param("_keep_at_once", id="triton", marks=pytest.mark.interpreter),
]


@pytest.mark.parametrize("how", BOTH)
def test_windows_move_to_their_accepted_token_and_boundaries_get_theirs(how: str) -> None:
    w = windows()
    getattr(w, how)(commit())
    for layer in range(LAYERS):
        page = [100.0 * int(p) for p in w.rows[layer]]
        assert front(w, layer, 1) == [page[1], page[1] + 1, page[1] + 2]
        assert front(w, layer, 2) == [page[2] + 2, page[2] + 3, page[2] + 4]
        assert front(w, layer, 3) == [page[3] + 1, page[3] + 2, page[3] + 3]
        assert front(w, layer, 8) == [page[3], page[3] + 1, page[3] + 2]
        assert front(w, layer, 4) == [page[4] + 3, page[4] + 4, page[4] + 5]


@pytest.mark.parametrize("how", BOTH)
def test_other_pages_and_the_room_between_them_are_left_alone(how: str) -> None:
    w, before = windows(), windows()
    getattr(w, how)(commit())
    for layer in range(LAYERS):
        touched = set(w.rows[layer][[2, 3, 4, 8]].tolist())
        rest = [page for page in range(PAGES) if page not in touched]
        assert torch.equal(w.layers[layer].pages[rest], before.layers[layer].pages[rest])
        whole = w.layers[layer].pages.mT
        assert (
            whole.as_strided((PAGES, CHANNELS), (whole.stride(0), 1), (WIDTH - 1 + DRAFTS) * CHANNELS) == -1
        ).all()
