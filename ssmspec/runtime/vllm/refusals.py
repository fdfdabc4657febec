"""What cannot be served, refused while vLLM is being configured: by the flag's name, with the nearest legal setting."""

import os
from collections.abc import Mapping
from typing import Any

from ssmspec.runtime.vllm.config import BEST, ServeConfig
from ssmspec.runtime.vllm.rules import OF_FAMILY, ON_DEVICE, OURS, RULES, SERVED, Refused

CONV_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


def check(
    vllm_config: Any, serve: ServeConfig, checked: str, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise Refused for the first thing in the engine's configuration that the policy does not work with.

    ``checked``: the device that this version of vLLM was checked on. A config whose model was chosen before passes too.
    """
    arch = vllm_config.model_config.hf_config.architectures[0].removeprefix(OURS)
    if arch not in SERVED:
        raise Refused(
            f"--model of the architecture {arch} is not served with --ssm-policy {serve.policy};"
            f" served are {', '.join(SERVED)}"
        )
    _check_device(vllm_config.device_config.device_type, serve, checked)
    for rule in (*ON_DEVICE[checked], *OF_FAMILY[SERVED[arch]], *RULES):
        rule.check(vllm_config, serve.policy)
    _check_drafter(vllm_config.speculative_config, serve)
    layout = environ.get(CONV_LAYOUT, "SD")
    if layout != "SD":
        raise Refused(
            f"{CONV_LAYOUT}={layout} is not served with --ssm-policy {serve.policy}: the conv window is read in the"
            " layout SD; the nearest legal setting is SD"
        )
    try:
        serve.window(vllm_config.speculative_config.num_speculative_tokens)
    except ValueError as error:
        raise Refused(f"--ssm-policy {serve.policy} with this --speculative-config: {error}") from None


def _check_device(device: str, serve: ServeConfig, checked: str) -> None:
    if device != checked:
        raise Refused(
            f"the device {device} is not served with --ssm-policy {serve.policy}: this version of vLLM was checked on"
            f" {checked} only; the nearest legal setting is {checked}"
        )
    if serve.kernels(device) != BEST[device]:
        raise Refused(
            f'additional_config["ssmspec"]["backend"]={serve.backend} does not run on {device};'
            f" the nearest legal setting is {BEST[device]}"
        )


def _check_drafter(speculative: Any, serve: ServeConfig) -> None:
    """MTP heads and ngrams come with the model that is served; other drafters have a configuration of their own."""
    if speculative.method in ("draft_model", "eagle3") and speculative.draft_model_config.is_hybrid:
        raise Refused(
            f"--speculative-config.model={speculative.model} is not served with --ssm-policy {serve.policy}: its own"
            " recurrent layers have not been checked; the nearest legal setting is a model with attention alone"
        )
