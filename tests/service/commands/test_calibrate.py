"""`ropewalk calibrate` from its command line to a policy file that the server takes."""

import json
from pathlib import Path

import pytest

from service.__main__ import main
from service.evaluation.driver import Driver
from tests.service.evaluation.tiny import save_tiny, text_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def calibrated(model: Path, folder: Path, *given: str) -> Path:
    (folder / "text.txt").write_text(text_of(2500))
    shared = ("--text", str(folder / "text.txt"), "--dtype", "float32", "--kv-cache-memory", "32MiB")
    main(["calibrate", str(model), *shared, "--out", str(folder / "policy.toml"), *given])
    return folder / "policy.toml"


def test_the_file_is_taken_by_the_policy_and_its_winners_are_served(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = calibrated(model, tmp_path, "--max-length", "160", "--documents", "3", "--native-length", "48")
    told = capsys.readouterr().out
    winners = [line.split() for line in told.splitlines() if " tokens: " in line]
    assert [int(words[0]) for words in winners] == [60, 72, 96, 120, 144, 160]
    assert f"{file}: 24 rungs tried, computed in " in told
    assert "against current policy" in told
    for length, _, _, _, scheme, factor in winners:
        plan = ["plan", str(model), "--rope-policy", str(file), "--json"]
        main([*plan, "--prompt-tokens", str(int(length) - 1), "--max-tokens", "1"])
        facts = json.loads(capsys.readouterr().out)
        assert (facts["scheme"], f"{facts['factor']:g}") == (scheme, factor)
        assert facts["native_length"] == 48
    text = file.read_text()
    assert "# documents: 3\n" in text
    assert "% of resamples)" in text


def test_a_second_start_computes_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--max-length", "96", "--schemes", "yarn,ntk", "--factors", "1.25,1.5", "--documents", "2")
    first = calibrated(model, tmp_path, *given).read_text()

    def fail(*_: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(Driver, "score", fail)
    assert calibrated(model, tmp_path, *given).read_text() == first


def test_what_is_wrong_is_said_in_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, message in (
        (("--max-length", "64"), "64 is within the native length 64"),
        (("--max-length", "128", "--schemes", "yarm"), "'yarm' is not for this model"),
        (("--max-length", "128", "--out", str(tmp_path / "policy.yaml")), "ends in .toml"),
        (("--max-length", "128", "--factors", "1,2"), "factors are above 1"),
    ):
        with pytest.raises(SystemExit):
            calibrated(model, tmp_path, *given)
        assert message in capsys.readouterr().err
