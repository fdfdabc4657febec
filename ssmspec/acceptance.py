"""How many tokens of a window are accepted, step by step: from a rate, from measured positions, or from a trace.

A count includes the bonus token, so it lies within 1..T, where T = drafts + 1.
"""

import io
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, islice, repeat
from operator import mul
from pathlib import Path
from typing import Any

# Per draft, given that the ones before it were accepted; where nothing is known of a model. 2.95 tokens a step at K=3.
DEFAULT_RATE = 0.8
# Qwen3.5-4B BF16, one L40S, Spec-Bench, temperature 0, five MTP drafts; reported beside vllm-project/vllm#58863.
SPEC_BENCH_QWEN3_5_4B = (0.856, 0.694, 0.558, 0.457, 0.376)
# Qwen3.8-27B NVFP4, one RTX 5090, 5 h of agent traffic, three MTP drafts; reported beside vllm-project/vllm#49887.
AGENTS_QWEN3_8_27B = (0.93, 0.848, 0.675)

MAX_TRACE_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """The acceptance process of windows with K = len(per_position) drafts; a trace, if any, is what is sampled."""

    per_position: tuple[float, ...]  # probability that draft i is accepted, all earlier ones with it
    trace: tuple[int, ...] = ()  # accepted counts, bonus included

    def __post_init__(self) -> None:
        last = 1.0
        for draft, p in enumerate(self.per_position, start=1):
            _check_share(f"acceptance of draft {draft}", p)
            if p > last:
                raise ValueError(
                    f"acceptance of draft {draft}={p} rises above the {last} of draft {draft - 1}, without which it"
                    f" cannot be accepted; the nearest legal value is {last}"
                )
            last = p
        for step, count in enumerate(self.trace, start=1):
            if not 1 <= count <= self.window:
                raise ValueError(
                    f"accepted={count} in step {step} is not within 1..{self.window}, the drafts and the bonus"
                    f" token; the nearest legal value is {min(max(count, 1), self.window)}"
                )

    @property
    def window(self) -> int:
        """T, the tokens of a full window."""
        return 1 + len(self.per_position)

    @property
    def mean(self) -> float:
        """Accepted tokens of a step on average, bonus included."""
        return 1 + math.fsum(self.per_position)

    def sample(self, n: int, seed: int = 0) -> Iterator[int]:
        """``n`` accepted counts, the same for the same seed; a trace is repeated from its start, whatever the seed."""
        if self.trace:
            yield from islice(cycle(self.trace), n)
            return
        rng = random.Random(seed)
        for _ in range(n):
            u = rng.random()
            yield 1 + sum(u < p for p in self.per_position)


def _check_share(name: str, value: float) -> None:
    if math.isnan(value):
        raise ValueError(f"{name}={value} is not a number within 0..1")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} is not within 0..1; the nearest legal value is {int(value > 0)}")


def from_rate(rate: float, drafts: int) -> Acceptance:
    """Each draft is accepted at ``rate``, given that all before it were: p, p^2, .., p^drafts."""
    _check_share("acceptance rate", rate)
    if drafts < 0:
        raise ValueError(f"drafts={drafts} must not be negative; the nearest legal value is 0")
    return Acceptance(per_position=tuple(accumulate(repeat(rate, drafts), mul)))


def from_list(values: Sequence[float], drafts: int) -> Acceptance:
    """One unconditional probability per draft, not rising. Raises ValueError where their number is not ``drafts``."""
    if len(values) != drafts:
        raise ValueError(
            f"acceptance lists {len(values)} positions, and there are {drafts} drafts: list {drafts}"
        )
    return Acceptance(per_position=tuple(values))


def from_trace(path: str | Path, window: int) -> Acceptance:
    """Accepted counts of a run, one JSON value a line: 3, or {"accepted": 3}; bonus included, so 1..window.

    Raises ValueError with the line for anything else; a last line that was cut short is one such.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_TRACE_BYTES + 1)
        if len(data) > MAX_TRACE_BYTES:
            raise ValueError(f"larger than {MAX_TRACE_BYTES} bytes, the limit for a trace")
        lines = io.StringIO(data.decode(), newline=None)
        trace = tuple(_count(line.strip(), number) for number, line in enumerate(lines, start=1))
        if not trace:
            raise ValueError("an empty trace; one accepted count is needed at least")
        tally = Counter(trace)
        shares = [sum(tally[c] for c in range(t + 1, window + 1)) / len(trace) for t in range(1, window)]
        return Acceptance(per_position=tuple(shares), trace=trace)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None


def _count(line: str, number: int) -> int:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"line {number} is {line[:40]!r}, not JSON; was the trace cut short?") from None
    count = value.get("accepted") if isinstance(value, dict) else value
    if not isinstance(count, int) or isinstance(count, bool):
        raise ValueError(f'line {number} is {line[:40]!r}, neither a whole number nor {{"accepted": n}}')
    return count


def parse(text: str, drafts: int) -> Acceptance:
    """A rate ("0.8"), one probability per draft ("0.9,0.8,0.6"), or the path of a trace. Raises ValueError."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        if os.path.isfile(text):
            return from_trace(text, drafts + 1)
        raise ValueError(
            f"acceptance={text[:80]!r} is no rate within 0..1, no list of {drafts} of them, and no trace file;"
            " give 0.8, or 0.9,0.8,0.6 for three drafts, or the path of a file with an accepted count a line"
        ) from None
    return from_rate(values[0], drafts) if len(values) == 1 else from_list(values, drafts)
