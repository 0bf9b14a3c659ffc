"""Drop-in replacement for torch's attention: `sdpa`, `install`, the report, and the route of a call."""
