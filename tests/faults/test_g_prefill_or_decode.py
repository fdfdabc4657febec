"""G: prefill or decode? Decided by what a request is, never by a length."""

import pytest
import torch
from rig import Rig, W, engine, every_policy, every_recurrence, index, shape

from ssmspec import kernels
from ssmspec.geometry import Arch
from ssmspec.kernels.base import Tokens
from ssmspec.runtime import events as ev
from ssmspec.runtime.lifecycle import LifecycleError


@every_policy
@every_recurrence
@pytest.mark.parametrize("prompt", [1, 3, 4, 5])
def test_a_prompt_of_a_windows_length_is_a_prompt(arch: Arch, policy: str, prompt: int, backend: str) -> None:
    """G1 (vllm-project/vllm#47123): K=3, a fresh request."""
    rig = Rig(policy, shape(arch), backend=backend).start(1)
    rig.prefill(1, prompt)
    rig.check(1, settled=True)
    rig.step({1: 4}, {1: 2})


@every_policy
def test_a_request_without_a_computed_prompt_is_not_verified(policy: str, backend: str) -> None:
    """G1: nor is one whose prompt is computed in part."""
    e = engine(policy, slots=4, backend=backend)
    e.play(ev.Admit(request="a", prompt=4))
    for _ in range(3):
        with pytest.raises(
            LifecycleError, match="'a': the request is prefilling; its prompt is not computed"
        ):
            e.play(ev.Verify(windows={"a": 4}))
        e.play(ev.Prefill(chunks={"a": 1}))


@every_policy
@every_recurrence
@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside two decode rows"])
def test_a_last_chunk_of_one_token_is_a_chunk(arch: Arch, policy: str, others: bool, backend: str) -> None:
    """G2 (vllm-project/vllm#49847, #49887, vllm-ascend#12255, #12297): 9 tokens in chunks of 8 and 1.

    Every policy takes the prefill route and ends with nothing pending; the oracle ran the prompt token by token.
    """
    rig = Rig(policy, shape(arch), backend=backend).start(1, 2, 3)
    if others:
        rig.step({2: 4, 3: 4}, {2: 3, 3: 2})
    rig.prefill(1, 8)
    if others:
        rig.step({2: 1, 3: 4}, {2: 1, 3: 4})
    rig.prefill(1, 1)
    rig.check(1, settled=True)
    assert {rig.cursors(1)[name] for name in ("count", "winner") if name in rig.cursors(1)} <= {0}
    rig.step({1: 1, 2: 4, 3: 1} if others else {1: 1}, {1: 1, 2: 2, 3: 1})


@every_policy
@every_recurrence
def test_placeholder_drafts_leave_no_trace(arch: Arch, policy: str, backend: str) -> None:
    """G3 (vllm-project/vllm#55178, #58434): 8 tokens computed, one real token and three placeholders, a=1."""
    rig = Rig(policy, shape(arch), backend=backend).start(1)
    rig.prefill(1, 8)
    rig.step({1: 4}, {1: 1})
    assert len(rig.tokens[1]) == 9
    rig.check(1)


@every_recurrence
def test_three_tokens_in_one_call_are_three_calls(arch: Arch, backend: str) -> None:
    """G4 (huggingface/transformers#46741, #45513, #46937): the primitive with an initial state."""
    g = shape(arch, num_layers=1)
    rig = Rig("native", g, W, backend=backend).start(1, 2)
    state = torch.randn(g.num_v_heads, g.head_v, g.head_k)
    x = torch.randn(1, 3, g.conv.channels)
    a = torch.randn(1, 3, 4, 16) if arch is Arch.KDA else torch.randn(1, 3, 4)
    tokens = Tokens.unpack(g, x, a, None if arch is Arch.MAMBA2 else torch.randn(1, 3, 4))
    verify, layer, outs = kernels.make(backend, g, W).verify, rig.policy.layers[0], []
    for row, calls in ((1, [slice(0, 3)]), (2, [slice(t, t + 1) for t in range(3)])):
        layer.state[row] = state
        out = []
        for part in calls:
            piece = Tokens(**{n: None if t is None else t[:, part] for n, t in vars(tokens).items()})
            n = piece.v.shape[1]
            at = index(*[0] * (n - 1), row)[None]
            out.append(verify(layer, piece, index(row), index(n), snapshots=at))
        outs.append((torch.cat(out, 1), layer.state[row].clone()))
    assert all(map(torch.equal, *outs))
    assert not torch.equal(outs[0][1], state)
