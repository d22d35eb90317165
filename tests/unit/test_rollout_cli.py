"""The flags of `pier rollout`, as users of `vf-eval` type them, with an environment that needs no sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.cli.main import main
from pier.cli.rollout import _progress
from pier.errors import UsageError
from pier.rollout.state import error_data

MODULE = """
import pier.rollout as vf

class Still(vf.Environment):
    async def rollout(self, input, client, model, sampling_args=None):
        state = await self.init_state(input, client, model, sampling_args)
        source = state["client"]
        server = source.upstream and [source.upstream.url, *source.upstream.dialects, dict(source.upstream.headers)]
        state["seen"] = [server, source.tokens, self.timeout_seconds, self.level]
        state["completion"], state["is_completed"] = [], True
        return state

def load_environment():
    rows = [{"question": str(number)} for number in range(9)]
    return Still(dataset=rows, rubric=vf.Rubric(lambda: 1.0), timeout_seconds=None, level=0)
"""


def run(tmp_path: Path, *flags: str) -> int:
    (tmp_path / "my_env.py").write_text(MODULE)
    with pytest.raises(SystemExit) as stopped:
        main(["rollout", str(tmp_path / "my_env.py"), "-m", "tiny", *flags])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_flags_of_vf_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = "-n 2 --rollouts-per-example 2 --max-concurrent 1 --shuffle --shuffle-seed 3 --independent-scoring -s"
    server = ["-b", "http://127.0.0.1:9/v1", "--api-client-type", "anthropic_messages", "--header", "X-Team: a: b"]
    sampling = ["-T", "0.5", "--max-tokens", "9", "-S", '{"max_tokens": 3, "reasoning_effort": "low"}']
    more = ["--extra-env-kwargs", '{"level": 7}', "--timeout", "5", "-C", "seen,sampling_args", "--json"]
    assert run(tmp_path, *given.split(), *server, *sampling, *more) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(found["outputs"]) == 4 and found["metadata"]["shuffle_seed"] == 3
    assert found["outputs"][0]["seen"] == [["http://127.0.0.1:9/v1", "anthropic", {"X-Team": "a: b"}], False, 5.0, 7]
    assert found["outputs"][0]["sampling_args"] == {"temperature": 0.5, "max_tokens": 3, "reasoning_effort": "low"}
    (saved,) = (tmp_path / "outputs" / "evals" / "my-env--tiny").iterdir()
    assert len((saved / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("flags", "said", "instead"),
    [
        ("-c 4", "unsupported flag -c of vf-eval", "--max-concurrent N"),
        ("--resume", "unsupported flag --resume of vf-eval", "-o DIR"),
        ("-e configs/endpoints.toml", "unsupported registry of endpoints configs/endpoints.toml", "--base-url URL"),
        ("--tokens", "--tokens needs --base-url", "providers.toml"),
        ("--header x", "invalid value 'x' for --header: expected 'Name: Value'", "--help"),
        ("--env-args []", "invalid value '[]' for --env-args: expected a JSON object", "--help"),
        ('-S {"typo":1}', "unsupported sampling argument 'typo'", ""),
        ('-S {"extra_body":{"min_p":0.1}}', "unsupported sampling argument 'min_p'", ""),
    ],
)
def test_what_cannot_be_done_names_what_can(
    flags: str, said: str, instead: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *flags.split()) == 2
    message = capsys.readouterr().err
    assert said in message and instead in message, message


def test_a_configuration_file_of_vf_eval_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rollout", "evals.toml", "-m", "tiny"])
    assert "unsupported configuration file evals.toml" in capsys.readouterr().err


def test_samples_of_rollouts_that_are_done_are_not_left_out_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["-o", str(tmp_path / "out"), "--samples", str(tmp_path / "samples.jsonl")]
    assert run(tmp_path, "-n", "2", *flags) == 0
    assert run(tmp_path, "-n", "3", *flags) == 2
    said = capsys.readouterr().err
    assert "2 rollouts in" in said and "their samples were not kept" in said
    assert run(tmp_path, "-n", "3", "-o", str(tmp_path / "out")) == 0


def test_progress_has_the_hint_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_data(UsageError("unknown image", hint="pier image list"))
    row = {"reward": None, "error": error, "example_id": 3, "stop_condition": "error"}
    _progress([row], [row], {})
    shown = capsys.readouterr().err
    assert "example 3" in shown and "unknown image" in shown and "(hint: pier image list)" in shown
