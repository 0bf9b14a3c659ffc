"""The lowest layer: the compiled extension, its cache folder, versions, and argument checks."""
