"""An environment in which vLLM's V2 runner starts on a CPU: Triton's interpreter as its backend, one thread, no binding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def engine_environment() -> dict[str, str]:
    path = [str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {k: v for k, v in os.environ.items() if not k.startswith("SSMSPEC_")}
    return {
        **own,
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """Run a script of this folder with vLLM's environment; its output is shown where it fails."""

    def run(name: str, *args: object) -> str:
        command = [sys.executable, str(HERE / name), *map(str, args)]
        found = subprocess.run(
            command,
            env=engine_environment(),
            cwd=tmp_path_factory.mktemp("cwd"),
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
        return found.stdout

    return run
