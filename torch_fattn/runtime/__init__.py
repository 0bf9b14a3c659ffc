"""What every room stands on: the compiled extension, its folder for caches, versions, and argument checks."""
