"""The converter's version, apart from the converter, which takes seconds to import."""

CONVERTER_VERSION = 2
"""Part of every cache key. Raise it whenever the same file would now give another folder."""
