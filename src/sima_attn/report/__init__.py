"""Rows, tables, figures, timing and progress bars, for all packages that measure or plot."""
