"""Whatever a script holds, nothing but the documented errors leaves its readers and the engine, and memory is bounded.

Model configurations are fuzzed in tests/test_config_refused.py, traces in tests/test_acceptance.py, exported states in
tests/test_exported.py, tables of choices in tests/test_bench_choices.py.
"""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import geometry

from ssmspec import layout
from ssmspec.geometry import Conv, Window
from ssmspec.runtime import events as ev
from ssmspec.runtime import setup
from ssmspec.runtime.engine import Engine
from ssmspec.runtime.events import Event, ScriptError
from ssmspec.runtime.lifecycle import LifecycleError
from ssmspec.runtime.setup import Setup
from ssmspec.runtime.slots import SlotError

T = TypeVar("T")
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = sorted({f.name for kind in ev.EVENTS.values() for f in fields(kind)})
objects = st.fixed_dictionaries(
    {"event": st.sampled_from([*ev.EVENTS]) | values},
    optional={key: values | st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)) for key in keys},
)


def read(lines: list[str]) -> list[Event] | None:
    """Events, or None where they are refused as they should be."""
    found, error = caught(lambda: [e for e in ev.read(lines) if isinstance(e, Event)], ScriptError)
    assert error is None or error.startswith("line ")
    return found


def caught(what: Callable[[], T], *documented: type[Exception]) -> tuple[T | None, str | None]:
    """The result, or the text of a documented error, which is short whatever the input was."""
    try:
        return what(), None
    except documented as error:
        text = str(error)
    assert len(text) < 2000
    return None, text


@given(st.lists(st.text(max_size=80), max_size=4))
def test_any_text_is_a_script_or_a_script_error(lines: list[str]) -> None:
    read(lines)


@given(st.lists(values.map(lambda v: json.dumps(v)), max_size=4))
def test_any_json_is_a_script_or_a_script_error(lines: list[str]) -> None:
    read(lines)


@given(objects)
def test_any_object_with_known_keys_is_an_event_or_a_script_error(data: dict[str, object]) -> None:
    found = read(["", json.dumps(data)])
    for e in found or ():
        for f in fields(e):
            value = getattr(e, f.name)
            assert value == f.default or type(value) in (str, int, bool, list, dict)


@given(st.binary(max_size=60))
def test_a_line_nested_or_broken_in_any_way_is_a_script_error(data: bytes) -> None:
    text = data.decode("latin-1")
    for line in ("[" * 10_000 + text, '{"event": ' * 1000 + text, "1" * 5000 + text, text * 100):
        assert not read([line, line])


def test_an_error_does_not_repeat_a_large_input() -> None:
    big = "x" * (ev.MAX_LINE - 100)
    for line in (
        f'{{"event": "{big}"}}',
        f'{{"event": "free", "{big}": 1}}',
        f'{{"event": "free", "request": {[big]}}}',
    ):
        assert read([line.replace("'", '"')]) is None
    tracemalloc.start()
    assert read(['{"event": "' + "x" * 4 * ev.MAX_LINE]) is None
    assert tracemalloc.get_traced_memory()[1] < 20 * ev.MAX_LINE
    tracemalloc.stop()


names = st.sampled_from("abc") | st.text(max_size=3)


def event_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    by_field = {
        "request": names,
        "to": names,
        "prompt": st.integers(0, 9),
        "text": st.integers(0, 1),
        "reuse": st.booleans(),
        "settle": st.booleans(),
        "chunks": st.dictionaries(names, st.integers(0, 9), max_size=3),
        "windows": st.dictionaries(names, st.integers(0, 5), max_size=3),
        "padding": st.integers(0, 3) | st.just(ev.MAX_TOKENS),
        "salt": st.none() | st.integers(0, 9),
        "accepted": st.dictionaries(names, st.integers(0, 5), max_size=3),
        "force_flush": st.lists(names, max_size=2),
        "boundary": st.dictionaries(names, st.sampled_from(["leave", "copy", "stay"]) | names, max_size=2),
    }
    return st.builds(kind, **{f.name: by_field[f.name] for f in fields(kind)})


any_event = st.one_of([event_of(kind) for kind in ev.EVENTS.values()])


@given(any_event)
def test_what_is_written_is_read_again(event: Event) -> None:
    assert read([ev.dump(event)]) == [event]


def held(e: Engine) -> tuple[object, ...]:
    requests = {n: (r.slot, r.phase, tuple(r.tokens), tuple(r.window)) for n, r in e.requests.items()}
    return requests, dict(e.cache.of), e.cache.slots.free, len(e._open)


START = [ev.Admit(request=r, prompt=2) for r in "ab"] + [ev.Prefill(chunks={"a": 2, "b": 1})]


@pytest.mark.parametrize("policy", layout.POLICY_NAMES)
@given(st.lists(any_event, max_size=14))
@settings(max_examples=60)
def test_events_in_any_order_are_played_or_refused_whole(policy: str, script: list[Event]) -> None:
    """A refusal changes nothing, and slots are conserved."""
    g = geometry("gdn", num_layers=1, num_k_heads=1, num_v_heads=1)
    e = Engine(policy, Setup(geometry=g, window=Window(max_len=4, align=4), slots=4, poison=0xFF))
    for event in [*START, *script]:
        before, bits = held(e), [t.clone() for t in e.layers.pool.tensors.values()]
        _, refused = caught(lambda event=event: e.play(event), LifecycleError, SlotError)
        if refused:
            assert held(e) == before, event
            assert all(
                torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
                for a, b in zip(bits, e.layers.pool.tensors.values(), strict=True)
            ), event
        e.check_integrity()


setup_lines = st.dictionaries(st.sampled_from([*setup.KEYS]), scalars | st.integers(0, 5000), max_size=6)


@given(setup_lines | st.dictionaries(st.text(max_size=8), values, max_size=4))
def test_any_object_is_a_setup_or_a_script_error(data: dict[str, object]) -> None:
    found, refused = caught(lambda: setup.load(data), ScriptError)
    if found is None:
        assert refused
        assert refused.startswith("setup: ")
    else:
        assert setup.load(json.loads(found.dump())) == found


def test_an_event_has_a_value_for_every_key_it_needs() -> None:
    for kind in ev.EVENTS.values():
        for f in fields(kind):
            if f.default is MISSING and f.default_factory is MISSING:
                line = {"event": kind.kind} | {
                    o.name: {str: "a", int: 1}.get(o.type, {"a": 1})
                    for o in fields(kind)
                    if o is not f and o.default is MISSING and o.default_factory is MISSING
                }
                with pytest.raises(ScriptError, match=f"{kind.kind}: {f.name} is missing"):
                    list(ev.read([json.dumps(line)]))


def test_a_wide_layer_is_computed_in_short_chunks() -> None:
    """Memory is bounded where a script asks for a long prompt of a wide layer: 2**22 values at once."""
    g = geometry("gdn", num_layers=1, conv=Conv(channels=2**21))
    seen = []
    e = Engine("recover", Setup(geometry=g, window=Window(max_len=1), slots=2), seen.append)
    e.play(ev.Admit(request="a", prompt=5))
    e.play(ev.Prefill(chunks={"a": 5}))
    assert [len(s.value) for s in seen] == [2, 2, 1]
    assert e.layers.content._of.cache_info().maxsize == 7
