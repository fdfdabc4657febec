"""Makes real VllmConfigs, as the command line or Python would, and writes what became of each. Run as a script."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any


def _make(case: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    if "cli" not in case:
        return EngineArgs(**case["args"]).create_engine_config()
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(case["cli"])
    args.model = args.model_tag
    return AsyncEngineArgs.from_cli_args(args).create_engine_config()


def _streamed(config: Any) -> str:
    """What a request is told whose input comes in pieces."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    front = object.__new__(AsyncLLM)
    front.vllm_config = config
    try:
        front._add_streaming_input_request("r", None, None).close()
    except VLLMValidationError as error:
        return str(error)
    return ""


def _describe(config: Any) -> dict[str, Any]:
    sent = pickle.loads(pickle.dumps(config))
    return {
        "architectures": config.model_config.hf_config.architectures,
        "additional": config.additional_config,
        "sent": sent.additional_config,
        "sent_architectures": sent.model_config.hf_config.architectures,
        "extension": config.parallel_config.worker_extension_cls,
        "hash": config.compute_hash(),
        "mode": config.cache_config.mamba_cache_mode,
        "streamed": _streamed(config),
        "v2": config.use_v2_model_runner,
    }


def attempt(case: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    os.environ.update(case.get("environment", {}))
    try:
        return _describe(_make(case))
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]


def main(source: Path, target: Path) -> None:
    cases = json.loads(source.read_text())
    target.write_text(json.dumps({name: attempt(case) for name, case in cases.items()}))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
