"""The unit lower triangular system of a window under the delta rule, by substitution."""

# Triton unpacks no tuples
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, var-annotated"

import triton
import triton.language as tl

from ssmspec.kernels.handed import hand_over


@triton.jit
def substitute(on_keys, on_queries, beta, to_solve, c: tl.constexpr):
    """Solve for one unit of each token's residual, and store updates and outputs of the tokens behind it.

    on_keys and on_queries [HEADS, TP, TP]: what a unit update of token j adds to what token t sees; beta
    [HEADS, TP]; to_solve [HEADS]. They go through the memory that the solution is stored in: a number that all
    lanes need is one load, and would be many shuffles.
    """
    TOKENS: tl.constexpr = c.T
    PADDED: tl.constexpr = c.TP
    token = tl.arange(0, c.TP)
    of_rows = to_solve[:, None, None] + (token * c.NC)[None, :, None] + token[None, None, :]
    tl.store(of_rows, on_keys * beta[:, None, :])
    tl.store(of_rows + c.TP, on_queries)
    tl.debug_barrier()
    of_unit = to_solve[:, None]
    updates = ()
    outputs = ()
    for t in tl.static_range(TOKENS):
        update = tl.where((token == t)[None, :], beta, 0.0)
        for j in tl.static_range(t):
            update -= updates[j] * tl.load(of_unit + (j * c.NC + t))
        updates = updates + (update,)
        output = update * tl.load(of_unit + (t * c.NC + c.TP + t))
        for j in tl.static_range(t):
            output += updates[j] * tl.load(of_unit + (j * c.NC + c.TP + t))
        outputs = outputs + (output,)
    tl.debug_barrier()
    zeros = tl.full([c.HEADS, c.TP], 0.0, tl.float32)
    of_token = to_solve[:, None] + token[None, :]
    for t in tl.static_range(TOKENS):
        hand_over(of_token + t * c.NC, updates[t])
        hand_over(of_token + (t * c.NC + c.TP), outputs[t])
    for t in tl.static_range(TOKENS, PADDED):
        hand_over(of_token + t * c.NC, zeros)
        hand_over(of_token + (t * c.NC + c.TP), zeros)
