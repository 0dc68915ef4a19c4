"""CPU operators in C++. `build.load` makes them known to torch, `ops` calls them; without them torch's own serve."""
