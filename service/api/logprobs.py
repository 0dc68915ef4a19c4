"""Log-probabilities in the three shapes of an answer. Knows what a token says on its own."""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from service.api.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    TopToken,
)
from service.core import TokenEvent
from service.engine.byte_level import bytes_of, is_byte_level

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token for one byte, where the tokenizer falls back to them


class LogprobShapes:
    """Turns the log-probabilities of tokens into parts of answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = is_byte_level(tokenizer)

    def text(self, token_id: int) -> str:
        """What a token says, with its space; bytes that are no character by themselves show as U+FFFD."""
        # Some tokenizers drop the space that begins a text, so the token must not begin it.
        once, twice = (self._tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :]

    def bytes(self, token_id: int) -> list[int]:
        """The token's bytes, also where they are only a part of a character."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return list(bytes_of(token))
        if single := BYTE.fullmatch(token):
            return [int(single[1], 16)]
        return list(self.text(token_id).encode())

    def generate(self, tokens: Sequence[TokenEvent]) -> list[TokenLogprob]:
        """For POST /generate."""
        return [
            TokenLogprob(
                token_id=token.token_id,
                token=self.text(token.token_id),
                logprob=token.logprob,
                top=[TopToken(token_id=top, token=self.text(top), logprob=value) for top, value in token.top_logprobs],
            )
            for token in tokens
            if token.logprob is not None
        ]

    def chat(self, tokens: Sequence[TokenEvent]) -> ChatLogprobs:
        """For POST /v1/chat/completions."""
        shaped = [
            ChatTokenLogprob(
                token=self.text(token.token_id),
                logprob=token.logprob,
                bytes=self.bytes(token.token_id),
                top_logprobs=[self._told(*top) for top in token.top_logprobs],
            )
            for token in tokens
            if token.logprob is not None
        ]
        return ChatLogprobs(content=shaped)

    def completion(self, tokens: Sequence[TokenEvent], offset: int) -> CompletionLogprobs:
        """For POST /v1/completions.

        Args:
            tokens: some of the answer's; one without a log-probability begins a prompt.
            offset: characters of the answer's text before them.
        """
        shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            own, logprob = self.text(token.token_id), token.logprob
            tops = [(self.text(top), value) for top, value in token.top_logprobs]
            shaped.tokens.append(own)
            shaped.token_logprobs.append(logprob)
            # The token itself is always there; of tokens that look the same the likeliest counts.
            shaped.top_logprobs.append(None if logprob is None else dict(reversed([*tops, (own, logprob)])))
            shaped.text_offset.append(offset)
            offset += len(token.text)
        return shaped

    def _told(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(token=self.text(token_id), logprob=logprob, bytes=self.bytes(token_id))
