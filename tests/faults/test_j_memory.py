"""J: memory that outlives its use. The planner's entries are in tests/test_planner.py and tests/test_capacity.py."""

import gc
import weakref

from rig import Rig, every_policy


@every_policy
def test_nothing_holds_a_pool_after_its_owner_is_gone(policy: str, backend: str) -> None:
    """J10 (vllm-project/vllm#58863, #58961, #58430): a step that ran, its commit, and its outputs are still there."""
    rig = Rig(policy, backend=backend).start(1)
    step, out = rig.verify([(1, rig.ids(4))])
    commit = rig.accept(step, [2])
    tensors = [weakref.ref(t) for t in rig.pool.tensors.values()]
    storages = [t.untyped_storage()._cdata for t in rig.pool.tensors.values()]
    kept = [*vars(step).values(), *vars(commit).values(), out]
    del rig
    gc.collect()
    assert not any(t() is not None for t in tensors)
    assert not {t.untyped_storage()._cdata for t in kept if hasattr(t, "untyped_storage")} & {*storages}
