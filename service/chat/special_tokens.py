"""Markers that are special tokens. Knows the tokenizer's added tokens."""

from tokenizers import Tokenizer

from service.chat.formats import ToolFormat
from service.chat.reasoning import ReasoningMarkers


def special_markers(
    tokenizer: Tokenizer, tool_format: ToolFormat | None, reasoning: ReasoningMarkers | None
) -> dict[str, int]:
    """The markers that the tokenizer has as special tokens, with their ids.

    Decoding that skips special tokens swallows them: to be seen by a `Splitter` they must be kept. Markers that are
    plain text, or added tokens that are not special, are there either way.

    Args:
        tokenizer: the model's.
        tool_format: how calls are written, None where none are expected.
        reasoning: what stands around reasoning, None where none is expected.
    """
    markers = () if tool_format is None else tool_format.markers
    if reasoning is not None:
        markers += (reasoning.opening, reasoning.closing)
    if not markers:
        return {}  # most chats: the list of added tokens can be long
    special = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return {marker: special[marker] for marker in markers if marker in special}
