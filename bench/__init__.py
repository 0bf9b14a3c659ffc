"""Measures torch_fattn and its peers on this machine.

This package is part of the checkout, not of the wheel. `python -m torch_fattn bench` runs it. Each room uses
only the rooms before it, which tools/rooms.py checks: cases, peers, backends, models, report, __main__.
"""
