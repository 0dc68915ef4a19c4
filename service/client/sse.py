"""Server-sent events, from bytes as they come to the data of each event. Knows no JSON, no HTTP and no API.

Source: WHATWG HTML, "Server-sent events", section 9.2.6, "Interpreting an event stream". Names, ids and retry times of
events are read over: the API uses none of them.
"""

import re
from collections.abc import Iterator

LINE_END = re.compile(rb"\r\n|\n|\r")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseDecoder:
    """Takes the bytes of one stream, cut anywhere, and gives the data of each event that is complete.

    Bytes are split into lines before they are decoded, so that no cut falls into a character. What follows the last
    blank line when the stream ends is no event.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._after_cr = False
        self._at_start = True

    def feed(self, received: bytes) -> Iterator[str]:
        """Take what came next.

        Args:
            received: any number of bytes.

        Yields:
            The data of each event that they complete, its lines joined by line feeds.
        """
        for line in self._lines(received):
            if line:
                self._read(line)
            elif self._data:
                data, self._data = "\n".join(self._data), []
                yield data

    def _lines(self, received: bytes) -> Iterator[str]:
        """Complete lines. A carriage return ends its line at once; a line feed that comes next belongs to it."""
        if not received:
            return
        ends_in_cr = received.endswith(b"\r")
        if self._after_cr:
            received = received.removeprefix(b"\n")
        self._after_cr = ends_in_cr
        *whole, rest = LINE_END.split(received)
        for piece in whole:
            self._line += piece
            yield self._take_line()
        self._line += rest

    def _take_line(self) -> str:
        line = bytes(self._line)
        self._line.clear()
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        return line.decode(errors="replace")

    def _read(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
