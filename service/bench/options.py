"""The command line of `ropewalk bench`. Imports little, for every other command waits for it too."""

import argparse
from pathlib import Path

from service.bench.lengths import parse_lengths
from service.bench.slo import Slo, parse_slo
from service.parser import at_least

ENDPOINTS = ("completions", "chat", "generate")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add URL and the options."""
    count, positive = at_least(0), _above_zero
    parser.add_argument("url", metavar="URL", help="the server's address, such as http://127.0.0.1:8000")
    parser.add_argument("--requests", type=at_least(1), default=64, metavar="N", help="requests (default: 64)")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--concurrency", type=at_least(1), default=8, metavar="C", help="requests under way (default: 8)")
    load.add_argument("--rate", type=positive, metavar="R", help="requests a second instead, at random times (Poisson)")
    form = "N, LOW:HIGH, or a mix such as 128=3,4000=1, with weights"
    parser.add_argument(
        "--prompt-tokens",
        type=parse_lengths,
        default="128",
        metavar="LENGTHS",
        help=f"length of prompts: {form} (default: 128)",
    )
    parser.add_argument(
        "--max-tokens",
        type=parse_lengths,
        default="128",
        metavar="LENGTHS",
        help="tokens to generate, written likewise (default: 128)",
    )
    parser.add_argument(
        "--shared-prefix-tokens",
        type=count,
        default=0,
        metavar="P",
        help="so many tokens at the beginning of all prompts are the same (default: 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="of lengths, prompts and times; default: a new one, so that no cache helps",
    )
    parser.add_argument(
        "--warmup", type=count, default=1, metavar="N", help="requests before, which do not count (default: 1)"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the first of /v1/models")
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default="completions", help="what is asked (default: completions)"
    )
    parser.add_argument("--text", action="store_true", help="send prompts as text, not as token ids; chats always do")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, its folder, or a model of the hub; needed where the server has no /tokenize",
    )
    parser.add_argument(
        "--slo", type=parse_slo, default=Slo(), metavar="LIMITS", help="for goodput: ttft:2,itl:0.1,e2e:20 (seconds)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="default: $ROPEWALK_API_KEY")
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="SECONDS",
        help="silence after which a request has failed (default: 600)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, and each request's, to a file")


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"it must be above 0, it is {text}")
    return value
