"""The first thing that runs in a rank that rank 0 has started. Imports torch only once the process is set up."""

from multiprocessing.connection import Connection

from service import process
from service.distributed.place import Place


def run(place: Place, connection: Connection, store_path: str) -> None:
    """Be such a rank.

    Args:
        place: of this process.
        connection: to rank 0.
        store_path: the file of the store that all ranks share.
    """
    process.set_up()
    from torch._C._distributed_c10d import FileStore

    from service.distributed.follower import serve_leader

    serve_leader(place, connection, lambda: FileStore(store_path, place.size))
