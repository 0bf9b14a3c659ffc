"""How each implementation, ours and the peers', runs a call: as passes over named buffers."""
