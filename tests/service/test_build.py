"""What is derived from a model's parts when a server is assembled."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from model_patches.loading.load import load_tokenizer
from service.build import longest_token_bytes


def byte_level(dropped: str = "") -> Tokenizer:
    """A byte-level BPE with a token for every byte but those dropped, one merge and one special token."""
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in dropped]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate([*letters, "ab"])}, [("a", "b")]))
    tokenizer.add_special_tokens([AddedToken("<start>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


COMPLETE = byte_level()


@given(st.one_of(st.text(), st.text(alphabet="ab<start>\x06é🦜")))
@settings(deadline=None, max_examples=300)
def test_no_text_has_fewer_tokens_than_its_bytes_and_the_longest_token_allow(text: str) -> None:
    longest = longest_token_bytes(COMPLETE)
    assert longest == len("<start>")
    assert len(COMPLETE.encode(text, add_special_tokens=False).ids) * longest >= len(text.encode())


def test_bytes_say_nothing_where_the_tokenizer_drops_some_or_rewrites_text(embedded_model_folder: Path) -> None:
    assert longest_token_bytes(byte_level(dropped="z")) is None
    rewriting = byte_level()
    rewriting.normalizer = normalizers.NFC()
    assert longest_token_bytes(rewriting) is None
    assert longest_token_bytes(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))) is None
    embedded: Tokenizer = load_tokenizer(embedded_model_folder).backend_tokenizer
    assert embedded.encode("\x06", add_special_tokens=False).ids == []
    assert longest_token_bytes(embedded) is None
