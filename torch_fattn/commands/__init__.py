"""The commands of `python -m torch_fattn`."""
