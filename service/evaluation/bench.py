"""What every measurement works with. Knows no measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from service.evaluation.driver import Driver
from service.evaluation.schemes import SchemeAsked
from service.evaluation.texts import documents
from service.evaluation.unrotated import UnrotatedModel
from service.scaling.fixed import AnyPolicy


@dataclass(frozen=True)
class Bench:
    """One model, one set of texts, and what to compare on them.

    Attributes:
        driver: of the serving engine.
        policy: of the server.
        tokenizer: of the model.
        reference: the same weights on the unrotated reference path, loaded when first asked for.
        schemes: to compare.
        lengths: in tokens, rising.
        streams: the token ids of each text.
        documents: at most so many are measured.
    """

    driver: Driver
    policy: AnyPolicy
    tokenizer: Tokenizer
    reference: Callable[[], UnrotatedModel]
    schemes: Sequence[SchemeAsked]
    lengths: Sequence[int]
    streams: Sequence[Sequence[int]]
    documents: int

    def cut(self, length: int) -> list[list[int]]:
        """Documents of exactly so many tokens; see `service.evaluation.texts.documents`."""
        return documents(self.streams, length, self.documents)
