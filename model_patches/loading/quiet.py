"""Silence for transformers' progress bars and advice while one of its calls runs.

Knows transformers' logging switches, which are global, and puts them back.
"""

import logging as levels
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and nothing below an error on stderr within the block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(levels.ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
