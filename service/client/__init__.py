"""A client of the API, blocking and for asyncio. Imports no torch.

with Client("http://127.0.0.1:8000") as client:
    print(client.generate(prompt="The capital of France is", max_tokens=8).text)
    with client.stream_chat(messages=[{"role": "user", "content": "Hello"}]) as stream:
        for chunk in stream:
            ...
"""

from service.client.asynchronous import AsyncClient, AsyncStream
from service.client.blocking import Client, Stream
from service.client.errors import ApiError, BrokenAnswerError, ClientError, UnreachableError
from service.client.retrying import Clock

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncStream",
    "BrokenAnswerError",
    "Client",
    "ClientError",
    "Clock",
    "Stream",
    "UnreachableError",
]
