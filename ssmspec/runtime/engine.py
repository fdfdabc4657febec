"""Plays events against a policy: allocates slots, caches prefixes, stages steps. The only caller of policies outside vLLM."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ssmspec.pool import NULL_SLOT
from ssmspec.runtime import events, exported
from ssmspec.runtime.batch import Batch, Boundary
from ssmspec.runtime.content import token_id
from ssmspec.runtime.layers import Layers
from ssmspec.runtime.lifecycle import LifecycleError, Phase, Request
from ssmspec.runtime.prefixes import PrefixCache
from ssmspec.runtime.setup import Setup


@dataclass(frozen=True)
class Seen:
    """Something the outside may read: an output of a window, or a settled state."""

    what: str  # "output", "state" or "conv"
    request: str
    layer: int
    tokens: int  # accepted tokens before it
    value: Tensor  # on the host


class Engine:
    """One policy, its layers, and the requests alive in them."""

    def __init__(self, policy: str, setup: Setup, see: Callable[[Seen], None] = lambda seen: None) -> None:
        self.w, self.see = setup.window, see
        self.layers = Layers(policy, setup)
        self.requests: dict[str, Request] = {}
        self.cache = PrefixCache(setup.slots, self.layers.wipe)
        self._open: list[Batch] = []
        widest = max(1, setup.geometry.conv.channels)
        self._longest = max(1, 2**22 // widest)  # tokens computed at once: memory is bounded
        self._salt = 0

    def play(self, event: events.Event) -> None:
        """Carry out one event. Raises LifecycleError or SlotError before anything has changed."""
        getattr(self, f"_{event.kind}")(event)

    def check_integrity(self) -> None:
        """Every slot is free, a request's, or a cached prefix's."""
        self.cache.check_integrity(r.slot for r in self.requests.values() if r.slot)

    def _admit(self, e: events.Admit) -> None:
        self._unknown(e.request)
        if e.prompt < 1:
            raise LifecycleError(f"admit {e.request!r}: prompt={e.prompt}, at least 1 token is needed")
        prompt = [token_id(e.text, i) for i in range(e.prompt)]
        seed = token_id(len(e.request), *e.request.encode()) % 2**31
        self._enter(Request(e.request, seed, prompt), e.reuse)

    def _resume(self, e: events.Resume) -> None:
        r = self._request(e.request)
        r.need("resume", Phase.PREEMPTED)
        self._enter(Request(r.name, r.seed, r.tokens + r.prompt[len(r.tokens) :]), reuse=True)

    def _enter(self, r: Request, reuse: bool) -> None:
        """Give a request a slot: a copy of the longest cached prefix, but for one token at least, or a zero state."""
        best = self.cache.longest(r.prompt) if reuse else ()
        r.slot = self.cache.take(keep=best)
        if best:
            self.layers.start_from(self.cache.of[best], r.slot, r.seed, len(best))
        else:
            self.layers.start(r.slot, r.seed)
        r.tokens = list(best)
        self.requests[r.name] = r

    def _prefill(self, e: events.Prefill) -> None:
        rows = [self._request(name) for name in e.chunks]
        for r in rows:
            r.need("prefill", Phase.PREFILLING, Phase.DECODING)  # a computed prompt has nothing left
        for r in rows:
            end = min(len(r.tokens) + e.chunks[r.name], len(r.prompt))
            while len(r.tokens) < end:
                left = self.w.align - len(r.tokens) % self.w.align if self.w.align else end
                self._chunk(r, min(end, len(r.tokens) + min(left, self._longest)))
            r.prefilled()

    def _chunk(self, r: Request, end: int) -> None:
        ids = r.prompt[len(r.tokens) : end]
        for layer, out in enumerate(self.layers.prefill(r.slot, ids)):
            self._saw("output", r, layer, out)
        r.tokens += ids
        if self.w.align and end % self.w.align == 0:
            self._publish(r, end)

    def _publish(self, r: Request, end: int) -> None:
        """Copy a settled slot at a block boundary into the prefix cache."""
        key = tuple(r.tokens[:end])
        if key not in self.cache.of and (slot := self.cache.spare()):
            self.layers.copy(r.slot, slot)
            self.cache.keep(key, slot)

    def _verify(self, e: events.Verify) -> None:
        rows = [self._request(name) for name in e.windows]
        for r, n in zip(rows, e.windows.values(), strict=True):
            r.need("verify", Phase.DECODING)
            if not 1 <= n <= self.w.max_len:
                raise LifecycleError(f"verify {r.name!r}: window={n} is outside 1..{self.w.max_len}")
        if e.padding > self.layers.pool.num_slots:
            raise LifecycleError(
                f"verify: padding={e.padding} is more rows than the {self.layers.pool.num_slots} slots there are"
            )
        self._salt += 1
        salt = self._salt if e.salt is None else e.salt
        for r, n in zip(rows, e.windows.values(), strict=True):
            r.window = [token_id(r.seed, len(r.tokens), salt, t) for t in range(n)]
            r.phase = Phase.VERIFYING
        batch = Batch.of(rows, e.padding, self.w.max_len)
        try:
            outs = self.layers.verify(batch.step, [r.window for r in rows] + [[]] * e.padding)
        except BaseException:
            for r in rows:
                r.lose()
            raise
        self._open.append(batch)
        for layer, out in enumerate(outs):
            for i, r in enumerate(rows):
                self._saw("output", r, layer, out[i, : len(r.window)])

    def _accept(self, e: events.Accept) -> None:
        if not self._open:
            raise LifecycleError("accept: no window is open: each window is accepted once")
        self._open[0].check(e)
        batch = self._open.pop(0)
        rows = batch.live
        boundaries = {r.name: self._boundary(r, e) for r in rows}
        self.layers.accept(batch.decide(e, boundaries))
        for r in rows:
            r.accept(e.accepted[r.name], lossy=self.layers.policy.name == "native")
            self._cross(r, boundaries[r.name])
            if r.name in e.force_flush and e.accepted[r.name]:
                self._look(r.slot, r, len(r.tokens))

    def _boundary(self, r: Request, e: events.Accept) -> Boundary:
        """Where the accepted tokens of an open window leave a boundary's state, and where the request goes on."""
        here, count, align = r.slot, e.accepted[r.name], self.w.align
        mark = align - len(r.tokens) % align if align else 0
        how = e.boundary.get(r.name, "leave")
        if not 0 < mark <= count:
            return Boundary(0, NULL_SLOT, here)
        if how == "stay" and mark == count:
            return Boundary(mark, here, here)
        if not (spare := self.cache.spare()):
            return Boundary(0, NULL_SLOT, here)
        if how == "copy":
            return Boundary(mark, spare, here)
        return Boundary(mark, here, spare)  # the block keeps the boundary's state, the request moves on

    def _cross(self, r: Request, b: Boundary) -> None:
        """A boundary was crossed: its state is looked at and cached, and the request goes on in the next slot."""
        r.slot = b.next_slot
        if not b.mark:
            return
        end = len(r.tokens) // self.w.align * self.w.align
        self._look(b.slot, r, end)
        if b.slot == b.next_slot:
            self._publish(r, end)
        else:
            self.cache.keep(tuple(r.tokens[:end]), b.slot)

    def _flush(self, e: events.Flush) -> None:
        r = self._request(e.request)
        r.need("flush", Phase.DECODING, Phase.PREFILLING)
        self._settle(r)

    def _preempt(self, e: events.Preempt) -> None:
        r = self._request(e.request)
        r.need("preempt", Phase.DECODING, Phase.PREFILLING, Phase.LOST)
        self.cache.give(r.slot)
        r.slot, r.phase = NULL_SLOT, Phase.PREEMPTED

    def _offload(self, e: events.Offload) -> None:
        r = self._request(e.request)
        r.need("offload", Phase.DECODING)
        if e.settle:
            self._settle(r)
        r.stored = exported.take(self.layers.pool, r.slot, self._header(r, e.settle))
        self.cache.give(r.slot)
        r.slot, r.phase = NULL_SLOT, Phase.OFFLOADED

    def _restore(self, e: events.Restore) -> None:
        r = self._request(e.request)
        r.need("restore", Phase.OFFLOADED)
        assert r.stored is not None
        slot = self.cache.take()
        exported.put(self.layers.pool, slot, r.stored, self._header(r, r.stored.header.settled))
        r.slot, r.stored, r.phase = slot, None, Phase.DECODING

    def _move(self, e: events.Move) -> None:
        r = self._request(e.request)
        r.need("move", Phase.DECODING, Phase.PREFILLING)
        slot = self.cache.take()
        self.layers.copy(r.slot, slot)
        self.cache.give(r.slot)
        r.slot = slot

    def _fork(self, e: events.Fork) -> None:
        r = self._request(e.request)
        self._unknown(e.to)
        r.need("fork", Phase.DECODING)
        seed = token_id(r.seed, len(r.tokens), *e.to.encode()) % 2**31
        slot = self.cache.take()
        self.layers.copy(r.slot, slot)
        self.requests[e.to] = Request(e.to, seed, r.prompt, slot, [*r.tokens], phase=Phase.DECODING)

    def _abort(self, e: events.Abort) -> None:
        r = self.requests.pop(self._request(e.request).name)
        r.phase = Phase.GONE  # a late accept of its window finds a null row
        if r.slot:
            self.cache.give(r.slot)

    def _free(self, e: events.Free) -> None:
        r = self._request(e.request)
        r.need("free", Phase.DECODING)
        self._settle(r)
        del self.requests[r.name]
        self.cache.give(r.slot)

    def _request(self, name: str) -> Request:
        if name not in self.requests:
            raise LifecycleError(
                f"request {name!r} is not alive; alive are {sorted(self.requests) or 'none'}"
            )
        return self.requests[name]

    def _unknown(self, name: str) -> None:
        if name in self.requests:
            raise LifecycleError(f"request {name!r} is alive already")

    def _header(self, r: Request, settled: bool) -> exported.Header:
        return exported.Header.of(self.layers.policy.name, self.layers.g, self.w, len(r.tokens), settled)

    def _settle(self, r: Request) -> None:
        self.layers.settle(r.slot)
        self._look(r.slot, r, len(r.tokens))

    def _look(self, slot: int, r: Request, tokens: int) -> None:
        for layer, (state, inputs) in enumerate(self.layers.look(slot)):
            self.see(Seen("state", r.name, layer, tokens, state))
            self.see(Seen("conv", r.name, layer, tokens, inputs))

    def _saw(self, what: str, r: Request, layer: int, value: Tensor) -> None:
        self.see(Seen(what, r.name, layer, len(r.tokens), value))
