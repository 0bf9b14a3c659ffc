"""How each implementation, ours and the peers', runs a case: as passes over named buffers."""
