"""Words that are one token each, so that prompts can be made of an exact number of tokens.

Knows what a tokenizer gives for a text; does not know where the tokenizer is.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from service.bench.errors import BenchError

Tokenize = Callable[[str], Awaitable[list[int]]]
"""From a text to its token ids, without what is put around a text."""

OPENERS = ("the", "a", "it", "and", "in", "to", "is", "we")
COMMON = (
    "about above action after again against age air all also always among animal answer any area arm army around art "
    "ask back bad bank base bed before began behind best better between big bird black blue board boat body book both "
    "box boy bread bring brother building business buy call came car care case cause center century certain chair "
    "change child church city class clear close cold color come common company control cost could country course cut "
    "dark day death deep did different do dog door down draw dream drive during each early earth east eat egg end "
    "energy enough even evening event every example eye face fact fall family far farm fast father feel field fight "
    "find fire first fish five floor follow food foot for force form found four free friend from front full game "
    "garden gave girl give glass go gold good great green ground group grow hair half hand happen hard have head hear "
    "heart heat help her here high hill him history home horse hot hour house how hundred idea inside iron island job "
    "just keep kind king knew know land language large last late laugh law lead learn left letter level life light "
    "like line list little live long look love low machine made main make man many map mark market matter may mean "
    "member metal mile milk mind minute money month moon more morning mother mountain move much music must name "
    "nature near need never new next night north nose note number ocean office often old once one only open order "
    "other over own page paper park part party pass past pay people person picture piece place plan plant play point "
    "power problem public put question quick quite rain read red rest rich right river road rock room round rule run "
    "sail same school science sea second see seven ship short side silver simple six sky sleep small snow some song "
    "soon sound south space stand star start state stone story street strong such summer sun system table take talk "
    "teach ten than their then these thing think third those thousand three time today together town train travel "
    "tree true turn two under until use valley very village voice walk wall war warm watch water way week well west "
    "wheel when where which while white whole wide wife wild wind window winter with woman wood word work world would "
    "write year young"
)
LEAST_WORDS = 32  # fewer would make prompts that repeat themselves


@dataclass(frozen=True)
class Vocabulary:
    """Words of one token each.

    Attributes:
        opener: one token at the beginning of a text.
        words: each one token where it follows a space.
        token_ids: of the words.
    """

    opener: str
    words: tuple[str, ...]
    token_ids: tuple[int, ...]


async def find_vocabulary(tokenize: Tokenize) -> Vocabulary:
    """Find the words of `COMMON` that are one token each.

    Words are asked about by the group: a text of n words that has n tokens has no word of two. Only a group that fails
    is halved, so that a common vocabulary takes few questions.

    Raises:
        BenchError: there are too few.
    """
    for opener in OPENERS:
        if len(await tokenize(opener)) == 1:
            found = await _single_tokens(tokenize, opener, COMMON.split())
            if len(found) >= LEAST_WORDS:
                return Vocabulary(opener, tuple(found), tuple(found.values()))
            break
    raise BenchError("the tokenizer has too few English words of one token to make prompts of exact lengths")


async def _single_tokens(tokenize: Tokenize, opener: str, words: list[str]) -> dict[str, int]:
    token_ids = (await tokenize(" ".join((opener, *words))))[1:]
    if len(token_ids) == len(words):
        return dict(zip(words, token_ids, strict=True))
    if len(words) == 1:
        return {}
    middle = len(words) // 2
    return {
        **await _single_tokens(tokenize, opener, words[:middle]),
        **await _single_tokens(tokenize, opener, words[middle:]),
    }
