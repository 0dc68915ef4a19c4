"""Several replicas of the server behind one address, on Ray Serve.

The shape, from the client inwards:

    Ray's HTTP proxy → front → router → replica (one of N) → engine

- A **replica** (`replica`) is the whole server: the application of `service.app` with its engine, called in its own
  process instead of over HTTP. So validation, keys, errors, streams, limits and metrics are those of a single server,
  byte for byte, and nothing of them exists twice.
- The **front** (`front`, `forwarding`) is the ingress: it reads a request's body, finds out how the request begins
  (`beginning`: its tokens and the plan it will get), hands the request over as it came and the answer back as it comes.
  A client that goes away cancels the request in its replica. A replica that dies takes no request along in silence:
  what has not been answered yet is tried once more elsewhere, a stream that has begun ends with an error.
- The **router** (`router`, `placing`) runs beside the front. It sends a request to the replica that holds its beginning
  under its plan, one under a long plan to the most free cache, any other to the less busy of two.

Why not the proxy's router alone: it sees a request's headers, not its body, so no prompt. Why not the engine alone as
the replica: its requests, grammars and events would have to cross processes one by one, and the API would be bound to
the way there. The price is a second tokenisation in the front (and none of the weights).

`Ray` is imported by `router`, `calling`, `application` and `run` alone.
"""
