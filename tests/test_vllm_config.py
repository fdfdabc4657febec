"""The plugin's selection: three sources, one value, and an entry module that costs a stock server nothing."""

import json
import subprocess
import sys

import pytest

from ssmspec.geometry import Mode
from ssmspec.runtime.vllm.config import KEY, ServeConfig, resolve


def test_the_entry_module_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, ssmspec.runtime.vllm; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_nothing_asked_for_leaves_stock() -> None:
    assert resolve({"policy": None, "mode": None}, {"another": 1}, {"PATH": "/bin"}).stock


def test_native_asked_for_leaves_stock() -> None:
    assert resolve({"policy": "native"}, {}, {}).stock


@pytest.mark.parametrize("policy", ["recover", "every-step", "checkpointing"])
def test_each_source_selects_a_policy(policy: str) -> None:
    wanted = ServeConfig(policy=policy)
    assert resolve({"policy": policy}, {}, {}) == wanted
    assert resolve({}, {KEY: {"policy": policy}}, {}) == wanted
    assert resolve({}, {}, {"SSMSPEC_POLICY": policy}) == wanted
    assert not wanted.stock


def test_sources_may_add_to_each_other() -> None:
    found = resolve({"policy": "checkpointing"}, {KEY: {"ring_len": 24}}, {"SSMSPEC_MODE": "fast"})
    assert found == ServeConfig(policy="checkpointing", ring_len=24, mode=Mode.FAST)


def test_sources_may_repeat_each_other() -> None:
    found = resolve({"policy": "recover"}, {KEY: {"policy": "recover"}}, {"SSMSPEC_POLICY": "recover"})
    assert found == ServeConfig(policy="recover")


@pytest.mark.parametrize(
    ("flags", "additional", "environ", "sources"),
    [
        ({"policy": "recover"}, {KEY: {"policy": "native"}}, {}, ("--ssm-policy", '["ssmspec"]["policy"]')),
        ({"policy": "native"}, {}, {"SSMSPEC_POLICY": "recover"}, ("--ssm-policy", "SSMSPEC_POLICY")),
        ({}, {KEY: {"mode": "fast"}}, {"SSMSPEC_MODE": "exact"}, ('["ssmspec"]["mode"]', "SSMSPEC_MODE")),
    ],
)
def test_a_contradiction_names_both_sources(
    flags: dict[str, object],
    additional: dict[str, object],
    environ: dict[str, str],
    sources: tuple[str, str],
) -> None:
    with pytest.raises(ValueError, match="contradict") as error:
        resolve(flags, additional, environ)
    assert all(source in str(error.value) for source in sources)


@pytest.mark.parametrize(
    ("flags", "environ", "source"),
    [
        ({"mode": "fast"}, {}, "--ssm-mode"),
        ({"policy": "native", "mode": "fast"}, {}, "--ssm-mode"),
        ({}, {"SSMSPEC_MODE": "fast"}, "SSMSPEC_MODE"),
    ],
)
def test_fast_mode_without_a_policy_is_an_error(
    flags: dict[str, object], environ: dict[str, str], source: str
) -> None:
    with pytest.raises(ValueError, match=rf"{source}=fast is for a policy, not for native; .*--ssm-policy"):
        resolve(flags, {}, environ)
    assert resolve({"mode": "exact"}, {}, {}).stock


@pytest.mark.parametrize(
    ("additional", "environ", "named", "nearest"),
    [
        ({KEY: {"policy": "checkpoint"}}, {}, "checkpoint", "checkpointing"),
        ({KEY: {"policy": "every_step"}}, {}, "every_step", "every-step"),
        ({KEY: {"polcy": "recover"}}, {}, "polcy", "policy"),
        ({KEY: {"mode": "exakt"}}, {}, "exakt", "exact"),
        ({KEY: {"policy": "checkpointing", "ring_len": 0}}, {}, "ring_len", "16"),
        ({KEY: {"policy": "checkpointing", "ring_len": "many"}}, {}, "many", "16"),
        ({KEY: {"policy": "recover", "ring_len": 16}}, {}, "ring_len", "checkpointing"),
        ({KEY: "recover"}, {}, "'recover'", '"policy": "recover"'),
        ({}, {"SSMSPEC_POLICY": "recovery"}, "SSMSPEC_POLICY", "recover"),
        ({}, {"SSMSPEC_POLCY": "recover"}, "SSMSPEC_POLCY", "SSMSPEC_POLICY"),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest_legal(
    additional: dict[str, object], environ: dict[str, str], named: str, nearest: str
) -> None:
    with pytest.raises(ValueError, match=r"nearest legal|leave it out|object such as") as error:
        resolve({}, additional, environ)
    assert named in str(error.value)
    assert nearest in str(error.value)


def test_a_resolved_config_travels_as_json_and_comes_back() -> None:
    sent = ServeConfig(policy="checkpointing", ring_len=24, mode=Mode.FAST)
    assert resolve({}, {KEY: json.loads(json.dumps(sent.to_dict()))}, {}) == sent


def test_the_number_of_drafts_sets_the_window() -> None:
    assert ServeConfig(policy="recover").window(3).max_len == 4


def test_a_ring_that_cannot_hold_a_window_names_the_nearest_legal() -> None:
    with pytest.raises(
        ValueError, match="ring_len=3 cannot hold a window of max_len=4; the nearest legal value is 4"
    ):
        ServeConfig(policy="checkpointing", ring_len=3).window(3)
