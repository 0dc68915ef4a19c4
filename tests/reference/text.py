"""Real English text that comes with every Python: the language reference that `help()` shows."""

from pydoc_data.topics import topics


def real_text() -> str:
    """About 700,000 characters, always in the same order."""
    return "\n\n".join(topics[name] for name in sorted(topics))
