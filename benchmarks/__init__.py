"""Figures for docs/evaluation.md; they print and assert nothing about time."""
