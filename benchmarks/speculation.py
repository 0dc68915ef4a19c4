"""What guesses from a request's own text are worth: seconds and accepted guesses, with and without, on two texts.

    python benchmarks/speculation.py [--drafts 8] [--repetitions 3]

A chat that asks for a passage to be repeated with a small change quotes it; one that asks for a story does not. Both
run greedily through the serving engine, in turn with and without guesses; figures are medians. Whether the texts are
the same either way is told.
"""

import argparse
import json
import statistics
import threading
import time
from pydoc_data.topics import topics

from prometheus_client import CollectorRegistry

from service import build
from service.build import InspectedModel, LoadedServer
from service.core import Event, FinishEvent, SamplingParams, Sequence, TokenEvent
from service.metrics import Metrics
from service.settings import Settings

TOKENS = 200
PASSAGE = topics["assert"][:1200]
CHATS = {
    "edit": f"Repeat this text exactly, but write 'claim' for 'assert':\n\n{PASSAGE}",
    "story": "Tell me a long story about a ship with seven sails.",
}


def generate(loaded: LoadedServer, inspected: InspectedModel, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds from the first token to the last, and the tokens."""
    tokens: list[int] = []
    times: list[float] = []
    ended = threading.Event()

    def deliver(event: Event) -> None:
        if isinstance(event, TokenEvent):
            tokens.append(event.token_id)
            times.append(time.perf_counter())
        if isinstance(event, FinishEvent):
            ended.set()

    choice = inspected.policy.choose(len(prompt), TOKENS)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    loaded.engine.submit([Sequence("a", prompt, choice, sampling, deliver)])
    ended.wait()
    return times[-1] - times[0], tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    servers = {}
    for drafts in (0, arguments.drafts):
        settings = Settings(num_speculative_tokens=drafts, kv_cache_memory=2**30)
        inspected, metrics = build.inspect(settings), Metrics(CollectorRegistry())
        servers[drafts] = (build.load(settings, inspected, metrics), inspected, metrics)
    for name, text in CHATS.items():
        loaded = servers[0][0]
        rendered = loaded.chat_template.render([{"role": "user", "content": text}])
        prompt = loaded.tokenizer.backend_tokenizer.encode(rendered, add_special_tokens=False).ids
        seconds: dict[int, list[float]] = {drafts: [] for drafts in servers}
        told: dict[int, list[int]] = {}
        for _ in range(arguments.repetitions):
            for drafts, (loaded, inspected, _metrics) in servers.items():
                taken, told[drafts] = generate(loaded, inspected, prompt)
                seconds[drafts].append(taken)
        without, with_drafts = (statistics.median(values) for values in seconds.values())
        read = servers[arguments.drafts][2].registry.get_sample_value
        row = {
            "text": name,
            "tokens": len(told[0]),
            "seconds": [round(without, 3), round(with_drafts, 3)],
            "ratio": round(with_drafts / without, 3),
            "same tokens": told[0] == told[arguments.drafts],
            "guesses so far": read("ropewalk_spec_decode_num_draft_tokens_total"),
            "accepted so far": read("ropewalk_spec_decode_num_accepted_tokens_total"),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
