"""A GGUF model in several files is the model that it would be in one."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from model_patches.errors import DamagedModelError, UnsupportedModelError
from model_patches.loading.convert import convert_gguf
from model_patches.loading.gguf_parts import model_name_of, parts_of
from model_patches.loading.load import load_model
from model_patches.loading.source import resolve_model

TinyGguf = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.mark.parametrize("tensors_per_part", [19, 7, 1])
def test_every_weight_is_taken_from_the_part_that_has_it(
    tiny_gguf: TinyGguf, tiny_model: LlamaForCausalLM, tmp_path: Path, tensors_per_part: int
) -> None:
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(tiny_gguf(tensors_per_part=tensors_per_part), folder)
    loaded = load_model(folder, dtype=torch.bfloat16, device=CPU)
    for name, weights in tiny_model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weights), name
    assert loaded.generation.end_token_ids == {2}
    assert loaded.tokenizer.decode(loaded.tokenizer("the 12").input_ids) == "the 12"
    assert sorted(file.suffix for file in folder.iterdir() if file.suffix == ".gguf") == []


def test_an_output_matrix_in_another_part_is_not_taken_for_tied(
    tiny_gguf: TinyGguf, tiny_model: LlamaForCausalLM, tmp_path: Path
) -> None:
    output = np.full(tiny_model.model.embed_tokens.weight.shape, 0.5, dtype=np.float32)
    convert_gguf(tiny_gguf(tensors={"output.weight": output}, tensors_per_part=4), tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU).model
    assert torch.all(model.get_parameter("lm_head.weight") == 0.5)


def test_quantised_blocks_are_put_together_as_they_are(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, tensors_per_part in ((whole, 0), (parts, 5)):
        folder.mkdir()
        convert_gguf(tiny_gguf(f"{folder.name}.gguf", stored_as=kind, tensors_per_part=tensors_per_part), folder)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_whichever_part_is_named_it_is_one_model_converted_once(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    first = tiny_gguf(tensors_per_part=7)
    folders = {resolve_model(str(part), cache_dir=tmp_path / "cache") for part in parts_of(first)}
    assert len(folders) == 1
    assert folders.pop().name.startswith("tiny-")


def test_a_change_of_any_part_gives_another_entry(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    first = tiny_gguf(tensors_per_part=7)
    before = resolve_model(str(first), cache_dir=tmp_path / "cache")
    last = parts_of(first)[-1]
    last.write_bytes(last.read_bytes() + b"more")
    assert resolve_model(str(first), cache_dir=tmp_path / "cache") != before


def test_missing_parts_are_named_whichever_is_asked_for(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    first = tiny_gguf(tensors_per_part=5)
    _, second, third, fourth = parts_of(first)
    second.unlink()
    fourth.unlink()
    for named in (first, third):
        with pytest.raises(
            DamagedModelError, match=r"of 4 parts .*folder: tiny-00002-of-00004\.gguf, tiny-00004-of-00004\.gguf$"
        ):
            resolve_model(str(named), cache_dir=tmp_path / "cache")


def test_a_number_beyond_the_count_is_told(tmp_path: Path) -> None:
    (tmp_path / "big-00004-of-00003.gguf").touch()
    with pytest.raises(DamagedModelError, match="named part 4 of 3"):
        parts_of(tmp_path / "big-00004-of-00003.gguf")


def test_parts_that_were_swapped_are_told_apart_by_what_they_say(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    first, second, third = parts_of(tiny_gguf(tensors_per_part=7))
    second.rename(tmp_path / "kept")
    third.rename(second)
    (tmp_path / "kept").rename(third)
    with pytest.raises(
        DamagedModelError, match=r"00002-of-00003\.gguf is named part 2 of 3 .* says that it is part 3 of 3"
    ):
        convert_gguf(first, tmp_path)


def test_a_part_with_fewer_tensors_than_the_first_one_counts_is_told(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    first = tiny_gguf(tensors_per_part=7)
    other = tiny_gguf("other.gguf", tensors_per_part=7, without="blk.1.ffn_up.weight")
    parts_of(other)[2].replace(parts_of(first)[2])
    with pytest.raises(DamagedModelError, match=r"3 parts of .* hold 19 tensors, expected 20"):
        convert_gguf(first, tmp_path)


def test_a_part_under_another_name_is_refused_with_the_name_it_needs(tiny_gguf: TinyGguf, tmp_path: Path) -> None:
    renamed = tiny_gguf(tensors_per_part=7).rename(tmp_path / "renamed.gguf")
    with pytest.raises(UnsupportedModelError, match=r"one of 3 parts .*renamed-00001-of-00003\.gguf"):
        convert_gguf(renamed, tmp_path)


@pytest.mark.parametrize(
    ("file", "name"),
    [("big-00002-of-00003.gguf", "big"), ("big-00002-of-00003.GGUF", "big"), ("big-v2.gguf", "big-v2")],
)
def test_a_model_is_called_without_the_number_of_a_part(file: str, name: str) -> None:
    assert model_name_of(Path(file)) == name
