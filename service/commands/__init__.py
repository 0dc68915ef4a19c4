"""What the commands of `ropewalk` do: one file each, so that none waits for what another imports."""
