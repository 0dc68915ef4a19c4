"""The command line on models that rotate nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service.__main__ import main
from tests.reference.growing import tiny
from tests.reference.supported import FIXED
from tests.service.evaluation.tiny import text_of
from tests.serving import byte_tokenizer, real_server

Folder = Callable[[str], str]
SCHEMES = [("gpt2", "learned"), ("xglm", "sinusoidal"), ("bloom, 6 heads", "alibi")]
ALL_FAMILIES = ("opt, narrow embeddings, norms after", "mpt, 8 heads, clipped", "falcon, ALiBi", "gpt2", "xglm")


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes a model folder that has a config.json and nothing else."""

    def write(family: str) -> str:
        config = {**FIXED[family].to_dict(), "architectures": [type(tiny(FIXED[family])).__name__]}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return str(tmp_path)

    return write


@pytest.fixture
def saved(tmp_path: Path) -> Folder:
    """Writes a whole model folder."""

    def write(family: str) -> str:
        tiny(FIXED[family]).save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    return write


@pytest.mark.parametrize(("family", "scheme"), SCHEMES)
def test_a_plan_in_words_and_as_json(
    folder: Folder, capsys: pytest.CaptureFixture[str], family: str, scheme: str
) -> None:
    asked = ["plan", folder(family), "--prompt-tokens", "20", "--max-tokens", "10"]
    main(asked)
    told = capsys.readouterr().out
    assert f"scheme            {scheme}\n" in told
    assert told.endswith("nothing: its positions are no rotations\n")
    main([*asked, "--json"])
    assert json.loads(capsys.readouterr().out)["scheme"] == scheme


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", ["--max-model-len", "257"], "the maximum length 257 is above the native length 256"),
        ("gpt2", ["--native-length", "257"], "the native length 257 is above the 256 positions that there are"),
        ("xglm", ["--rope-scheme", "yarn"], "scheme yarn does not go with this model"),
        ("bloom, 6 heads", ["--rope-reserve", "100"], "reserve 100 does not go with this model"),
        ("bloom, 6 heads", ["--rope-ladder", "2,4"], "ladder does not go with this model"),
    ],
)
def test_settings_that_the_model_cannot_have_are_refused(
    folder: Folder, capsys: pytest.CaptureFixture[str], family: str, options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", folder(family), "--prompt-tokens", "20", *options])
    error = capsys.readouterr().err
    assert message in error
    assert options[0] in error


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["eval", "--schemes", "policy,yarn:2"], "--schemes: yarn:2 is not for this model: this model's positions are"),
        (["eval", "--schemes", "default"], "--schemes: default is not for this model"),
        (["eval", "--schemes", "alibi:2"], "--schemes: alibi:2 is not for this model"),
        (["calibrate", "--max-length", "200"], "there is nothing to calibrate: this model's positions are alibi"),
    ],
)
def test_schemes_of_other_models_are_refused(
    folder: Folder, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    name, *options = command
    with pytest.raises(SystemExit):
        main([name, folder("bloom, 6 heads"), *options])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("measure", ["decode", "entropy"])
def test_measures_of_scaling_are_refused(
    saved: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str], measure: str
) -> None:
    given = ("--lengths", "64", "--schemes", "policy", "--measure", measure, "--out", str(tmp_path / "out"))
    with pytest.raises(SystemExit):
        main(["eval", saved("bloom, 6 heads"), *given, "--kv-cache-memory", "32MiB", "--dtype", "float32"])
    assert f"--measure {measure}: " in capsys.readouterr().err


@pytest.mark.parametrize(("family", "scheme"), SCHEMES)
def test_likelihood_by_length_is_measured_as_far_as_there_are_positions(
    saved: Folder, tmp_path: Path, family: str, scheme: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(text_of(2500))
    main(
        [
            *("eval", saved(family), "--text", str(text), "--dtype", "float32", "--kv-cache-memory", "32MiB"),
            *("--lengths", "32,64,300", "--documents", "2", "--schemes", f"policy,{scheme}", "--measure", "guard,nll"),
            *("--out", str(tmp_path / "out")),
        ]
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "2 of 2" in report
    cells = [json.loads(line) for line in (tmp_path / "out" / "cells.jsonl").read_text().splitlines()]
    assert cells


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_folder_is_served_in_bfloat16(saved: Folder, family: str) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory": "16MiB"}
    with real_server(model=saved(family), **settings) as server:
        body = {"prompt": "What is this?", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        first, again = (server.client.post("/generate", json=body).json() for _ in range(2))
    assert first["usage"]["completion_tokens"] == 12
    assert first["token_ids"] == again["token_ids"]
    assert first["rope"]["factor"] == 1.0
