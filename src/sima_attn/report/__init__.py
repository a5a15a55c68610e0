"""Rows, tables, figures, pictures, timing and progress bars, for all packages that measure or plot."""
