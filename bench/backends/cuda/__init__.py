"""Times calls on an NVIDIA GPU. build.py compiles the Metal sources; run.py runs them on another machine."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "_cuda"  # travels between the two
