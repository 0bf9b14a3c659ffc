"""Times on an NVIDIA GPU: the Metal sources are compiled on one machine, and run on another."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "_cuda"  # what build.py compiled
