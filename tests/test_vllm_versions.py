"""A policy is served by the versions of vLLM that were checked, unmodified; `ssmspec doctor` says what stands in the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ssmspec.runtime.vllm import compat


def _install(root: Path) -> dict[str, str]:
    """A stand-in for a vLLM: its files, and their fingerprints."""
    (root / "v1").mkdir(parents=True)
    (root / "v1" / "runner.py").write_text("class Runner:\n    def step(self):\n        return 1\n")
    name = "v1/runner.py:Runner.step"
    found = compat.fingerprint(root, name)
    assert found is not None
    return {name: found}


def _checked(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.setattr(compat, "FINGERPRINTS", {"1.2.3": _install(root)})
    monkeypatch.setattr(compat, "DEVICES", {"1.2.3": "abacus"})


def test_each_checked_version_names_its_device() -> None:
    assert set(compat.DEVICES) == set(compat.FINGERPRINTS)


def test_a_checked_version_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checked(monkeypatch, tmp_path)
    assert compat.check("1.2.3", tmp_path) == "abacus"


def test_another_version_raises_with_found_and_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checked(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match=r"vllm 1\.2\.4 was not checked .* wanted 1\.2\.3"):
        compat.check("1.2.4", tmp_path)


@pytest.mark.parametrize("change", ["return 2", "pass"])
def test_a_changed_internal_raises_with_its_name(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checked(monkeypatch, tmp_path)
    file = tmp_path / "v1" / "runner.py"
    file.write_text(file.read_text().replace("return 1", change))
    with pytest.raises(
        RuntimeError, match=r"v1/runner\.py:Runner\.step is [0-9a-f]{16}, wanted [0-9a-f]{16}"
    ):
        compat.check("1.2.3", tmp_path)


def test_a_missing_internal_raises_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _checked(monkeypatch, tmp_path)
    (tmp_path / "v1" / "runner.py").write_text("class Runner: ...\n")
    with pytest.raises(RuntimeError, match=r"Runner\.step is missing"):
        compat.check("1.2.3", tmp_path)


def test_an_edit_elsewhere_in_the_file_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _checked(monkeypatch, tmp_path)
    file = tmp_path / "v1" / "runner.py"
    file.write_text("import os\n\n" + file.read_text())
    compat.check("1.2.3", tmp_path)


def _found(
    monkeypatch: pytest.MonkeyPatch, root: Path, *, installed: bool = True, platform: str = "abacus"
) -> None:
    """A checked version, with this plugin and on this platform; it has every name."""
    _checked(monkeypatch, root)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(compat, "resolve", lambda name: SimpleNamespace(device_type=platform))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **names: ["ssmspec"] * installed)


def test_doctor_is_told_that_policies_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _found(monkeypatch, tmp_path)
    assert compat.finding("1.2.3", tmp_path) == "served on abacus"
    assert compat.finding("1.2.4", tmp_path).startswith("vllm 1.2.4 was not checked")


def test_doctor_is_told_of_a_plugin_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, tmp_path, installed=False)
    assert compat.finding("1.2.3", tmp_path).startswith("the plugin is not installed as one")


@pytest.mark.parametrize(
    ("named", "finding"),
    [
        ("other,ssmspec", "served on abacus"),
        ("other", "VLLM_PLUGINS=other leaves the plugin out"),
        ("", "VLLM_PLUGINS= leaves the plugin out"),
    ],
)
def test_doctor_is_told_of_a_list_that_leaves_the_plugin_out(
    named: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's load_plugins_by_group loads what the list names, if there is one."""
    _found(monkeypatch, tmp_path)
    monkeypatch.setenv("VLLM_PLUGINS", named)
    assert compat.finding("1.2.3", tmp_path).startswith(finding)


@pytest.mark.parametrize(("platform", "here"), [("quipu", "quipu"), ("", "none")])
def test_doctor_is_told_of_another_platform(
    platform: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, tmp_path, platform=platform)
    expected = f"served on abacus, but vLLM's platform here is {here}"
    assert compat.finding("1.2.3", tmp_path) == expected


@pytest.mark.parametrize("error", [RuntimeError("this vLLM has none"), OSError("no libcuda.so.1")])
def test_doctor_is_told_of_a_name_that_cannot_be_imported(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(monkeypatch, tmp_path)

    def resolve(name: str) -> Any:
        if name == "MambaMixer2":
            raise error
        return SimpleNamespace(device_type="abacus")

    monkeypatch.setattr(compat, "resolve", resolve)
    assert compat.finding("1.2.3", tmp_path).endswith(f":MambaMixer2 cannot be imported: {error}")
