"""What each worker can be asked through vLLM's `collective_rpc("ssmspec_report")`, so that nobody takes a silent fallback for a result."""

from typing import Any


class WorkerReport:
    """Mixed into vLLM's worker by `worker_extension_cls`."""

    def ssmspec_report(self) -> dict[str, Any]:
        """The policy that this worker runs, and its counters. Raises RuntimeError where it runs none of ours."""
        state = self.model_runner.model_state  # type: ignore[attr-defined]
        session = getattr(state, "session", None)
        if session is None:
            raise RuntimeError(f"ssmspec: this worker runs {type(state).__name__}, not a policy")
        report: dict[str, Any] = session.report()
        return report
