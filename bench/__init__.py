"""The measuring bench of torch_fattn: what a call costs, beside its peers, on the machine at hand.

A package of the checkout, not of the wheel; `python -m torch_fattn bench` finds it and hands over.
"""
