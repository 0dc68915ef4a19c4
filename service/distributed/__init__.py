"""A model that is split over several processes, its ranks: rank 0 serves and decides, the others compute with it."""
