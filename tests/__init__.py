"""The tests, in folders like those of the package. What several files share stands in this folder."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
