"""The command lines of `ropewalk eval` and `ropewalk calibrate`. Imports little: every other one waits for it."""

import argparse
from pathlib import Path

from service.cli import add_settings
from service.parser import at_least

MEASURE_NAMES = ("guard", "nll", "sliding", "decode", "passkey", "needle", "needles", "key-value", "entropy")
SETTINGS = (
    *("revision", "trust_remote_code", "device", "dtype", "quantization", "lora_adapter"),
    *("native_length", "max_model_len", "native_rope"),
    *("rope_policy", "rope_scheme", "rope_ladder", "growth_refresh_tokens"),
    *("kv_cache_memory", "kv_cache_dtype", "max_batch_tokens"),
)


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the settings that matter here, and the options of `ropewalk eval`."""
    add_settings(parser, only=SETTINGS)
    _add_text(parser, documents=4)
    parser.add_argument(
        "--lengths",
        type=_numbers,
        default="1024,2048,4096,8192,12288,16384",
        metavar="N,…",
        help="tokens in all, prompt and one generated (default: %(default)s)",
    )
    parser.add_argument(
        "--schemes",
        default="default,linear,ntk:2,dynamic,yarn:2,yarn:4,policy",
        metavar="SCHEME[:FACTOR],…",
        help="with a factor always on; without, the factor that just covers each length; policy: whatever the server's "
        "policy chooses (default: %(default)s)",
    )
    parser.add_argument(
        "--measure",
        type=_measures,
        default="guard,nll",
        metavar="NAME,…",
        help=f"some of {', '.join(MEASURE_NAMES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("evaluation"),
        metavar="DIR",
        help="folder for report.md, results.json, plots, and cells.jsonl, from which a second start goes on "
        "(default: %(default)s)",
    )


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, the settings that matter here, and the options of `ropewalk calibrate`."""
    add_settings(parser, only=tuple(name for name in SETTINGS if name != "max_model_len"))
    _add_text(parser, documents=4)
    parser.add_argument(
        "--max-length", type=at_least(2), required=True, metavar="N", help="the longest sequence to serve, in tokens"
    )
    parser.add_argument(
        "--schemes", default="yarn,ntk,ntk-by-parts,linear", metavar="SCHEME,…", help="to try (default: %(default)s)"
    )
    parser.add_argument(
        "--factors",
        type=_factors,
        metavar="F,…",
        help="rungs to try, above 1; default: 1.25, 1.5, 2, 2.5, 3, 4, … up to --max-length",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("policy.toml"), metavar="FILE", help="policy file (default: %(default)s)"
    )
    parser.add_argument(
        "--cells",
        type=Path,
        metavar="FILE",
        help="what was computed, from which a second start goes on; default: FILE.cells.jsonl beside --out",
    )


def _add_text(parser: argparse.ArgumentParser, documents: int) -> None:
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="UTF-8 texts; default: the language reference that comes with Python",
    )
    parser.add_argument(
        "--documents",
        type=at_least(1),
        default=documents,
        metavar="N",
        help="cut from the texts, at most (default: %(default)s)",
    )


def _numbers(text: str) -> tuple[int, ...]:
    """Lengths, rising, each once."""
    return tuple(sorted(set(map(at_least(8), text.split(",")))))


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not 1 < factors[0] <= factors[-1] < float("inf"):
        raise argparse.ArgumentTypeError(f"factors are above 1, they are {text}")
    return tuple(factors)


def _measures(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in MEASURE_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(MEASURE_NAMES)}")
    return names
