"""Other libraries' hooks for `torch_fattn`. Each module is imported only by whom uses it."""
