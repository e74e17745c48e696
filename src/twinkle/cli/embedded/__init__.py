"""The whole service on one machine: its processes, which of them run, and what keeps them alive."""
