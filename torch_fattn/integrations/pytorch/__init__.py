"""The drop-in for torch's own attention: `sdpa`, `install`, the report, and the route of a call."""
