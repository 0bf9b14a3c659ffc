"""The operators as Python functions, and what `torch.compile` needs of them."""
