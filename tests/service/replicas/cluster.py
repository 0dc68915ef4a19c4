"""`ropewalk serve` on a Ray cluster of two nodes of one core each, all on this machine. Run as a program: Ray, and what
it warns of, stay out of the tests' own process."""

import os
import sys

from ray.cluster_utils import Cluster

from service.__main__ import main

if __name__ == "__main__":
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        main(["serve", *sys.argv[1:]])
    finally:
        cluster.shutdown()
