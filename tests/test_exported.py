"""An exported state comes back bit for bit, or is refused by name: damaged, truncated, hostile, or another's."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shapes import geometry

from ssmspec import layout
from ssmspec.geometry import Geometry, Window
from ssmspec.pool import StatePool
from ssmspec.runtime import events as ev
from ssmspec.runtime import exported
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.exported import Exported, ExportError, Header
from ssmspec.runtime.setup import Setup

W = Window(max_len=3, ring_len=8)
SHAPES = {
    "gdn": geometry("gdn"),
    "kda": geometry("kda"),
    "mamba2": geometry("mamba2"),
    "bf16-stochastic": geometry("gdn", "bf16-stochastic"),
    "nvfp4": geometry("gdn", "nvfp4"),
    "no layers": geometry("gdn", num_layers=0),
}


def engine(policy: str, g: Geometry, poison: int = 0xFF) -> Engine:
    e = Engine(policy, Setup(geometry=g, window=W, slots=4, poison=poison))
    for event in (
        ev.Admit(request="a", prompt=5),
        ev.Prefill(chunks={"a": 5}),
        ev.Verify(windows={"a": 3}),
        ev.Accept(accepted={"a": 2}),
    ):
        e.play(event)
    return e


def of(policy: str = "checkpointing", g: Geometry = SHAPES["gdn"], settle: bool = False) -> Exported:
    e = engine(policy, g)
    e.play(ev.Offload(request="a", settle=settle))
    stored = e.requests["a"].stored
    assert stored is not None
    return stored


def pool(policy: str = "checkpointing", g: Geometry = SHAPES["gdn"]) -> StatePool:
    return engine(policy, g).layers.pool


def bits(p: StatePool) -> list[torch.Tensor]:
    return [t.reshape(-1).view(torch.uint8).clone() for t in p.tensors.values()]


@pytest.mark.parametrize("settle", [True, False], ids=["settled", "as it is"])
@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_comes_back_bit_for_bit_into_another_pool(shape: str, policy: str, settle: bool) -> None:
    g = SHAPES[shape]
    stored = of(policy, g, settle)
    read = exported.loads(exported.dumps(stored))
    assert read == replace(stored, tensors=read.tensors)
    target = pool(policy, g)
    target.poison(0x3E)
    exported.put(target, 2, read, stored.header)
    again = exported.take(target, 2, stored.header)
    assert again.tensors.keys() == stored.tensors.keys()
    for name, t in again.tensors.items():
        assert torch.equal(
            t.reshape(-1).view(torch.uint8), stored.tensors[name].reshape(-1).view(torch.uint8)
        )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"policy": "recover"}, "policy='checkpointing', wanted 'recover'"),
        ({"tokens": 8}, "tokens=7, wanted 8"),
        ({"geometry": SHAPES["mamba2"]}, "geometry.arch='gdn', wanted"),
        ({"geometry": SHAPES["bf16-stochastic"]}, "geometry.state_dtype='float32', wanted"),
        ({"geometry": replace(SHAPES["gdn"], head_v=16)}, "geometry.head_v=8, wanted 16"),
        ({"window": Window(max_len=3, ring_len=9)}, "window.ring_len=8, wanted 9"),
        ({"window": Window(max_len=3, ring_len=8, align=4)}, "window.align=0, wanted 4"),
    ],
)
def test_a_state_of_something_else_is_refused_by_name(change: dict[str, object], named: str) -> None:
    values = {"policy": "checkpointing", "geometry": SHAPES["gdn"], "window": W, "tokens": 7} | change
    wanted = Header.of(
        values["policy"], values["geometry"], values["window"], tokens=values["tokens"], settled=False
    )
    target = pool()
    before = bits(target)
    with pytest.raises(ExportError, match=named):
        exported.put(target, 1, of(), wanted)
    assert all(map(torch.equal, before, bits(target)))


def test_every_truncation_is_refused() -> None:
    data = exported.dumps(of("recover"))
    for size in range(len(data)):
        with pytest.raises(ExportError):
            exported.loads(data[:size])


def test_every_flipped_bit_is_refused() -> None:
    tiny = geometry("gdn", num_layers=1, num_k_heads=1, num_v_heads=1, head_k=1, head_v=1)
    data = exported.dumps(of("recover", tiny))
    for byte in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[byte] ^= 1 << bit
            with pytest.raises(ExportError):
                exported.loads(bytes(flipped))


def test_what_follows_the_declared_sizes_is_refused() -> None:
    with pytest.raises(ExportError):
        exported.loads(exported.dumps(of()) + b"\0")


def test_a_header_size_beyond_the_file_is_not_followed() -> None:
    for size in (2**63, 2**64 - 1, exported.MAX_HEADER + 1, 1000):
        with pytest.raises(ExportError, match=f"header of {size} bytes in a file of 16"):
            exported.loads(size.to_bytes(8, "little") + b"x" * 8)


def rewritten(stored: Exported, **values: object) -> bytes:
    """A file of another writer, who knows how to compute the checksum."""
    header = json.loads(json.dumps(exported.asdict(stored.header))) | values
    raw = json.dumps(header)
    metadata = {"ssmspec": raw, "sha256": exported._digest(raw, stored.tensors)}
    return exported.safetensors.torch.save(stored.tensors, metadata)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"schema": 2}, "schema=2, wanted 1"),
        ({"schema": 2, "unknown": 1}, "schema=2, wanted 1"),
        ({"tokens": True}, "tokens=True is not of type int"),
        ({"tokens": 7.0}, "tokens=7.0 is not of type int"),
        ({"settled": 0}, "settled=0 is not of type bool"),
        ({"geometry": [1]}, "geometry=.* is not of type dict"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_header_with_a_valid_checksum_and_wrong_values_is_refused(
    values: dict[str, object], named: str
) -> None:
    with pytest.raises(ExportError, match=named):
        exported.loads(rewritten(of(), **values))


def test_a_deeply_nested_header_is_refused_by_name() -> None:
    nested: object = 1
    for _ in range(500):
        nested = {"arch": nested}
    stored = exported.loads(rewritten(of(), geometry={"arch": nested}))
    with pytest.raises(ExportError, match=r"geometry\.arch="):
        exported.check(stored, pool(), of().header)


@pytest.mark.parametrize(
    ("policy", "name", "value"),
    [
        ("checkpointing", "base", 11),  # R = L + T = 11
        ("checkpointing", "base", -1),
        ("checkpointing", "count", 9),  # L = 8
        ("every-step", "base", 6),  # R = 2T
        ("every-step", "count", 4),  # T = 3
        ("native", "winner", 3),
        ("native", "winner", -1),
    ],
)
def test_a_cursor_that_would_be_followed_out_of_its_ring_is_refused(
    policy: str, name: str, value: int
) -> None:
    stored = of(policy)
    stored.tensors[name].fill_(value)
    read = exported.loads(exported.dumps(stored))
    with pytest.raises(ExportError, match=f"{name}={value} is outside 0.."):
        exported.check(read, pool(policy), stored.header)


def test_a_settled_state_with_something_pending_is_refused() -> None:
    for policy, name in (("checkpointing", "count"), ("every-step", "count"), ("native", "winner")):
        stored = of(policy, settle=True)
        stored.tensors[name].fill_(1)
        with pytest.raises(ExportError, match=f"{name}=1 is outside 0..0"):
            exported.check(stored, pool(policy), stored.header)


def test_missing_surplus_and_reshaped_fields_are_refused() -> None:
    stored, target = of(), pool()
    one, *rest = stored.tensors
    state = stored.tensors["state"]
    for tensors, named in (
        ({n: stored.tensors[n] for n in rest}, f"fields {one} are missing"),
        (stored.tensors | {"x": state}, "fields x are missing or not wanted"),
        (stored.tensors | {"state": state.mT}, "state is torch.float32"),
        (stored.tensors | {"state": state.half()}, "state is torch.float16"),
    ):
        with pytest.raises(ExportError, match=named):
            exported.check(replace(stored, tensors=tensors), target, stored.header)


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("was unpickled",)


def test_a_pickle_is_refused_and_not_run() -> None:
    data = pickle.dumps(_Bomb())
    for file in (data, (2).to_bytes(8, "little") + data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(ExportError):
            exported.loads(file)


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}, b"xxxx"),
        ({"dtype": "F32", "shape": [0, 2**62, 2], "data_offsets": [0, 0]}, b""),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 2**40]}, b"xxxx"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, b"xxxx"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}, b"x"),
        ({"dtype": "X1", "shape": [1], "data_offsets": [0, 1]}, b"x"),
    ],
    ids=["too large", "strides overflow", "beyond the file", "backwards", "4 bits", "unknown dtype"],
)
def test_entries_that_lie_about_their_size_are_refused(entry: dict[str, object], data: bytes) -> None:
    raw = json.dumps(exported.asdict(of().header))
    for surrogate in (raw, "\ud800"):
        table = {"__metadata__": {"ssmspec": surrogate, "sha256": ""}, "t": entry}
        header = json.dumps(table).encode()
        with pytest.raises(ExportError):
            exported.loads(len(header).to_bytes(8, "little") + header + data)


@given(st.binary(max_size=400), st.booleans())
def test_nothing_but_the_documented_error_leaves_the_reader(data: bytes, framed: bool) -> None:
    with pytest.raises(ExportError):
        exported.loads(len(data).to_bytes(8, "little") + data if framed else data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FILE = exported.dumps(of())
TABLE = json.loads(FILE[8 : 8 + int.from_bytes(FILE[:8], "little")])
BODY = FILE[8 + int.from_bytes(FILE[:8], "little") :]


@given(st.data())
def test_a_rewritten_table_is_refused(data: st.DataObject) -> None:
    table = json.loads(json.dumps(TABLE))
    where = data.draw(st.sampled_from([table, *table.values()]))
    key = data.draw(st.sampled_from([*where]))
    value = data.draw(json_values)
    if where[key] == value:
        return
    where[key] = value
    header = json.dumps(table).encode()
    with pytest.raises(ExportError):
        exported.check(exported.loads(len(header).to_bytes(8, "little") + header + BODY), pool(), of().header)
