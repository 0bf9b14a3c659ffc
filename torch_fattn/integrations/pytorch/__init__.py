"""Drop-in replacement of torch's attention: `sdpa`, `install`, the report, and the route of a call."""
