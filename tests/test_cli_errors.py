"""Bad input gets one sentence on stderr, exit 2 and no traceback: the flag or key, the value, the limit, what is legal."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from configs import NEMOTRON, QWEN, changed
from ssmspec_cli.main import app
from typer.testing import CliRunner


def refusal(*args: str) -> str:
    """The one sentence that a refused command prints."""
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 2, found.output
    assert isinstance(found.exception, SystemExit)
    assert found.stdout == ""
    assert found.stderr.startswith("Error: ")
    assert found.stderr.count("\n") == 1
    return found.stderr.removeprefix("Error: ").strip()


NUMBERS = "0,1,2,3,4,5,6,7,8,9"
TRAFFIC = {
    "T above the ring": (
        "--draft 7 --ring 4",
        "--ring=4 cannot hold a window of T=8; the nearest legal value is 8",
    ),
    "ring above the limit": (
        "--ring 60",
        "--ring=60 + T=4 exceeds 63 records; the nearest legal value is 59",
    ),
    "negative drafts": ("--draft -1", "--draft -1 is not within 0..30; the nearest legal value is 0"),
    "too many drafts": ("--draft 1,40", "--draft 40 is not within 0..30; the nearest legal value is 30"),
    "no whole number": ("--draft 3.5", "--draft '3.5' is not a whole number"),
    "an empty item": ("--draft 1,,3", "--draft '1,,3' has an empty item"),
    "an empty list": ("--draft ''", "--draft '' has an empty item"),
    "an empty window": ("--window 0", "--window 0 is not within 1..31; the nearest legal value is 1"),
    "both lengths": ("--window 2 --draft 1", "--draft and --window say the same"),
    "no batch": ("--batch 0", "--batch 0 is not at least 1; the nearest legal value is 1"),
    "rate above 1": (
        "--acceptance 1.5",
        "acceptance rate=1.5 is not within 0..1; the nearest legal value is 1",
    ),
    "rate below 0": (
        "--acceptance -0.1",
        "acceptance rate=-0.1 is not within 0..1; the nearest legal value is 0",
    ),
    "rate NaN": ("--acceptance nan", "--acceptance: acceptance rate=nan is not a number within 0..1"),
    "rising acceptance": ("--acceptance 0.8,0.9,0.1", "draft 2=0.9 rises above the 0.8 of draft 1"),
    "list too short": (
        "--acceptance 0.8,0.7",
        "--acceptance 0.8,0.7: acceptance lists 2 positions, and there are 3",
    ),
    "no acceptance": (
        "--acceptance nowhere",
        "'nowhere' is no rate within 0..1, no list of 3 of them, and no trace",
    ),
    "an object as acceptance": (
        """--acceptance '{"accepted": 3}'""",
        "give 0.8, or 0.9,0.8,0.6 for three drafts, or the path of a file with an accepted count a line",
    ),
    "a device as a model": ("--model /dev/null", "--model: /dev/null: not a regular file"),
    "TP and value heads": ("--tp 3", "--tp=3 does not divide HV=32; the nearest legal value is 2"),
    "TP and key heads": ("--tp 32", "--tp=32 does not divide H=16; the nearest legal value is 16"),
    "no TP": ("--tp 0", "--tp 0 is not at least 1; the nearest legal value is 1"),
    "unknown policy": (
        "--policy chekpointing",
        "--policy 'chekpointing' is not one of native, recover, every-step,",
    ),
    "a guess": ("--policy chekpointing", "Did you mean checkpointing?"),
    "unknown mode": ("--mode quick", "--mode 'quick' is not one of exact, fast"),
    "float64 is internal": (
        "--state-dtype float64",
        "--state-dtype 'float64' is not one of fp32, bf16, fp16, nvfp4",
    ),
    "record format": ("--record-dtype fp8", "--record-dtype 'fp8' is not one of fp32, bf16, fp16"),
    "read format": ("--read-copy fp32", "--read-copy 'fp32' is not one of none, fp16, bf16, fp8, nvfp4"),
    "stochastic fp32": (
        "--stochastic-rounding",
        "--stochastic-rounding rounds to 16 bits, and --state-dtype is fp32",
    ),
    "preset typo": (
        "--model qwen3.5-4",
        "--model: 'qwen3.5-4' is no preset, no Hub id of one, and no file or folder",
    ),
    "preset guess": ("--model qwen3.5-4", "Did you mean qwen3.5-4b? Nothing is downloaded"),
    "two forms": ("--json --csv", "--json and --csv exclude each other"),
    "plot format": ("--plot bytes.pdf", "--plot bytes.pdf ends in '.pdf'; .png and .svg can be drawn"),
    "plot nowhere": ("--plot /nowhere/bytes.png", "/nowhere is not a folder that can be written"),
    "plot of a sweep": (
        "--plot x.png --ring 8,9,10,11,12",
        "--plot draws 4 combinations at most, and this sweep has 5",
    ),
    "a huge sweep": (
        f"--draft {NUMBERS} --batch 1{NUMBERS} --context 1 --ring 16,17,18,19,20,21".replace(
            "--context 1 ", ""
        ),
        "600 combinations of 4 rows are 2,400, and 2,000 is the limit",
    ),
}


@pytest.mark.parametrize("args", ["--policy foo", "--mode foo", "--state-dtype foo", "--batch foo"])
def test_a_sentence_ends_without_a_period(args: str) -> None:
    assert refusal("compare", "traffic", *args.split())[-1].isalnum()


@pytest.mark.parametrize(("args", "said"), TRAFFIC.values(), ids=TRAFFIC)
def test_traffic_refuses(args: str, said: str) -> None:
    assert said in refusal("compare", "traffic", *shlex.split(args))


CAPACITY = {
    "memory below the weights": (
        "--gpu-memory 8",
        "--gpu-memory=8 x --gpu-utilization=0.9 = 7.20 GiB does not hold 7.82 GiB of weights and overhead (--tp=1);"
        " the nearest legal value of --gpu-memory is above 8.69",
    ),
    "memory NaN": ("--gpu-memory nan", "--gpu-memory nan is not a finite number"),
    "negative memory": (
        "--gpu-memory -1",
        "--gpu-memory=-1.0 must not be negative; the nearest legal value is 0",
    ),
    "all of the memory twice": (
        "--gpu-utilization 2",
        "--gpu-utilization=2.0 is not within 0..1; the nearest legal value is 1",
    ),
    "none of the memory": ("--gpu-utilization 0", "--gpu-utilization=0.0 is not within 0..1"),
    "negative weights": (
        "--weights-gib -3",
        "--weights-gib=-3.0 must not be negative; the nearest legal value is 0",
    ),
    "negative requests": (
        "--max-num-seqs -5",
        "--max-num-seqs=-5 must be positive; the nearest legal value is 1",
    ),
    "more requests than memory": (
        "--max-num-seqs 100000",
        "--max-num-seqs=100000 reserves 184.82 GiB of records",
    ),
    "context beyond the model": (
        "--context 262145",
        "--context=262145 exceeds the max_context=262144 of qwen3.5-4b",
    ),
    "cache mode": ("--cache-mode all", "--cache-mode 'all' is not one of none, align"),
    "KV format": ("--kv-dtype nvfp4", "--kv-dtype 'nvfp4' is not one of bf16, fp16, fp32, fp8"),
}


@pytest.mark.parametrize(("args", "said"), CAPACITY.values(), ids=CAPACITY)
def test_capacity_refuses(args: str, said: str) -> None:
    assert said in refusal("compare", "capacity", *shlex.split(args))


def test_a_block_shorter_than_the_window_is_refused(tmp_path: Path) -> None:
    """align < T: the KV of 16 tokens covers a state of 8 heads of 8 by 16."""
    small = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "head_dim": 8192}
    narrow = changed(NEMOTRON, **small)
    said = refusal(
        "compare", "capacity", "--cache-mode", "align", "--draft", "19", "--model", _config(tmp_path, narrow)
    )
    assert said.startswith("the block of 16 tokens is shorter than the window of T=20")


TRACES = {
    "truncated": ('3\n{"accepted": 2}\n{"acc', "line 3 is '{\"acc', not JSON; was the trace cut short?"),
    "zero": (
        "3\n0\n",
        "accepted=0 in step 2 is not within 1..4, the drafts and the bonus token; the nearest legal value is 1",
    ),
    "above T": (
        "5\n",
        "accepted=5 in step 1 is not within 1..4, the drafts and the bonus token; the nearest legal value is 4",
    ),
    "empty": ("", "an empty trace; one accepted count is needed at least"),
}


@pytest.mark.parametrize(("text", "said"), TRACES.values(), ids=TRACES)
def test_a_trace_is_refused_by_line_or_step(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    told = refusal("compare", "traffic", "--acceptance", str(tmp_path / "trace.jsonl"))
    assert told.startswith("--acceptance: ")
    assert said in told


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "HV % H": (
        changed(QWEN, linear_num_value_heads=24),
        "linear_num_value_heads=24 is not a multiple of linear_num_key_heads=16; the nearest legal value is 16",
    ),
    "no recurrent layer": (
        changed(QWEN, layer_types=..., full_attention_interval=1),
        "no recurrent layer among 32",
    ),
    "unknown letter": (
        changed(NEMOTRON, hybrid_override_pattern="M" * 51 + "X"),
        "hybrid_override_pattern has 'X' at position 51; known are M * - E",
    ),
    "pattern length": (
        changed(NEMOTRON, hybrid_override_pattern="M-M*"),
        "hybrid_override_pattern describes 4 layers, but num_hidden_layers=52",
    ),
    "two dtypes": (
        changed(QWEN, dtype="bfloat16", torch_dtype="float16"),
        "text_config.dtype=bfloat16 and text_config.torch_dtype=float16 disagree",
    ),
}


def _config(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "model.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(("config", "said"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_refused_by_its_key(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = _config(tmp_path, config)
    told = refusal("compare", "capacity", "--model", path)
    assert told.startswith(f"--model {path}: ")
    assert said in told


def test_tp_names_the_replication_rule_of_groups(tmp_path: Path) -> None:
    path = _config(tmp_path, changed(NEMOTRON, n_groups=6, mamba_num_heads=96))
    told = refusal("compare", "traffic", "--tp", "4", "--model", path)
    assert told == (
        "--tp=4 does not divide H=6; the nearest legal value is 3"
        " (Mamba2 groups are replicated only where tp is a multiple of them)"
    )


def test_a_default_taken_for_the_state_is_printed(tmp_path: Path) -> None:
    path = _config(tmp_path, changed(QWEN, mamba_ssm_dtype=...))
    found = CliRunner().invoke(app, ["compare", "capacity", "--model", path], env={"COLUMNS": "200"})
    assert found.exit_code == 0
    assert (
        "'mamba_ssm_dtype' is absent: state in bfloat16, the model's own dtype, as vLLM 0.33.0 takes"
        in found.stdout
    )
    assert "weights of model unknown, counted as 0: pass --weights-gib" in found.stdout
    assert "weights unknown, counted as 0" in found.stdout.splitlines()[1], "the headline says so too"
    told = ["compare", "capacity", "--model", path, "--weights-gib", "9"]
    assert "unknown" not in CliRunner().invoke(app, told, env={"COLUMNS": "200"}).stdout


def test_the_interpreter_is_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    said = refusal("compare", "exact", "--backend", "triton", "--state-dtype", "fp32")
    assert "TRITON_INTERPRET=1 set before Python starts, which takes many minutes for a life" in said


@pytest.mark.parametrize(
    ("index", "known"),
    [
        ('{"metadata": {"total_size": 10737418240}}', True),  # 10 GiB
        ('{"metadata": {"total_size": -1}}', False),
        ('{"metadata": {"total_size": "10"}}', False),
        ('{"metadata": []}', False),
        ('{"weight_map": {}}', False),
        ("{", False),
    ],
)
def test_weights_are_those_of_the_index_beside_the_config(tmp_path: Path, index: str, known: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    for path in (tmp_path, tmp_path / "config.json"):
        args = ["compare", "capacity", "--model", str(path)]
        found = CliRunner().invoke(app, args, env={"COLUMNS": "200"}).stdout
        assert ("weights: 10.00 GiB, by the model.safetensors.index.json" in found) == known
        assert ("weights unknown, counted as 0" in found) != known
    if known:
        args = ["compare", "capacity", "--model", str(tmp_path), "--gpu-memory", "11"]
        assert "= 9.90 GiB does not hold 10.00 GiB" in refusal(*args)


EXACT = {
    "unknown backend": ("--backend cuda --draft 0", "--backend='cuda' is not one of torch"),
    "too many lives": (
        f"--draft {NUMBERS} --ring 16,17,18,19,20,21",
        "120 lives would be played, some seconds each, and 50 is the limit",
    ),
}


@pytest.mark.parametrize(("args", "said"), EXACT.values(), ids=EXACT)
def test_exact_refuses(args: str, said: str) -> None:
    assert said in refusal("compare", "exact", *args.split())


def test_what_cannot_be_is_refused_before_a_life_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    from ssmspec.measure import exact

    monkeypatch.setattr(exact, "compare", lambda *args, **kwargs: pytest.fail("a life was played"))
    assert "--context=999999999 exceeds" in refusal("compare", "--context", "999999999")
